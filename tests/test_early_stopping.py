"""`stop.patience`: a run ends when its validation loss no longer falls, at the same step however often it stops."""

import dataclasses
import json
import math
import random
import signal
import zipfile
from pathlib import Path

import pytest
from helpers import config, measured
from jobs import Job
from kept import make
from test_resume import SMALL

import train
from checkpointing import form
from checkpointing.finished import is_finished
from reporting import recorded
from runtime import signals
from training.loop import LoopState, StepPlan

# With this learning rate the loss falls twice and then rises, so the run ends at step 8.
RISES = SMALL | {
  "steps": 40, "eval_every": 2, "stop__patience": 2, "optimizer__learning_rate": 0.3, "optimizer__warmup": 0,
  "checkpoint__every": 1, "checkpoint__keep": 40,
}  # fmt: skip
END = 8


def test_evaluations_since_the_lowest_loss_are_counted():
  plan, loop, found = StepPlan(100, 0, 1, 2, 1, 0, 1.0, patience=2), LoopState(evaluated=False), []
  for loss in (math.nan, 3.0, 3.0, 2.5, math.inf, 2.6):
    loop = loop.after(loop.step + 1, skipped=False).after_evaluation(loss)
    found.append((loop.lowest_loss, loop.since_lowest, plan.gives_up(loop)))
  assert found == [(None, 1, False), (3, 0, False), (3, 1, False), (2.5, 0, False), (2.5, 1, False), (2.5, 2, True)]
  assert loop.after_evaluation(2.6) == loop  # the same evaluation counts once
  assert not plan.gives_up(loop.after(7, skipped=False))  # its evaluation comes first
  assert not dataclasses.replace(plan, patience=0).gives_up(loop)


def test_a_record_without_the_counts_has_none():
  """Older checkpoints. A record with other values than numbers is damaged."""
  old = {"step": 4, "evaluated": True, "skipped_in_a_row": 0, "skipped_since_line": 0}
  assert LoopState(**old).since_lowest == 0
  assert LoopState(**old).lowest_loss is None
  with zipfile.ZipFile(make.FOLDER / "runs" / "images" / "workdir.zip") as kept:
    record = json.loads(kept.read(next(name for name in kept.namelist() if name.endswith("run/metadata"))))
  assert "lowest_loss" not in record["loop"]
  assert form.fault(record) == ""
  for loop, fault in (({"lowest_loss": 1.5, "since_lowest": 3}, ""), ({"lowest_loss": "x"}, "loop.lowest_loss='x'")):
    assert form.fault(record | {"loop": record["loop"] | loop}) == fault


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The workdir of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole")
  train.train(config("fsdp", **RISES), workdir)
  return workdir


@pytest.mark.full
def test_a_run_ends_when_its_loss_no_longer_falls(whole: Path, capsys: pytest.CaptureFixture):
  lines = measured(whole)
  losses = [line["loss"] for line in lines if line["split"] == "validation"]
  assert lines[-1]["step"] == END < 40
  assert min(losses) == losses[-3]
  (end,) = [event for event in recorded.load(whole).events if event["event"] == "end"]
  reason = f"the lowest validation loss of {losses[-3]:.4f} is 2 evaluations old (stop.patience=2; "
  assert end["why"].startswith(reason)
  assert reason in (whole / "report.html").read_text()
  assert is_finished(whole)
  again = train.train(config("fsdp", **RISES), whole)  # trains nothing
  assert f"finished  at step {END}: {reason}" in capsys.readouterr().out
  assert again["loss"] == losses[-1]
  assert measured(whole) == lines


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_stopped_often_ends_at_the_same_step(
  seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  chance, lives = random.Random(seed), 0
  while not is_finished(tmp_path):
    calls, last = iter(range(1000)), chance.randint(1, 3)  # a step asks once, and an evaluation at each batch
    with monkeypatch.context() as patch:
      asked = lambda self, calls=calls, last=last: signals.Decision(stop=next(calls) == last)
      patch.setattr(signals.Requests, "decide", asked)
      train.train(config("fsdp", **RISES), tmp_path)
    lives += 1
  assert 3 < lives < 20
  assert measured(tmp_path) == measured(whole)


@pytest.mark.full
def test_a_run_that_is_killed_after_an_evaluation_ends_at_the_same_step(whole: Path, tmp_path: Path):
  for line in ("validation  4/40", "validation  6/40", "checkpoint 7 saved"):
    job = Job("fsdp", tmp_path / "run", tmp_path / "log", **RISES)
    job.wait_for(line)
    job.send(signal.SIGKILL)
    job.wait()
  last = Job("fsdp", tmp_path / "run", tmp_path / "log", **RISES)
  assert last.wait() == 0, last.output
  assert measured(tmp_path / "run") == measured(whole)


@pytest.mark.full
def test_a_larger_patience_goes_on(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
  more = RISES | {"stop__patience": 4}
  for fields in (RISES, more):
    train.train(config("fsdp", **fields), tmp_path / "both")
  train.train(config("fsdp", **more), tmp_path / "once")
  assert measured(tmp_path / "both") == measured(tmp_path / "once")
  assert len(measured(tmp_path / "once")) > len(measured(whole))
