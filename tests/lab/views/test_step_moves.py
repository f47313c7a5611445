"""The recorded moves of each strategy: they send what theory says, and every one has a column that says so."""

import json
import re
from collections import Counter
from html import unescape

import pytest

import strategies
from lab.analysis import theory
from lab.analysis.moves import Move
from lab.analysis.topology import machine_of
from lab.benchmarks import moves, predictions
from lab.views import guide_pages, step_moves

RECORD = json.loads(moves.FILE.read_text())


def test_every_strategy_of_the_readme_is_recorded():
  """One of your own need not be."""
  listed = set(re.findall(r"\(strategies/(\w+)\.py\)", (guide_pages.ROOT / "README.md").read_text()))
  assert listed - set(moves.WITHOUT) == set(RECORD["strategies"]) <= set(strategies.names())


@pytest.mark.parametrize("name", RECORD["strategies"])
def test_the_recorded_moves_send_what_theory_says(name: str):
  """So a record of another layout or model fails. Messages that take almost no time are left out, as the last one of a
  pipeline: 0.4% of what three_d sends.
  """
  step = predictions.case_on(machine_of(moves.TOPOLOGY), predictions.config(moves.case(name)))
  expected, sent = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
  for message in theory.sent(step):
    expected[message.axes] += message.bytes
  for move in (Move(*fields) for fields in RECORD["strategies"][name]["moves"]):
    if move.kind != "compute":
      sent[tuple(move.over)] += move.sent * move.times
  assert sum(sent.values()) == pytest.approx(sum(expected.values()), rel=5e-3)
  assert {axes for axes, size in expected.items() if size > 0.01 * sum(expected.values())} <= set(sent)


@pytest.mark.parametrize("name", RECORD["strategies"])
def test_the_most_memory_is_near_what_the_compiler_says(name: str):
  """It is more where a loop or kernel has several results, which count until the last of them is read."""
  row = RECORD["strategies"][name]
  assert 0.98 < max(Move(*fields).memory for fields in row["moves"]) / row["memory"] < 1.25


def test_a_column_is_as_high_as_the_memory_and_says_what_moves():
  found = [
    Move("", 1, "compute", ("embed",), seconds=1e-3, memory=10_000),
    Move("forward", 4, "all-gather", ("f32[8]", "f32[16]"), ("data",), 2, 1e6, 2e-3, 1e-3, 20_000),
    Move("forward", 4, "compute", (), seconds=1e-3, memory=5_000),
  ]
  drawn = unescape(step_moves.picture(found, 19_000))
  assert [re.findall("<t[hd].*?>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", drawn)][1:] == [
    ["1 of 3", "outside of loops", "computes embed for 1.0 ms. 10.00 kB in memory"],
    [
      "2 of 3",
      "forward (one of 4 rounds)",
      "2 times all-gather over data of f32[8], f32[16]: sends 1.00 MB in 2.0 ms, and kernels wait for 1.0 ms. "
      "20.00 kB in memory",
    ],
    ["3 of 3", "forward (one of 4 rounds)", "computes other parts for 1.0 ms. 5.00 kB in memory"],
  ]
  heights = [float(height) for height in re.findall(r'<rect class="f\d" [^>]* height="([\d.]+)"', drawn)]
  assert [height / heights[1] for height in heights] == pytest.approx([0.5, 1, 0.25], rel=0.01)
  assert "at most 20.00 kB. The compiler's own figure is 19.00 kB" in drawn
  assert re.findall(r"<li>.*?</svg>(.*?)</li>", drawn) == ["computes", "gathers"]
  assert "forward, 4 times" in drawn


def test_a_strategy_without_a_record_has_no_picture():
  assert step_moves.view(RECORD, "own") == ""
