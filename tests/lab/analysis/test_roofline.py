"""The roofline: what binds, and that a benchmark's prediction uses the links of its devices."""

import dataclasses
import types

import numpy as np
import pytest
from helpers import program

import strategies
from lab.analysis import theory
from lab.analysis.case import Case
from lab.analysis.roofline import Roofline
from lab.benchmarks import predicted as benchmark
from runtime.hardware import Chip
from strategies.execution.transfers import Transfers

FIGURES = Chip(flops=1e12, memory=1e9, bandwidth=1e9, link=10.0)


def test_the_largest_time_binds():
  assert Roofline(compute=2, memory=1, communication=1).binds == "compute"
  assert Roofline(compute=1, memory=2, communication=1).binds == "memory"
  assert Roofline(compute=2, memory=3, communication=1).seconds == 3
  assert Roofline(compute=2, memory=3, communication=1, idle=0.5).seconds == 4  # stages wait half of the time
  assert Roofline(compute=2, memory=1, communication=1).mfu(model_flops=1e12, chip=FIGURES) == 0.5


def test_only_exposed_communication_takes_time():
  """Hidden communication takes none, however long it is. What is exposed is added to the longer of the other two."""
  assert Roofline(compute=2, memory=1, communication=9).seconds == 2
  assert Roofline(compute=2, memory=1, communication=9).binds == "compute"
  times = Roofline(compute=2, memory=1, communication=9, exposed=2.5)
  assert times.seconds == 4.5
  assert times.binds == "communication"
  idle = Roofline(compute=2, memory=1, communication=9, exposed=2.5, idle=0.5)
  assert idle.seconds == 6.5
  assert idle.binds == "compute"  # with the waiting of the stages, 4 seconds


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
  runner = types.SimpleNamespace(
    layout=layout, mesh=mesh, program=program(), schedule=None, transfers=Transfers.of(layout)
  )
  links = {("data",): 1, ("replica",): 1, ("replica", "data"): 2}
  rows = theory.sent(Case.of(runner, 16, "tpu"))
  assert {row.axes for row in rows} == set(links)
  seconds = sum(row.bytes / links[row.axes] / slow.link for row in rows)
  assert benchmark.predicted_step(runner, 16)["seconds"] == pytest.approx(seconds)
