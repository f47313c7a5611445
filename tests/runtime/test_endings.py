"""Jobs of several processes that a signal stops, a kill cuts short, or one process fails in. They resume or all end."""

import dataclasses
import re
import signal
import time
from pathlib import Path

import jax
import pytest
from helpers import ROOT, config, measured
from jobs import TINY, flags

import train
from checkpointing import reading
from errors import ConfigError, JobConfigError
from runtime import command_line, processes
from tools import launch
from training.loop import LoopState

SIGNALLED = f"""
import os, runpy, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})

def later():
  metrics = Path(next(a for a in sys.argv if a.startswith("--workdir="))[10:]) / "metrics.jsonl"
  while not metrics.exists() or metrics.read_text().count("train") < 2:
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGTERM)

if "--config.distributed.process=1" in sys.argv:
  threading.Thread(target=later, daemon=True).start()
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.full
def test_a_job_resumes_with_other_processes_and_strategies(tmp_path: Path, capfd: pytest.CaptureFixture):
  """2 × 4 → 1 × 8 → 4 × 2 devices, compared with an uninterrupted process: the same lines, with numbers to 1e-5.

  A signal reaches one of the first two processes, and both stop after the same step.
  """
  program, workdir = tmp_path / "program.py", tmp_path / "run"
  program.write_text(SIGNALLED)
  train.train(config("fsdp", **TINY), tmp_path / "whole")
  capfd.readouterr()
  assert launch.launch(2, 4, flags("pmap_ddp", workdir), program) == 0
  output = capfd.readouterr().out
  assert "[0] devices   8 × CPU device, simulated in 2 processes" in output
  assert not re.search(r"\[1\] (train|validation|devices)", output), "only process 0 may report"
  assert "[1] SIGTERM: will save and end" in output
  assert "[0] SIGTERM" not in output
  stopped = int(re.search(r"stopped   by a signal after step (\d+)", output)[1])
  assert f"checkpoint {stopped} saved" in output
  assert stopped < TINY["steps"] - 2

  train.train(config("hsdp", **TINY, stop_after=stopped + 1), workdir)
  assert f"resumed   at step {stopped}, saved by pmap_ddp" in capfd.readouterr().out
  assert launch.launch(4, 2, flags("fsdp", workdir)) == 0
  output = capfd.readouterr().out
  assert f"[0] resumed   at step {stopped + 1}, saved by hsdp" in output
  assert "processes was 1 and is now 4" in output
  parts = (workdir / "checkpoints" / str(TINY["steps"]) / "params").glob("ocdbt.process_*")
  assert len(list(parts)) == 4, "every process must write its part"

  reference = measured(tmp_path / "whole")
  ours = [line for line in measured(workdir) if line["split"] == "train" or line["step"] != stopped + 1]
  reference = [line for line in reference if line["split"] == "train" or line["step"] != stopped + 1]
  assert len(ours) == len(reference)
  for mine, expected in zip(ours, reference, strict=True):
    assert mine.pop("split") == expected.pop("split")
    assert mine == pytest.approx(expected, rel=1e-5)


KILLED = SIGNALLED.replace("SIGTERM", "SIGKILL").replace(
  'not metrics.exists() or metrics.read_text().count("train") < 2',
  'not (metrics.parent / "checkpoints" / "2").exists()',
)


@pytest.mark.full
@pytest.mark.parametrize(
  "name, first, then, resumes_on",
  [
    ("two_d", (2, 4), (4, 2), {"mesh__model": 4}),  # each group of `model` in one process, then in two
    ("three_d", (2, 4), (1, 8), {}),  # `stage` over the processes
  ],
)
def test_axes_over_processes_equal_one_process_through_a_kill(
  name: str, first: tuple, then: tuple, resumes_on: dict, tmp_path: Path, capfd: pytest.CaptureFixture
):
  """One of the first processes is killed at a random moment. Another number of processes resumes and ends the run."""
  fields = TINY | {"steps": 8, "model__depth": 2, "pipeline__microbatches": 4}
  program, workdir = tmp_path / "program.py", tmp_path / "run"
  program.write_text(KILLED)
  train.train(config(name, **fields), tmp_path / "whole")
  assert launch.launch(*first, flags(name, workdir, **fields, checkpoint__every=1), program) == 128 + signal.SIGKILL
  capfd.readouterr()
  assert launch.launch(*then, flags(name, workdir, **fields | resumes_on)) == 0
  output = capfd.readouterr().out
  assert 2 <= int(re.search(r"resumed   at step (\d+)", output)[1]) < 8
  assert f"processes was {first[0]} and is now {then[0]}" in output
  ours, reference = measured(workdir), measured(tmp_path / "whole")
  assert len(ours) == len(reference) == 8 + 2
  for mine, expected in zip(ours, reference, strict=True):
    assert mine.pop("split") == expected.pop("split")
    assert mine == pytest.approx(expected, rel=1e-5)


FAILING = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import data
from checkpointing import restore
from errors import ConfigError

def begin(*_):
  raise RuntimeError("something broke here")

def read(batches, step, rows, before=data.Batches.read):
  if step == 3:
    raise ERROR("example 7 broke here")
  return before(batches, step, rows)

if "--config.distributed.process=1" in sys.argv:
  PATCH
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
  "patch, error, status, says",
  [
    ("restore.begin = begin", "", 1, "RuntimeError: something broke here"),
    ("data.Batches.read = read", "OSError", 1, "OSError: example 7 broke here"),
    ("data.Batches.read = read", "ConfigError", 2, "error: example 7 broke here"),
  ],
)
def test_a_process_that_fails_alone_ends_the_job(
  patch: str, error: str, status: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture
):
  """Even though the other waits for it in a collective, both for a checkpoint, and jax, on exit, for the other."""
  program = tmp_path / "program.py"
  program.write_text(FAILING.replace("PATCH", patch).replace("ERROR", error))
  start = time.monotonic()
  assert launch.launch(2, 1, flags("fsdp", tmp_path / "run", checkpoint__every=1), program) == status
  assert time.monotonic() - start < 100  # on exit, jax would wait 300 s
  assert f"[1] {says}" in capfd.readouterr().out.splitlines()


STOPPED = f"""
import runpy, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from strategies import Strategy

def eval_step(self, state, batch, before=Strategy.eval_step):
  signal.raise_signal(signal.SIGTERM)
  return before(self, state, batch)

if "--config.distributed.process=1" in sys.argv:
  Strategy.eval_step = eval_step
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.full
def test_a_signal_to_one_process_stops_the_evaluation_of_all(tmp_path: Path, capfd: pytest.CaptureFixture):
  program = tmp_path / "program.py"
  program.write_text(STOPPED)
  assert launch.launch(2, 1, flags("fsdp", tmp_path, eval_batch_size=4), program) == 0
  output = capfd.readouterr().out
  assert "[0] stopped   by a signal after step 4" in output
  assert output.count("SIGTERM") == 1
  assert "[0] validation" not in output
  assert reading.read_record(tmp_path / "checkpoints" / "4")["loop"] == dataclasses.asdict(
    LoopState(4, evaluated=False)
  )


def test_an_error_of_one_process_ends_it_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  """One that all processes raise together ends them in the orderly way."""
  ended: list[int] = []
  monkeypatch.setattr(processes.os, "_exit", ended.append)
  for joined, error, expected in [
    (True, ConfigError("alone"), [2]),
    (True, JobConfigError("together"), []),
    (False, ConfigError("the only process"), []),
  ]:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda joined=joined: joined)
    ended.clear()
    with pytest.raises(SystemExit) as orderly:
      command_line.fail(error, status=2)
    assert (ended, orderly.value.code) == (expected, 2)
    assert capsys.readouterr().err == f"error: {error}\n"
