"""The roofline: peaks, links and what binds."""

import dataclasses
import types

import numpy as np
import pytest
from helpers import program

import strategies
from analysis import theory
from analysis.case import Case
from analysis.roofline import Roofline, bandwidth, leaves_links
from analysis.search import spread
from benchmarks import expected as benchmark
from runtime.hardware import Chip, chip

TORUS = Chip(flops=1e12, memory=1e9, bandwidth=1e9, link=10.0, torus=3, wraps=4)


@pytest.mark.parametrize(
  "extents, whole, links",
  [
    ([4, 1, 1], [4, 4, 4], 2),  # a closed ring: both directions
    ([2, 1, 1], [4, 4, 4], 1),  # part of a ring
    ([4, 4, 4], [4, 4, 4], 6),
    ([4, 4, 1], [4, 4, 4], 4),
    ([2, 2, 2], [2, 2, 2], 3),  # too small to be closed
    ([1, 4, 4], [2, 4, 4], 2),  # a torus is closed in all dimensions or in none
    ([4, 4, 4], [4, 4, 8], 5),
    ([1, 1, 1], [4, 4, 4], 1),
  ],
)
def test_bandwidth_grows_with_the_dimensions_a_group_spans(extents: list[int], whole: list[int], links: int):
  assert bandwidth(TORUS, extents, whole) == links * TORUS.link


def test_behind_a_switch_every_group_has_the_full_bandwidth():
  switched = chip("NVIDIA H200")
  assert switched is not None
  assert bandwidth(switched, [8], [8]) == bandwidth(switched, [2], [8]) == switched.link


def test_a_group_in_several_slices_leaves_the_links():
  arranged = np.array([[types.SimpleNamespace(coords=(x, 0, 0), slice_index=y) for x in range(4)] for y in range(2)])
  mesh = types.SimpleNamespace(devices=arranged, axis_names=("replica", "data"))
  assert not leaves_links(mesh, ("data",))
  assert leaves_links(mesh, ("replica",))
  assert leaves_links(mesh, ("replica", "data"))


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
def test_mesh_axes_fill_dimensions_of_the_torus(mesh: dict, shape: tuple, spans: dict):
  assert spread(mesh, shape) == spans


def test_waiting_is_added_to_what_overlaps():
  times = Roofline(compute=2, memory=1, communication=1.5, waiting=1)
  assert times.seconds == 3
  assert times.binds == "communication"  # 2.5 in all


def test_closed_dimensions_of_a_slice():
  assert TORUS.closed((4, 4, 8)) == [True] * 3
  assert TORUS.closed((2, 4, 4)) == [False] * 3
  flat = chip("TPU v5e")
  assert flat is not None
  assert flat.closed((8, 16)) == [False, True]


@dataclasses.dataclass(frozen=True)
class Device:
  """A device at a position in a torus."""

  coords: tuple[int, ...]
  device_kind: str = "made up"
  platform: str = "tpu"


def test_a_benchmark_predicts_collectives_at_the_bandwidth_of_their_links(monkeypatch: pytest.MonkeyPatch):
  """On 4×2 devices, a group of 4 in a row can use one link of each device, and a group of all 8 can use two."""
  slow = Chip(flops=1e30, memory=1e9, bandwidth=1e30, link=10.0, torus=2, wraps=16)
  monkeypatch.setattr(benchmark, "chip", lambda kind: slow)
  monkeypatch.setattr(benchmark, "peak_flops", lambda device, dtype: slow.flops)
  arranged = np.array([[Device((x, y, 0)) for x in range(4)] for y in range(2)])
  layout = strategies.layout_of("hsdp").on(replica=2, data=4)
  mesh = types.SimpleNamespace(devices=arranged, axis_names=("replica", "data"))
  runner = types.SimpleNamespace(layout=layout, mesh=mesh, program=program(), schedule=None, reduces_once=False)
  links = {("data",): 1, ("replica",): 1, ("replica", "data"): 2}
  rows = theory.sent(Case.of(runner, 16, "tpu"))
  assert {row.axes for row in rows} == set(links)
  seconds = sum(row.bytes / links[row.axes] / slow.link for row in rows)
  assert benchmark.expected_step(runner, 16, None)["seconds"] == pytest.approx(seconds)
