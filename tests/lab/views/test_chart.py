"""The flow charts of the guide: every question, answer and end of the source is drawn, each below what leads to it."""

import re
from pathlib import Path

import pytest

from lab.views.chart import chart

ROOT = Path(__file__).parents[3]
SMALL = """flowchart TD
  a{"Is <it> so?"} -- "yes & more" --> fsdp
  a -- "no" --> b{"And now?"}
  b --> single
"""


def test_a_chart_is_nested_lists_of_boxes():
  assert chart(SMALL, {"fsdp": "#strategy-fsdp"}) == (
    '<ul class="chart"><li><span class="question">Is &lt;it&gt; so?</span><ul>'
    '<li><span class="answer">yes &amp; more</span><span class="result"><a href="#strategy-fsdp">fsdp</a></span></li>'
    '<li><span class="answer">no</span><span class="question">And now?</span><ul>'
    '<li><span class="result">single</span></li></ul></li></ul></li></ul>'
  )


def test_the_chart_of_the_guide_has_every_arrow():
  """Its source is Mermaid, which GitHub draws."""
  (source,) = re.findall(r"^```mermaid\n(.*?)^```", (ROOT / "docs/explain.md").read_text(), re.DOTALL | re.MULTILINE)
  drawn = chart(source, {})
  assert drawn.count('class="answer"') == source.count("-->")
  assert re.findall(r'class="answer">(.*?)<', drawn).count("yes") == source.count('"yes"')


@pytest.mark.parametrize(
  "line, said",
  [
    ("  a => c", "'a => c' of a chart is not a node or an arrow"),
    ("  b --> fsdp", "'fsdp' .* arrows from 'a' and from"),
  ],
)
def test_what_cannot_be_drawn_is_refused(line: str, said: str):
  with pytest.raises(ValueError, match=said):
    chart(SMALL + line, {})
