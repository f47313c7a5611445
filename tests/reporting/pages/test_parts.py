"""The parts of pages: what is drawn is what was given, nothing is lost, and text stays text."""

import json
import math
import random
import re
from html import unescape

import pytest

from reporting.pages import document
from reporting.pages.axes import Scale, scales
from reporting.pages.bars import grouped, stacked
from reporting.pages.devices import Array, placement
from reporting.pages.element import card, figure, section, table, tag, tiles
from reporting.pages.lines import Line, lines, strip, thinned
from reporting.pages.scatter import Point, scatter
from reporting.pages.schedule import schedule
from reporting.pages.tracks import Piece, tracks

EVIL = "<script>alert('x')</script> & \"quoted\""


def test_text_never_becomes_markup():
  parts = [
    lines(EVIL, [Line(EVIL, [(1, 2.0), (2, 3.0)]), Line("b", [(1, 1.0)])], EVIL, x=EVIL),
    strip(EVIL, 4, {EVIL: [(1, EVIL, 0.0)]}, x=EVIL),
    stacked(EVIL, [(EVIL, {EVIL: 1.0})], limit=(EVIL, 2.0)),
    grouped(EVIL, [(EVIL, {EVIL: 1.0})]),
    scatter(EVIL, [Point(1, 2, EVIL, EVIL)], EVIL, EVIL, EVIL, limit=(EVIL, 3.0)),
    placement(EVIL, {"data": 2}, [0, 1], [Array(EVIL, EVIL, (4,), (EVIL,), ("data",), EVIL)]),
    schedule(EVIL, [[[("forward", EVIL)]]], EVIL),
    tracks(EVIL, [Piece(EVIL, 0.0, 1.0, EVIL, EVIL)], [EVIL], 1.0, EVIL, lambda _: EVIL),
    section(EVIL, card(EVIL, table((EVIL,), [(EVIL,)])), tiles([(EVIL, EVIL)]), figure(EVIL, "", EVIL), about=EVIL),
  ]
  assert all("<script" not in part and "alert" in part for part in parts)
  page = document(EVIL, EVIL, *parts)
  assert page.count("<script") == 1  # page.js


def test_attributes_are_escaped_named_and_left_out():
  assert tag("a", "x", class_="b", data_n=0, title='"<', hidden=True, id=None, open=False) == (
    '<a class="b" data-n="0" title="&quot;&lt;" hidden>x</a>'
  )


@pytest.mark.parametrize("count", [1, 399, 400, 401, 5000, 123_456])
def test_a_thinned_line_has_the_extremes_and_only_real_points(count: int):
  make = random.Random(count)
  points = [(float(i), None if make.random() < 0.001 else make.gauss(0, 1)) for i in range(count)]
  kept = thinned(points, 400)
  finite = [y for _, y in points if y is not None]
  drawn = [y for _, y in kept if y is not None]
  assert set(kept) <= set(points)
  assert kept == sorted(kept, key=lambda p: p[0])
  assert (kept[0], kept[-1]) == (points[0], points[-1])
  assert (min(drawn), max(drawn)) == (min(finite), max(finite))
  assert len(kept) <= 610
  assert any(y is None for _, y in kept) == any(y is None for _, y in points)
  if count <= 400:
    assert kept == points


def test_a_chart_holds_the_points_as_given_and_breaks_where_one_is_not_finite():
  points = [(10, 0.1 + 0.2), (20, None), (30, 1e-12), (40, 3.0)]
  made = lines("Loss", [Line("train", points)], "nats")
  data = json.loads(unescape(re.search('data-chart="([^"]*)"', made)[1]))
  assert [tuple(p) for p in data["series"][0]["points"]] == points
  (path,) = re.findall(r'<path d="([^"]*)" class="line', made)
  assert [step[0] for step in re.findall("[ML][^ML]*", path)] == ["M", "M", "L"]
  assert "1 not finite" in made
  assert not lines("Loss", [Line("train", [(1, None)])])
  assert not lines("Loss", [])


@pytest.mark.parametrize(
  ("low", "high"), [(0.0, 1.0), (-3.0, 7.0), (2.4, 2.5), (1e-9, 3e-9), (0, 123_456_789), (-5, -4)]
)
def test_round_numbers_lie_in_the_range(low: float, high: float):
  ticks = Scale(low, high, 0, 100).ticks()
  assert 2 <= len(ticks) <= 7
  assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in ticks)
  steps = [b - a for a, b in zip(ticks, ticks[1:], strict=False)]
  assert all(math.isclose(step, steps[0], rel_tol=1e-3) for step in steps)


def test_logarithmic_scales_and_single_values():
  across = Scale(1, 1000, 0, 300, log=True)
  assert [across(x) for x in (1, 10, 1000)] == pytest.approx([0, 100, 300])
  assert across.ticks() == [1, 10, 100, 1000]
  for values in ([5.0], [0.0], [-2.0], [3.0, 3.0], []):
    x, y = scales(values, values)
    assert x.low < x.high
    assert y.low < y.high


def test_bars_are_as_long_as_their_numbers():
  made = stacked("Memory", [("predicted", {"state": 30.0, "rest": 10.0}), ("compiled", {"all": 20.0})])
  widths = [
    float(w) for w in re.findall(r'<rect class="f\d" data-label="[^"]*" x="[\d.]*" y="[\d.]*" width="([\d.]*)"', made)
  ]
  assert widths[0] / widths[1] == pytest.approx(3, rel=1e-2)
  assert widths[2] / widths[1] == pytest.approx(2, rel=1e-2)
  assert "predicted: 40; compiled: 20." in made
  assert not stacked("none", [])
  assert not grouped("none", [])


def test_a_mesh_of_many_devices_is_drawn_in_part_and_says_so():
  made = placement(
    "Mesh", {"stage": 8, "data": 64, "model": 4}, range(2048), [Array("w", "w", (8,), ("layers",), ("stage",), "")]
  )
  assert made.count("<button") == 256
  assert "2,048 devices in a mesh of stage=8 × data=64 × model=4; the first 256 are drawn." in made
