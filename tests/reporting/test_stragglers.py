"""The slowest process is found by how long its host works in a step, because the step itself takes all equally long."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from reporting import heartbeat, progress
from reporting.heartbeat import Beat, Heartbeat
from reporting.metrics import Writer, read
from reporting.speed import Clock, Meter
from reporting.stragglers import slowest
from training.loop import LoopState, StepPlan


def paces(*on_host: Any, step_time: float = 0.3) -> list[Beat]:
  return [{"host": f"node{i}", "on_host": on, "step_time": step_time} for i, on in enumerate(on_host)]


def test_the_slowest_of_a_job_is_named():
  found = slowest(paces(0.12, 0.12, 0.1, 0.252))
  assert found.delays
  assert found.line == "slowest   process 3 on node3: 2.1 x the median of 0.12 s, with 0.25 s of work in a step"


@pytest.mark.parametrize(
  "found",
  [
    paces(0.12, 0.12, 0.1, 0.17),  # not by much
    paces(0.02, 0.02, 0.01, 0.1),  # the devices work for longer
    paces(0.0, 0.0, 0.0),
  ],
)
def test_a_process_that_delays_nobody_is_not_named(found: list[Beat]):
  assert not slowest(found).delays


@pytest.mark.parametrize("broken", [None, "1", -1.0, math.nan, 10**400, [], True])
def test_processes_without_a_time_are_left_out(broken: Any):
  assert slowest(paces(0.1, broken)) is None
  assert slowest(paces(0.1, broken, 0.2)).process == 2
  assert slowest(paces(0.1, 0.1, step_time=broken)) is None
  assert slowest([{"host": "node0"}] * 8) is None


def test_waiting_for_devices_is_not_work_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """A step of which a process waits 3 s for its devices, after 1 s in which it read and started the step."""
  now, clock = [0.0], Clock()
  for module in (progress.time, heartbeat.time):
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

  class Awaited:
    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
      now[0] += 3
      return np.zeros((), bool)

  ours = Heartbeat(tmp_path, 0, clock, 1000.0)
  silent = SimpleNamespace(progress=lambda step: None)
  plan = StepPlan(100, 0, 50, 0, 1, 0, 1.0)
  followed = progress.Progress(clock, None, silent, None, plan, [], LoopState(), ours, None, None)
  for step in range(1, 4):
    with clock("data"):
      now[0] += 1
    followed.read(step, {"loss": 2.0, "skipped": Awaited()})
  ours.write()
  beat = json.loads((tmp_path / "heartbeats" / "0.json").read_text())
  assert (beat["step_time"], beat["on_host"]) == (4.0, 1.0)


def test_between_lines_a_step_reads_one_number(tmp_path: Path):
  """Each array that a host reads costs it 0.1 ms, a tenth of what it does in a step."""
  seen: list[str] = []

  class Metric:
    def __init__(self, name: str):
      self.name = name

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
      seen.append(self.name)
      return np.zeros((), np.float32)

  clock, plan = Clock(), StepPlan(100, 0, 4, 0, 1, 0, 1.0)
  meter = Meter(clock, items=1, unit="tokens", flops=1.0, palm_flops=1.0, peak=None)
  with Writer(tmp_path, LoopState(), plan.last) as writer:
    heartbeat, status = Heartbeat(tmp_path, 0, clock, 0), SimpleNamespace(update=lambda *_: None)
    followed = progress.Progress(
      clock, meter, writer, None, plan, jax.devices()[:1], LoopState(), heartbeat, status, None
    )
    for step in range(1, 9):
      followed.read(step, {name: Metric(name) for name in ("loss", "grad_norm", "learning_rate", "skipped")})
  assert [line["step"] for line in read(writer.path)] == [4, 8]
  assert (len(seen), seen.count("skipped"), seen.count("loss")) == (8 + 2 * 3, 8, 2)
