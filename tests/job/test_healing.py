"""Real jobs that are hurt at random equal jobs that were not, loss by loss. With more faults: MESHWRIGHT_FAULTS=100."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, config, measured
from jobs import TINY, flags

import data
import train
from checkpointing.memory import tier
from checkpointing.reading import FOLDER, steps
from job import supervisor
from job.supervisor import Policy, supervise
from reporting import account, heartbeat, recorded
from tools import chaos, launch

# Each test has a value, so that each stack runs a part of them (tests/shares.py).
FAULTS = int(os.environ.get("MESHWRIGHT_FAULTS", "6"))  # or a multiple of ten
FEW = FAULTS == 6
SEED = 24 if FEW else 0  # with 24, the first six faults are of all six kinds


def logs(workdir: Path) -> str:
  """All output of a job's starts, in order. The terminal does not get what a start prints just before it fails."""
  files = sorted((workdir / supervisor.LOGS).iterdir(), key=lambda file: int(file.stem))
  return "".join(file.read_text() for file in files)


def require_each_example_once(workdir: Path, fields: dict[str, Any]) -> None:
  """Fails unless the steps of the joined metrics have trained on each example equally often, to one epoch's end.

  A batch is a function of its step. So it needs the steps, each once, and what is in their batches.
  """
  steps = [line["step"] for line in measured(workdir) if line["split"] == "train"]
  given = config("fsdp", **TINY | fields)
  dataset = data.load(given)
  batches = data.Batches(data.mixture(dataset), given.batch_size, given.seed)
  ids = np.concatenate([batches.ids(step - 1) for step in steps])
  counts = np.bincount(ids, minlength=len(dataset.parts[0].train))
  assert len(ids) == given.batch_size * max(steps)
  assert counts.max() - counts.min() <= 1


@pytest.mark.full
@pytest.mark.parametrize("faults", [FAULTS])
def test_a_job_that_is_hurt_at_random_loses_nothing(
  faults: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """Four processes and their supervisor are killed, stopped and slowed. All losses are those of an undisturbed job."""
  steps = max(100, 20 * faults)
  arguments = [*flags("fsdp", tmp_path, steps=steps, eval_every=steps // 2), "--config.runtime.heartbeat=0.2"]
  asked = [f"--faults={faults}", f"--seed={SEED}", "--devices-per-process=1"]
  monkeypatch.setattr("sys.argv", ["chaos", *asked, "--", *arguments])
  if FEW:
    monkeypatch.setattr(chaos, "WITHIN_STEPS", 8)
    monkeypatch.setattr(chaos, "WITHIN_SECONDS", 1.0)
    monkeypatch.setattr(chaos, "PATIENCE", 20)  # this model compiles in a few seconds
  with pytest.raises(SystemExit) as ended:
    chaos.main()
  output = capfd.readouterr().out
  assert ended.value.code == 0, output
  assert f"; 0 of {16 * steps:,} examples lost or repeated; losses equal bit by bit" in output
  for fault, among_ten in chaos.FAULTS.items():
    assert f"{1 if FEW else among_ten * faults // 10} × {chaos.COUNTED[fault]}" in output
  assert len(re.findall("chaos     flipped a bit of params/.*after step", logs(tmp_path / "hurt"))) >= faults // 20 + 1
  assert "healed    after step" in output
  require_each_example_once(tmp_path / "hurt", {"batch_size": 16})
  assert "Traceback" not in output
  events = recorded.events(tmp_path / "hurt")
  known = account.account(account.attempts(events))
  assert known.restarts >= output.count("restart   process") > 0
  assert known.wall_time == pytest.approx(events[-1]["time"] - min(event["began"] for event in events), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["tensor_parallel"])
def test_fewer_processes_take_the_strategy_that_fits(
  strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """Tensor parallelism on 4 devices; 3 do not divide 8 heads, so data parallelism; on 2 tensor parallelism again."""
  short = {"steps": 60, "eval_every": 30, "checkpoint__every": 10, "runtime__heartbeat": 0.1, "batch_size": 24}
  short |= {"eval_batch_size": 24, "mesh__model": 4}
  train.train(config("single", **TINY | short | {"mesh__model": None}), tmp_path / "whole")
  run, killed = tmp_path / "run", set[int]()
  watch = supervisor.Supervisor._hung

  def hung(self: Any, attempt: Any, running: set[int], began: float) -> Any:
    beats = self._beats(attempt)
    saved = max(steps(run / FOLDER), default=0)
    due = {4: 10, 3: 20}.get(attempt.count, 1000)
    if attempt.count not in killed and saved >= due and beats.get(1, {}).get("step"):
      killed.add(attempt.count)
      os.kill(beats[1]["pid"], signal.SIGKILL)
    return watch(self, attempt, running, began)

  monkeypatch.setattr(supervisor.Supervisor, "_hung", hung)
  assert supervise(Policy(4, 1, lost_for=1000.0, choose=launch.choose), flags(strategy, run, **short)) == 0
  output = capfd.readouterr().out
  assert "smaller   3 processes cannot run: " in output
  assert "smaller   3 processes: tensor_parallel splits this model and batch over no mesh of 3 devices, and" in output
  assert "smaller   2 processes: tensor_parallel on mesh model=2 is the best of" in output
  assert killed == {4, 3}
  ran = re.findall(r"\[0\] strategy  (\w+)", output)
  assert ran == ["tensor_parallel", "data_parallel", "tensor_parallel"]
  ours, reference = (
    {(line["split"], line["step"]): line["loss"] for line in measured(tmp_path / name)} for name in ("run", "whole")
  )
  assert ours == pytest.approx(reference, rel=1e-5)
  require_each_example_once(run, {"batch_size": 24})


KILLED = f"""
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import train
from checkpointing.memory.store import Growing, portion_of
from checkpointing.memory.tier import newest
from runtime import command_line
finish, marker = Growing.finish, Path("killed-at")

def killed(self, tail=b""):
  portion = portion_of(self.path.name)
  if portion.owner == 1 == int(self.path.parent.name) and portion.of.step > 20 and not marker.exists():
    marker.write_text(f"{{portion.of.step}} {{newest(Path(train.WORKDIR.value))}}")
    shutil.rmtree(self.path.parents[1])
    os.kill(os.getpid(), signal.SIGKILL)
  finish(self, tail)

Growing.finish = killed
command_line.run(lambda config: train.main(config, train.WORKDIR.value))
"""


@pytest.mark.full
@pytest.mark.parametrize("processes", [2])
def test_a_host_that_is_lost_while_it_saves_costs_no_save_in_memory(
  processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """Process 1 is killed in the middle of a save, and loses all saves of its host. Storage has nothing."""
  short = {"steps": 120, "eval_every": 0, "runtime__heartbeat": 0.1}  # saves are skipped while one is being written
  assert launch.launch(processes, 1, flags("fsdp", tmp_path / "whole", **short)) == 0
  capfd.readouterr()
  monkeypatch.chdir(tmp_path)
  Path("killed.py").write_text(KILLED)
  fields = short | {"checkpoint__memory_every": 3, "checkpoint__memory_dir": tmp_path / "memory"}
  program = tmp_path / "killed.py"
  assert supervise(Policy(processes, 1), flags("fsdp", tmp_path / "run", **fields), program) == 0
  output = capfd.readouterr().out
  assert re.search(r"restart   process 1 of 2 on \S+ was killed by SIGKILL after step \d+; starts again from", output)
  (resumed,) = re.findall(r"resumed   at step (\d+), saved by [^\n]*, from the hosts' memory\n", output)
  killed, complete = map(int, Path("killed-at").read_text().split())
  assert 0 < complete <= int(resumed) < killed
  assert measured(tmp_path / "run") == measured(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("processes", [4])
def test_a_lost_host_needs_no_storage_and_two_neighbours_do(
  processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
  """4 processes on simulated hosts. One is lost with its memory, and later two neighbours. No bit of a loss changes."""
  short = {"steps": 60, "eval_every": 30, "checkpoint__every": 16, "runtime__heartbeat": 0.1}
  assert launch.launch(processes, 1, flags("fsdp", tmp_path / "whole", **short)) == 0
  capfd.readouterr()
  memory, to_lose = tmp_path / "memory", [[2], [1, 2]]
  watch = supervisor.Supervisor._hung

  def hung(self: Any, attempt: Any, running: set[int], began: float) -> Any:
    beats, stored = heartbeat.of_job(tmp_path / "run"), max(steps(tmp_path / "run" / FOLDER), default=0)
    runs = len(beats) == 4 and {beat["pid"] for beat in beats.values()} == {job.pid for job in attempt.jobs}
    if to_lose and stored and runs and tier.newest(tmp_path / "run") > stored and beats[0]["doing"] in heartbeat.STEPS:
      ranks = to_lose.pop(0)
      for rank in ranks:
        os.kill(beats[rank]["pid"], signal.SIGKILL)
      for rank in ranks:
        (folder,) = memory.glob(f"*/host{rank}")
        shutil.rmtree(folder)
    return watch(self, attempt, running, began)

  monkeypatch.setattr(supervisor.Supervisor, "_hung", hung)
  fields = short | {"checkpoint__memory_every": 3, "checkpoint__memory_dir": memory}
  assert supervise(Policy(processes, 1), flags("fsdp", tmp_path / "run", **fields)) == 0
  output = capfd.readouterr().out
  assert to_lose == [], output
  assert "memory    every 3 steps: " in output
  resumed = re.findall(
    r"resumed   at step (\d+), saved by [^\n]*?(, from the hosts' memory)?\n", logs(tmp_path / "run")
  )
  assert len(resumed) == 2, output
  assert resumed[0][1]
  assert int(resumed[0][0]) % 3 == 0
  assert (int(resumed[1][0]) % short["checkpoint__every"], resumed[1][1]) == (0, "")
  assert re.search(r"cannot be used \(step \d+ lacks what process 1 had\); going on from storage", output)
  assert re.search(r"starts again from checkpoint \d+ in memory", output)
  lines = [
    {(line["split"], line["step"]): line["loss"] for line in measured(tmp_path / name)} for name in ("run", "whole")
  ]
  assert lines[0] == lines[1]
  assert list(memory.glob("*/*")) == []  # given back
