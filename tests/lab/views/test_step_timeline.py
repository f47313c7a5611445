"""The timeline of a step: the recorded one has the seconds of its step, and pictures show what was noted."""

import json
import re
from html import unescape

import pytest

from lab.analysis.overlap import Overlap, Span
from lab.analysis.spans import panels, seconds
from lab.benchmarks import predictions, timeline
from lab.views import step_timeline

RECORD = json.loads(timeline.FILE.read_text())
# Two kernels of 2 ms, a loop of three rounds with a kernel of 4 ms, and another loop that is too short to be drawn.
MADE_UP = Overlap(
  (),
  16.01e-3,
  (
    Span("kernel", 0.0, 2e-3, 1, "p", "jit(f)/jvp(mlp)/dot"),
    Span("sent", 2e-3, 5e-3, 1, "g", "jit(f)/jvp(attention)/<script>"),
    Span("exposed", 2e-3, 3e-3, 1, "g", "jit(f)/jvp(attention)/<script>"),
    Span("kernel", 3e-3, 7e-3, 3, "q", "jit(f)/jvp(attention)/dot", loop="while.1"),
    Span("loop", 3e-3, 15e-3, 3, "while.1", "jit(f)/jvp()/while", round=4e-3),
    Span("kernel", 15e-3, 15.01e-3, 1, "s", loop="while.2"),
    Span("loop", 15e-3, 15.01e-3, 1, "while.2", "jit(f)/optimizer/while", round=0.01e-3),
    Span("kernel", 15.01e-3, 17.01e-3, 1, "r", "jit(f)/optimizer/mul"),
  ),
)


@pytest.mark.parametrize("choice", ["default", "recommended"])
def test_the_recorded_spans_take_the_seconds_of_the_step(choice: str):
  """And these are the seconds that the record of the predictions has of the same step."""
  found = RECORD["choices"][choice]
  for kind, whole in (("kernel", "kernels"), ("sent", "sent"), ("exposed", "exposed")):
    assert seconds(found["panels"], kind) == pytest.approx(found[whole], rel=1e-4)
  cases = json.loads(predictions.RECORDS["tpu"].read_text())["cases"]
  (same,) = (case for case in cases if case["case"] == list(timeline.CASE) == RECORD["case"])
  assert found["exposed"] == pytest.approx(same["exposed"][choice])
  assert {name for panel in found["panels"] if (name := panel["name"])} >= {"step", "forward", "backward"}


def test_a_made_up_step_is_drawn():
  drawn = unescape(step_timeline.figures({"as made up": panels(MADE_UP)}))
  titles = re.findall("<h3>(.*?)</h3>", drawn)
  assert titles == ["The whole step, as made up", "One of 3 rounds of forward, as made up"]
  labels = re.findall(r'data-label="([^"]*)"', drawn)
  assert labels == [
    "forward: 12.0 ms from 3.0 ms",
    "optimizer: 10.0 µs from 15.0 ms",
    "forward/mlp/dot: 2.0 ms from 0.0 µs",
    "optimizer/mul: 2.0 ms from 15.0 ms",
    "forward/attention/<script>: 3.0 ms from 2.0 ms",
    "forward/attention/<script>: 1.0 ms from 2.0 ms",
    "forward/attention/dot: 4.0 ms from 0.0 µs",
  ]
  assert "The whole step takes 17.0 ms: outside of loops, kernels run for 4.0 ms, links for 3.0 ms" in drawn
  assert "One of 3 rounds of forward takes 4.0 ms: kernels run for 4.0 ms, links for 0.0 µs" in drawn
  assert re.findall(r'class="on">(.*?)</text>', drawn) == ["forward, 3 rounds"]
  wide = [float(width) for width in re.findall(r'<rect height="24" .*? width="([\d.]+)"', drawn)]
  assert wide[0] == pytest.approx(6 * wide[2], rel=0.01)  # twelve milliseconds, and two


def test_pictures_of_one_panel_have_one_scale():
  short = Overlap((), 1e-3, (Span("kernel", 0.0, 1e-3, 1, "p"),))
  long = Overlap((), 4e-3, (Span("kernel", 0.0, 4e-3, 1, "p"),))
  drawn = step_timeline.figures({"short": panels(short), "long": panels(long)})
  wide = [float(width) for width in re.findall(r'<rect height="24" .*? width="([\d.]+)"', drawn)]
  assert wide[1] == pytest.approx(4 * wide[0], rel=0.01)
