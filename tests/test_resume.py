"""A run that was stopped or killed resumes, with the same results as an uninterrupted run."""

import json
import math
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import ROOT, config, in_full, measured, one_sentence
from jobs import Job

import train
from checkpointing import reading
from checkpointing.finished import is_finished
from checkpointing.save import Checkpoints
from errors import Unavailable
from reporting import recorded
from runtime import signals
from strategies import Strategy
from training.program import Batch, Sums, TrainState

SMALL = {
  "model__depth": 1, "model__width": 32, "model__heads": 8, "model__kv_heads": 8, "model__seq_len": 8,
  "data__name": "synthetic", "log_every": 1, "eval_examples": 32, "sample_length": 0,
}  # fmt: skip
FORTY = {"steps": 40, "eval_every": 15}


def saved(output: str) -> int:
  """The last checkpoint that a run reported as saved, or 0."""
  return max((int(step) for step in re.findall(r"checkpoint (\d+) saved", output)), default=0)


def resumed(output: str) -> int:
  """The step at which a run resumed, or 0."""
  found = re.search(r"resumed   at step (\d+)", output)
  return int(found[1]) if found else 0


# Eight devices, because two numbers have the same sum in either order. Many rows hold parts of several documents, and a
# long run takes some epochs.
KILLED = {
  "model__seq_len": 64, "model__dropout": 0.1, "data__name": "text", "data__packing": "documents",
  "eval_every": 25, "checkpoint__every": 2, "simulated_devices": 8,
}  # fmt: skip
IN_STAGES = {"model__depth": 2, "mesh__stage": 2, "pipeline__microbatches": 2}
MOMENTS = ("starting", "saving", "saved", "training")  # at which a run is killed, one after another


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The lines of a page of the guide, each as a document."""
  file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
  found = (ROOT / "docs" / "why.md").read_text().splitlines()
  file.write_text("".join(json.dumps({"text": line}) + "\n" for line in found if line))
  return file


@pytest.mark.parametrize(
  "strategy, more, lives, steps",
  in_full(
    [
      ("fsdp", {}, 3, 30),
      ("fsdp", {}, 20, 120),
      ("pipeline", IN_STAGES, 4, 30),
    ],
    ("fsdp", {}, 3, 30),
  ),
)
def test_a_run_killed_many_times_equals_an_uninterrupted_run(
  strategy: str, more: dict, lives: int, steps: int, lines: Path, tmp_path: Path
):
  """kill −9 at random moments, also during start-up, and while a checkpoint is saved."""
  data = {"data__path": str(lines), "data__cache_dir": str(tmp_path / "cache")}
  fields = SMALL | KILLED | more | data | {"steps": steps}
  few_saves = fields | {"checkpoint__every": 100}  # faster, with the same metrics
  whole = Job(strategy, tmp_path / "whole", tmp_path / "whole.log", **few_saves)
  workdir, log, chance = tmp_path / "killed", tmp_path / "killed.log", random.Random(0)
  is_saving = lambda: any("tmp" in f.name for f in (workdir / "checkpoints").glob("*"))
  reported, in_saves = 0, 0
  for life in range(lives):
    job = Job(strategy, workdir, log, **fields)
    moment = MOMENTS[life % len(MOMENTS)]
    if moment != "starting":
      job.wait_for("saved" if moment == "saved" else "train ")
    if moment == "saving":
      job.wait_until(is_saving, "began to save")
    else:
      time.sleep(chance.uniform(0, 0.4))
    job.send(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL, job.output
    if "train " in job.output:
      assert resumed(job.output) >= reported
      in_saves += is_saving()  # what an earlier run left is gone
    reported = max(reported, saved(job.output))
    assert "damaged" not in job.output
  assert in_saves > 0 or lives <= len(MOMENTS), "no run was killed during a save"
  last = Job(strategy, workdir, log, **few_saves)
  assert last.wait() == 0, last.output
  assert 0 < reported <= resumed(last.output) < steps
  assert whole.wait() == 0
  assert measured(workdir) == measured(tmp_path / "whole")
  assert len(measured(workdir)) == steps + math.ceil(steps / 25)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The workdir of an uninterrupted run of 40 steps."""
  workdir = tmp_path_factory.mktemp("whole")
  train.train(config("fsdp", **SMALL | FORTY), workdir)
  return workdir


@pytest.mark.parametrize("number", in_full([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(number: signal.Signals, whole: Path, tmp_path: Path):
  fields = SMALL | FORTY
  job = Job("fsdp", tmp_path / "run", tmp_path / "log", **fields)
  job.wait_for("train       2/40")
  job.send(number)
  assert job.wait() == 0, job.output
  stopped = int(re.search(rf"stopped   by {number.name} after step (\d+)", job.output)[1])
  assert saved(job.output) == stopped < 40
  again = Job("fsdp", tmp_path / "run", tmp_path / "log", **fields)
  assert again.wait() == 0, again.output
  assert resumed(again.output) == stopped
  assert measured(tmp_path / "run") == measured(whole)
  events = [e for e in recorded.load(tmp_path / "run").events if e["event"] != "evaluation"]
  shown = [(e["event"], e["step"], e.get("by")) for e in events]
  assert shown == [("start", 0, None), ("stop", stopped, number.name), ("start", stopped, None), ("end", 40, None)]
  assert f"stopped by {number.name}" in (tmp_path / "run" / "report.html").read_text()


def test_another_sigint_ends_the_run_immediately_but_another_sigterm_does_not(tmp_path: Path):
  job = Job("fsdp", tmp_path, tmp_path / "log", hold=True)
  job.wait_for("holding")
  job.send(signal.SIGTERM)
  job.wait_for("SIGTERM: will save and end after this step")
  for _ in range(3):  # as a scheduler does while a checkpoint is written
    job.send(signal.SIGTERM)
    job.process.join(0.1)
  job.send(signal.SIGINT)
  assert job.wait() == -signal.SIGINT
  assert job.output.count("SIGTERM") == 1


@pytest.mark.full
@pytest.mark.parametrize("eval_every, step", [(2, 2), (0, 3)])
def test_a_signal_during_an_evaluation_stops_it(
  eval_every: int, step: int, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """Its step is saved before. The resumed run makes the evaluation, even if it was the last. docs/launch knows both."""
  fields = SMALL | {"steps": 3, "eval_every": eval_every, "eval_batch_size": 8, "checkpoint__keep": 9}
  train.train(config("fsdp", **fields), tmp_path / "whole")
  batches, saved_before = [], []

  def eval_step(self: Strategy, state: TrainState, batch: Batch, before: Callable = Strategy.eval_step) -> Sums:
    if not batches:
      signal.raise_signal(signal.SIGTERM)
    batches.append(batch)
    return before(self, state, batch)

  def save(self: Checkpoints, *given: object, before: Callable = Checkpoints.save) -> None:
    saved_before.append(not batches)
    before(self, *given)

  with monkeypatch.context() as patch:
    patch.setattr(Strategy, "eval_step", eval_step)
    patch.setattr(Checkpoints, "save", save)
    train.train(config("fsdp", **fields), tmp_path / "run")
  assert f"stopped   by SIGTERM after step {step}" in capsys.readouterr().out
  assert (len(batches), saved_before) == (1, [True])
  record = tmp_path / "run" / "checkpoints" / str(step)
  assert not reading.read_record(record)["loop"]["evaluated"]
  assert not is_finished(tmp_path / "run")
  train.train(config("fsdp", **fields), tmp_path / "run")
  assert measured(tmp_path / "run") == measured(tmp_path / "whole")
  assert reading.read_record(record)["loop"]["evaluated"]
  assert is_finished(tmp_path / "run")
  assert (tmp_path / "run" / "loss.png").exists()


@pytest.mark.full
def test_an_evaluation_due_when_a_run_is_stopped_is_made_on_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  fields = SMALL | {"steps": 6, "eval_every": 2}
  train.train(config("fsdp", **fields), tmp_path / "whole")
  calls = iter(range(100))
  stop_at_4 = lambda self: signals.Decision(stop=next(calls) == 3)
  monkeypatch.setattr(signals.Requests, "decide", stop_at_4)
  train.train(config("fsdp", **fields), tmp_path / "run")
  assert [line["step"] for line in measured(tmp_path / "run") if line["split"] == "validation"] == [2]
  for stop in (4, 4, 0):  # the resumed run is itself stopped, before its next checkpoint
    train.train(config("fsdp", **fields, stop_after=stop), tmp_path / "run")
  assert measured(tmp_path / "run") == measured(tmp_path / "whole")


def test_restarting_a_finished_run_changes_nothing(finished: Path, capsys: pytest.CaptureFixture):
  lines = measured(finished)
  again = train.train(config("fsdp", **SMALL | {"steps": 3}), finished)
  assert "all 3 steps are done" in capsys.readouterr().out
  assert again["loss"] == lines[-1]["loss"]
  assert measured(finished) == lines


@pytest.mark.full
def test_init_from_starts_with_another_runs_parameters(tmp_path: Path, capsys: pytest.CaptureFixture):
  """A learning rate near 0 keeps the parameters, so the new run's losses equal the last loss of the other run."""
  train.train(config("fsdp", **SMALL | {"steps": 10}), tmp_path / "first")
  frozen = SMALL | {"steps": 1, "optimizer__learning_rate": 1e-30, "eval_every": 1}
  for init_from in (tmp_path / "first", tmp_path / "first" / "checkpoints" / "10"):
    new = train.train(config("tensor_parallel", **frozen, init_from=str(init_from)), tmp_path / init_from.name / "new")
    last, lines = measured(tmp_path / "first")[-1]["loss"], measured(tmp_path / init_from.name / "new")
    assert new["loss"] == pytest.approx(last, rel=1e-5)
    assert [(line["step"], line["split"]) for line in lines] == [(0, "validation"), (1, "train"), (1, "validation")]
    assert lines[0]["loss"] == pytest.approx(last, rel=1e-5)
    assert f"initial   parameters of {init_from}, step 10, saved by fsdp" in capsys.readouterr().out


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"model__width": 64}, ["model.width was 32 and is now 64", "name another workdir"]),
    ({"model__depth": 2, "seed": 3}, ["model.depth was 1 and is now 2", "seed was 0 and is now 3"]),
    ({"batch_size": 32}, ["batch_size was 16 and is now 32"]),
    ({"data__name": "text"}, ["data.name was 'synthetic' and is now 'text'"]),
    ({"model__rope_base": 5000.0}, ["model.rope_base was 10000.0 and is now 5000.0"]),
  ],
)
def test_a_checkpoint_of_another_config_is_refused(fields: dict, parts: list[str], finished: Path):
  with one_sentence("checkpoint 3", str(finished), *parts):
    train.train(config("fsdp", **SMALL | {"steps": 3} | fields), finished)


@pytest.mark.full
def test_weights_in_bfloat16_may_begin_with_those_of_a_run_in_float32(finished: Path, tmp_path: Path):
  train.train(
    config("fsdp", **SMALL | {"init_from": str(finished), "model__param_dtype": "bfloat16"}), tmp_path / "new"
  )
  before, after = measured(finished)[-1]["loss"], measured(tmp_path / "new")[0]["loss"]
  assert after == pytest.approx(before, rel=2**-8)


@pytest.mark.parametrize(
  "init_from, fields, parts",
  [
    ("nowhere", {}, ["init_from=", "nowhere", "no workdir with a checkpoint"]),
    ("", {"model__width": 64}, ["init_from=", "params/", "in the checkpoint and", "in this run"]),
    ("", {"data__name": "text"}, ["init_from=", "tokens of 'synthetic'", "'bytes'"]),
  ],
)
def test_an_init_from_that_does_not_fit_is_refused(
  init_from: str, fields: dict, parts: list[str], finished: Path, tmp_path: Path
):
  with one_sentence(*parts):
    train.train(config("fsdp", **SMALL | {"init_from": str(finished / init_from)} | fields), tmp_path / "new")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The workdir of a finished run of 3 steps."""
  workdir = tmp_path_factory.mktemp("finished")
  train.train(config("fsdp", **SMALL | {"steps": 3}), workdir)
  return workdir


@pytest.mark.full
def test_allowed_config_changes_are_reported(finished: Path, capsys: pytest.CaptureFixture):
  train.train(config("two_d", **SMALL | {"steps": 4}), finished)
  printed = capsys.readouterr().out
  for note in ("strategy was 'fsdp' and is now 'two_d'", "steps was 3 and is now 4"):
    assert f"note      {note}" in printed


@pytest.mark.full
def test_a_second_run_in_the_same_workdir_is_refused(tmp_path: Path):
  job = Job("fsdp", tmp_path, tmp_path / "log", **SMALL | {"steps": 100_000})
  job.wait_for("devices")
  with one_sentence("workdir=", str(tmp_path), "in use", f"process {job.process.pid}", kind=Unavailable):
    train.train(config("fsdp", **SMALL), tmp_path)
  job.send(signal.SIGKILL)
  job.wait()
  train.train(config("fsdp", **SMALL | {"steps": 1}), tmp_path)  # the killed process has released its lock


@pytest.mark.full
def test_a_resumed_run_keeps_its_best_checkpoint(tmp_path: Path):
  fields = SMALL | {"steps": 8, "eval_every": 1, "optimizer__learning_rate": 0.5, "checkpoint__keep": 1}
  for stop in (4, 8):
    train.train(config("fsdp", stop_after=stop, **fields), tmp_path)
  losses = {line["step"]: line["loss"] for line in measured(tmp_path) if line["split"] == "validation"}
  best = min(losses, key=lambda step: losses[step])
  assert reading.steps(tmp_path / "checkpoints") == sorted({best, 8})
  assert best < 8
