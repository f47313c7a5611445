"""Jobs of several processes in a bucket, kept going by the supervisor: they heal as in a folder."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from buckets import Emulator, emulator
from helpers import measured
from jobs import flags

from checkpointing import reading
from job import supervisor
from job.supervisor import Policy, supervise
from reporting import heartbeat, recorded
from runtime.storage.bucket import Folder, here, location
from runtime.storage.lease import LOCK
from tools import launch

pytestmark = pytest.mark.full
SHORT = {"steps": 40, "eval_every": 20, "checkpoint__every": 10, "runtime__heartbeat": 0.1}
OTHER = {"held": True, "owner": "process 7 on other since 2026-01-01 00:00:00", "home": "other", "count": 1}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
  with emulator("s3", tmp_path_factory.mktemp("s3")) as found:
    yield found


@pytest.fixture
def workdir(s3: Emulator, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
  monkeypatch.chdir(tmp_path)  # this machine
  found = location(f"{s3.url}/{request.node.originalname}", "workdir")
  assert isinstance(found, Folder)
  return found


def saved_and_trains(workdir: Folder, attempt: Any) -> dict[int, heartbeat.Beat]:
  """The signs of life of an attempt that has made steps after its last checkpoint; {} if it is not so."""
  beats, found = heartbeat.of_job(here(workdir)), reading.steps(workdir / reading.FOLDER)
  runs = {beat["pid"] for beat in beats.values()} == {job.pid for job in attempt.jobs}
  return beats if runs and found and all(beat["step"] > found[-1] for beat in beats.values()) else {}


@pytest.mark.parametrize("processes", [2])
def test_a_killed_process_is_restarted_from_the_bucket(
  processes: int, workdir: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """One of two processes is killed, then the other one. All losses equal those of an undisturbed job bit by bit."""
  assert launch.launch(processes, 2, flags("fsdp", tmp_path / "whole", **SHORT)) == 0
  capfd.readouterr()
  watch, to_kill = supervisor.Supervisor._hung, {1: 1, 2: 0}  # the process to kill, by the number of the start

  def hung(self: Any, attempt: Any, running: set[int], began: float) -> Any:
    if self.state.starts in to_kill and (beats := saved_and_trains(workdir, attempt)):
      os.kill(beats[to_kill.pop(self.state.starts)]["pid"], signal.SIGKILL)
    return watch(self, attempt, running, began)

  monkeypatch.setattr(supervisor.Supervisor, "_hung", hung)
  assert supervise(Policy(processes, 2), flags("fsdp", workdir, **SHORT)) == 0
  output = capfd.readouterr().out
  said = re.findall(r"restart   process (\d) of 2 on \S+ was killed by SIGKILL after step (\d+); starts again from "
                    r"checkpoint (\d+); log", output)  # fmt: skip
  assert [rank for rank, _, _ in said] == ["1", "0"], output
  resumed = re.findall(r"resumed   at step (\d+), saved by fsdp", output)
  assert resumed == [newest for _, _, newest in said]
  (workdir / "metrics.jsonl").download(tmp_path / "fetched" / "metrics.jsonl")
  assert measured(tmp_path / "fetched") == measured(tmp_path / "whole")
  assert reading.steps(workdir / reading.FOLDER) == reading.steps(tmp_path / "whole" / reading.FOLDER)
  events = [event["event"] for event in recorded.events(workdir)]
  assert events.count("killed") + events.count("failure") == 2


@pytest.mark.parametrize("processes", [2])
def test_a_job_that_another_one_replaces_ends_as_a_whole_and_for_good(
  processes: int, workdir: Folder, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  watch, written = supervisor.Supervisor._hung, list[int]()

  def hung(self: Any, attempt: Any, running: set[int], began: float) -> Any:
    if not written and saved_and_trains(workdir, attempt):
      (workdir / LOCK).write(json.dumps(OTHER).encode())
      written.append(1)
    return watch(self, attempt, running, began)

  monkeypatch.setattr(supervisor.Supervisor, "_hung", hung)
  assert supervise(Policy(processes, 2), flags("fsdp", workdir, **SHORT | {"steps": 100_000, "eval_every": 0})) == 2
  output = capfd.readouterr().out
  assert written
  lines = [line for line in output.splitlines() if "error" in line or "Traceback" in line or "restart" in line]
  sentence = f"error: workdir={str(workdir)!r} was taken over by another run ({OTHER['owner']}), so this run ends"
  assert sorted(line.partition(", so this run ends")[0] + ", so this run ends" for line in lines) == [
    f"[{rank}] {sentence}" for rank in (0, 1)
  ], output
  assert json.loads((workdir / LOCK).read_bytes()) == OTHER
