"""The slowest process is found by how long its host works in a step, because the step itself takes all equally long."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from reporting import heartbeat, progress
from reporting.heartbeat import Beat, Heartbeat
from reporting.speed import Clock
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

  def device_get(metrics: dict) -> dict:
    now[0] += 3
    return metrics

  monkeypatch.setattr(jax, "device_get", device_get)
  ours = Heartbeat(tmp_path, 0, clock, 1000.0)
  silent = SimpleNamespace(progress=lambda step: None)
  plan = StepPlan(100, 0, 50, 0, 1, 0, 1.0)
  followed = progress.Progress(clock, None, silent, None, plan, [], LoopState(), ours, None, None)
  for step in range(1, 4):
    with clock("data"):
      now[0] += 1
    followed.read(step, {"loss": 2.0, "skipped": 0.0})
  ours.write()
  beat = json.loads((tmp_path / "heartbeats" / "0.json").read_text())
  assert (beat["step_time"], beat["on_host"]) == (4.0, 1.0)
