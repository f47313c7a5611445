"""Time at best: peaks, links and what binds."""

import pytest

from analysis.plan import spread
from analysis.roofline import Roofline, bandwidth
from training.hardware import Chip, chip

TORUS = Chip(flops=1e12, memory=1e9, bandwidth=1e9, link=10.0, torus=3, wraps=4)


@pytest.mark.parametrize(
  "extents, whole, links",
  [
    ([4, 1, 1], [4, 4, 4], 2),  # a closed ring: both ways
    ([2, 1, 1], [4, 4, 4], 1),  # a part of one
    ([4, 4, 4], [4, 4, 4], 6),
    ([4, 4, 1], [4, 4, 4], 4),
    ([2, 2, 2], [2, 2, 2], 3),  # too small to be closed
    ([1, 4, 4], [2, 4, 4], 2),  # closed in all dimensions or in none
    ([4, 4, 4], [4, 4, 8], 5),
    ([1, 1, 1], [4, 4, 4], 1),
  ],
)
def test_bandwidth_grows_with_the_dimensions_a_group_spans(extents: list[int], whole: list[int], links: int):
  assert bandwidth(TORUS, extents, whole) == links * TORUS.link


def test_behind_a_switch_every_group_has_all_links():
  switched = chip("NVIDIA H200")
  assert switched is not None
  assert bandwidth(switched, [8], [8]) == bandwidth(switched, [2], [8]) == switched.link


def test_the_largest_time_binds():
  assert Roofline(compute=2, memory=1, communication=1).binds == "compute"
  assert Roofline(compute=2, memory=3, communication=1).seconds == 3
  assert Roofline(compute=2, memory=3, communication=1, idle=0.5).seconds == 4  # stages wait half of the time
  assert Roofline(compute=2, memory=1, communication=1).mfu(model_flops=1e12, chip=TORUS) == 0.5


@pytest.mark.parametrize(
  "mesh, shape, spans",
  [
    ({"data": 16, "model": 4}, (4, 4, 4), {"model": [4, 1, 1], "data": [1, 4, 4]}),
    ({"data": 64}, (4, 4, 4), {"data": [4, 4, 4]}),
    ({"data": 32, "model": 2}, (4, 4, 4), {"model": [2, 1, 1], "data": [2, 4, 4]}),
    ({"replica": 2, "data": 8}, (4, 4), {"data": [4, 2], "replica": [1, 2]}),
  ],
)
def test_axes_fill_dimensions_of_the_torus(mesh: dict, shape: tuple, spans: dict):
  assert spread(mesh, shape) == spans
