"""A run that is stopped, killed or broken goes on as if nothing had happened."""

import random
import re
import signal
import time
from pathlib import Path

import pytest
from helpers import config, measured, one_sentence
from jobs import Job

import train
from checkpointing import restore

SMALL = {
  "model__depth": 1, "model__width": 32, "model__heads": 8, "model__kv_heads": 8, "model__seq_len": 8,
  "data__name": "synthetic", "log_every": 1, "eval_examples": 32, "sample_length": 0,
}  # fmt: skip
FORTY = {"steps": 40, "eval_every": 15}


def saved(said: str) -> int:
  """The last checkpoint that a run reported as safe."""
  return max((int(step) for step in re.findall(r"checkpoint (\d+) saved", said)), default=0)


def resumed(said: str) -> int:
  found = re.search(r"resumed   at step (\d+)", said)
  return int(found[1]) if found else 0


def test_killed_twenty_times_nothing_is_lost(tmp_path: Path):
  """kill −9 at random moments, saves and starts included; the pieces joined equal a run that was left alone."""
  fields = SMALL | {"steps": 200, "eval_every": 50, "checkpoint__every": 2, "model__dropout": 0.1}
  fields["simulated_devices"] = 2
  seldom = fields | {"checkpoint__every": 100}  # checkpoints change no number
  whole = Job("fsdp", tmp_path / "whole", tmp_path / "whole.log", **seldom)
  workdir, log, moments = tmp_path / "killed", tmp_path / "killed.log", random.Random(0)
  reported, in_saves = 0, 0
  for life in range(20):
    job = Job("fsdp", workdir, log, **fields)
    if life % 4:  # of the others some are killed while they start
      job.wait_for("saved" if life % 4 == 3 else "train ")
    time.sleep(moments.uniform(0, 0.4))
    job.send(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL, job.said
    if "train " in job.said:
      assert resumed(job.said) >= reported
    reported = max(reported, saved(job.said))
    in_saves += any("tmp" in f.name for f in (workdir / "checkpoints").glob("*"))
    assert "damaged" not in job.said
  assert in_saves > 0, "no kill fell into a save"
  last = Job("fsdp", workdir, log, **seldom)
  assert last.wait() == 0, last.said
  assert 0 < reported <= resumed(last.said) < 200
  assert whole.wait() == 0
  assert measured(workdir) == measured(tmp_path / "whole")
  assert len(measured(workdir)) == 204


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A run of 40 steps that is left alone."""
  workdir = tmp_path_factory.mktemp("whole")
  train.train(config("fsdp", **SMALL | FORTY), workdir)
  return workdir


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(number: signal.Signals, whole: Path, tmp_path: Path):
  fields = SMALL | FORTY
  job = Job("fsdp", tmp_path / "run", tmp_path / "log", **fields)
  job.wait_for("train       2/40")
  job.send(number)
  assert job.wait() == 0, job.said
  stopped = int(re.search(rf"stopped   by {number.name} after step (\d+)", job.said)[1])
  assert saved(job.said) == stopped < 40
  again = Job("fsdp", tmp_path / "run", tmp_path / "log", **fields)
  assert again.wait() == 0, again.said
  assert resumed(again.said) == stopped
  assert measured(tmp_path / "run") == measured(whole)


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path):
  job = Job("fsdp", tmp_path, tmp_path / "log", hold=True)
  job.wait_for("holding")
  job.send(signal.SIGTERM)
  job.wait_for("SIGTERM: will save and end after this step")
  job.send(signal.SIGINT)
  assert job.wait() == -signal.SIGINT


def test_a_stop_where_an_evaluation_is_due_leaves_it_to_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  fields = SMALL | {"steps": 6, "eval_every": 2}
  train.train(config("fsdp", **fields), tmp_path / "whole")
  decide = train.signals.Requests.decide
  calls = iter(range(100))
  stop_at_4 = lambda self, save: train.signals.Decision(stop=next(calls) == 3) if save in (True, False) else decide
  monkeypatch.setattr(train.signals.Requests, "decide", stop_at_4)
  train.train(config("fsdp", **fields), tmp_path / "run")
  assert [line["step"] for line in measured(tmp_path / "run") if line["split"] == "validation"] == [2]
  for stop in (4, 4, 0):  # also if that is stopped again before the next checkpoint
    train.train(config("fsdp", **fields, stop_after=stop), tmp_path / "run")
  assert measured(tmp_path / "run") == measured(tmp_path / "whole")


def test_a_run_that_has_ended_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture):
  fields = SMALL | {"steps": 3}
  first = train.train(config("fsdp", **fields), tmp_path)
  lines = measured(tmp_path)
  again = train.train(config("fsdp", **fields), tmp_path)
  assert "all 3 steps are done" in capsys.readouterr().out
  assert again["loss"] == first["loss"]
  assert measured(tmp_path) == lines


def test_a_new_run_begins_with_another_runs_parameters(tmp_path: Path, capsys: pytest.CaptureFixture):
  """init_from takes the weights and nothing else: with a learning rate of almost 0 the first loss is the last one."""
  train.train(config("fsdp", **SMALL | {"steps": 10}), tmp_path / "first")
  frozen = SMALL | {"steps": 1, "optimizer__learning_rate": 1e-30}
  for init_from in (tmp_path / "first", tmp_path / "first" / "checkpoints" / "10"):
    told = train.train(config("tensor_parallel", **frozen, init_from=str(init_from)), tmp_path / init_from.name / "new")
    assert told["loss"] == pytest.approx(measured(tmp_path / "first")[-1]["loss"], rel=1e-5)
    assert f"initial   parameters of {init_from}, step 10, saved by fsdp" in capsys.readouterr().out


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"model__width": 64}, ["model.width is 32 there and 64 here", "name another workdir"]),
    ({"model__depth": 2, "seed": 3}, ["model.depth is 1 there and 2 here", "seed is 0 there and 3 here"]),
    ({"batch_size": 32}, ["batch_size is 16 there and 32 here"]),
    ({"data__name": "text"}, ["data.name is 'synthetic' there and 'text' here"]),
    ({"model__rope_base": 5000.0}, ["model.rope_base is 10000.0 there and 5000.0 here"]),
  ],
)
def test_a_checkpoint_of_another_run_is_refused(fields: dict, parts: list[str], ended: Path):
  with one_sentence("checkpoint 3", str(ended), *parts):
    train.train(config("fsdp", **SMALL | {"steps": 3} | fields), ended)


@pytest.mark.parametrize(
  "init_from, fields, parts",
  [
    ("nowhere", {}, ["init_from=", "nowhere", "no workdir with a checkpoint"]),
    ("", {"model__width": 64}, ["init_from=", "params/", "there and", "here"]),
    ("", {"data__name": "text"}, ["init_from=", "tokens of 'synthetic'", "'bytes'"]),
  ],
)
def test_init_from_what_does_not_fit_is_refused(init_from: str, fields: dict, parts: list, ended: Path, tmp_path: Path):
  with one_sentence(*parts):
    train.train(config("fsdp", **SMALL | {"init_from": str(ended / init_from)} | fields), tmp_path / "new")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
  workdir = tmp_path_factory.mktemp("ended")
  train.train(config("fsdp", **SMALL | {"steps": 3}), workdir)
  return workdir


def test_changes_that_are_allowed_are_told(ended: Path, capsys: pytest.CaptureFixture):
  train.train(config("two_d", **SMALL | {"steps": 4}), ended)
  printed = capsys.readouterr().out
  for note in ("strategy is 'fsdp' there and 'two_d' here", "steps is 3 there and 4 here"):
    assert f"note      {note}" in printed


def test_a_second_run_in_the_same_workdir_is_refused(tmp_path: Path):
  job = Job("fsdp", tmp_path, tmp_path / "log", **SMALL | {"steps": 100_000})
  job.wait_for("devices")
  with one_sentence("workdir=", str(tmp_path), "in use", f"process {job.process.pid}"):
    train.train(config("fsdp", **SMALL), tmp_path)
  job.send(signal.SIGKILL)
  job.wait()
  train.train(config("fsdp", **SMALL | {"steps": 1}), tmp_path)  # the lock went with the process


def test_a_resumed_run_keeps_its_best_checkpoint(tmp_path: Path):
  fields = SMALL | {"steps": 8, "eval_every": 1, "optimizer__learning_rate": 0.5, "checkpoint__keep": 1}
  for stop in (4, 8):
    train.train(config("fsdp", stop_after=stop, **fields), tmp_path)
  losses = {line["step"]: line["loss"] for line in measured(tmp_path) if line["split"] == "validation"}
  best = min(losses, key=lambda step: losses[step])
  assert restore.steps(tmp_path / "checkpoints") == sorted({best, 8})
  assert best < 8
