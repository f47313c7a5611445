"""How a run begins: what it goes on with from a checkpoint, and what of another run it takes."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import config, initial_state, program, strategy

import data
from checkpointing import initial, record, restore
from checkpointing.save import Checkpoints
from runtime.storage.bucket import Folder
from strategies import Strategy
from training.loop import LoopState
from training.program import TrainState, Traits

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FIELDS = {"data__name": "synthetic", "model__depth": 1, "eval_examples": 16}


@pytest.fixture(scope="module")
def runner() -> Strategy:
  return strategy("fsdp", program(**FIELDS))


def made(runner: Strategy, **fields: Any) -> record.Record:
  asked = config("fsdp", **FIELDS | fields)
  return record.make(asked, data.load(asked), runner)


def test_a_run_goes_on_with_all_that_its_loop_knew(tmp_path: Path, runner: Strategy):
  """Every field of the loop's state, none of which has its default, so that no default can stand in for one."""
  loop = LoopState(4, False, skipped_in_a_row=3, skipped_since_line=2, lowest_loss=1.25, since_lowest=5)
  defaults = dataclasses.asdict(LoopState())
  assert all(value != defaults[name] for name, value in dataclasses.asdict(loop).items())
  state, run = initial_state(runner), made(runner)
  with Checkpoints(tmp_path / "checkpoints", 1, 0, print, print) as writer:
    writer.save(state, run | {"context": 77}, loop)
  started = restore.begin(tmp_path, "", runner, made(runner, eval_examples=32), pytest.fail)
  assert started.loop == loop
  assert started.source == "checkpoint"
  assert started.record["context"] == 77
  assert started.lines == [
    "resumed   at step 4, saved by fsdp on mesh data=8; batch over data, embed over data",
    "note      eval_examples was 16 and is now 32",
  ]
  for ours, theirs in zip(jax.tree.leaves(started.state), jax.tree.leaves(state), strict=True):
    np.testing.assert_array_equal(ours, theirs)


class Beginner:
  """In place of a strategy: parameters are words, and those of `frozen` are not trained."""

  def __init__(self, frozen: dict[str, str] | None = None, is_image: bool = False):
    self.program, self.frozen = self, frozen or {}
    self.traits = Traits("made up", is_image=is_image)
    self.optimizer = None

  def of_base(self, params: dict[str, str]) -> dict[str, str]:
    return self.frozen

  def changing(self, params: dict[str, str]) -> dict[str, str]:
    return {name: x for name, x in params.items() if name not in self.frozen}

  def abstract_state(self) -> TrainState:
    return TrainState(0, {"head": "shape", "base": "shape"}, "moments")

  def init(self, seed: int) -> TrainState:
    return TrainState(0, {"head": f"drawn from {seed}", "base": "drawn"}, "moments")


RUN = {"config": {"seed": 5}, "context": 100}


def begun(beginner: Beginner, monkeypatch: pytest.MonkeyPatch, context: int = 0) -> tuple[restore.Start, list[Any]]:
  """A run that takes the parameters that it asks for from another, and what it asked for."""
  asked: list[Any] = []

  def load(source: str, wanted: dict[str, str], program: Beginner, run: record.Record) -> initial.Initial:
    asked.extend((source, wanted, run))
    return initial.Initial(dict.fromkeys(wanted, "given"), "another run", context, ("it is old",))

  monkeypatch.setattr(restore, "restore", lambda *_: None)
  monkeypatch.setattr(restore.initial, "load", load)
  monkeypatch.setattr(restore.initial, "base_of", lambda source, params, program: f"{source}: {params}")
  return restore.begin(Path("run"), "other", beginner, RUN, pytest.fail), asked


def test_a_run_without_a_checkpoint_begins_with_parameters_of_its_seed(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(restore, "restore", lambda *_: None)
  started = restore.begin(Path("run"), "", Beginner(), RUN, pytest.fail)
  assert started.state.params == {"head": "drawn from 5", "base": "drawn"}
  assert (started.loop, started.record, started.lines, started.source) == (LoopState(), RUN, [], "")


def test_a_run_takes_all_parameters_of_another_and_evaluates_them_first(monkeypatch: pytest.MonkeyPatch):
  started, asked = begun(Beginner(), monkeypatch)
  assert asked == ["other", {"head": "shape", "base": "shape"}, RUN]
  assert started.state == TrainState(0, {"head": "given", "base": "given"}, "moments")
  assert started.loop == LoopState(evaluated=False)
  assert (started.record, started.source) == (RUN, "")
  assert started.lines == ["initial   parameters of another run", "note      it is old"]


def test_adapters_are_drawn_and_their_base_is_taken(monkeypatch: pytest.MonkeyPatch):
  started, asked = begun(Beginner(frozen={"base": "shape"}), monkeypatch)
  assert asked[:2] == ["other", {"base": "shape"}]
  assert started.state.params == {"head": "drawn from 5", "base": "given"}
  assert started.record == RUN | {"base": "other: {'base': 'given'}"}


@pytest.mark.parametrize("newest", ["checkpoint", "memory"])
def test_adapters_go_on_beside_their_base(newest: str, monkeypatch: pytest.MonkeyPatch):
  saved = {"loop": {"step": 4}, "strategy": "fsdp", "data": "old", "context": 77, "base": "digests"}
  calls: list[Any] = []
  monkeypatch.setattr(restore, "restore", lambda *given: (TrainState(4, {"head": "trained"}, "moments"), saved))
  monkeypatch.setattr(restore.record, "changes", lambda saved, run: ["a change"])
  monkeypatch.setattr(restore.record, "jump", lambda saved, optimizer: ["a jump"])
  monkeypatch.setattr(restore.history, "continued", lambda *given: given)
  monkeypatch.setattr(restore.initial, "load_base", lambda *given: calls.append(given) or {"base": "given"})
  tier = SimpleNamespace(every=1, complete=4 if newest == "memory" else None, keep_only=calls.append)
  started = restore.begin(Path("run"), "other", Beginner({"base": "shape"}), RUN | {"data": "new"}, pytest.fail, tier)
  assert calls[0] == tier.complete
  source, wanted, _, _, base = calls[1]
  assert (source, wanted, base) == ("other", {"base": "shape"}, "digests")
  assert started.state == TrainState(4, {"head": "trained", "base": "given"}, "moments")
  assert started.loop == LoopState(4)
  assert started.record == RUN | {"data": ("old", "new", 4), "context": 77, "base": "digests"}
  where = ", from the hosts' memory" if newest == "memory" else ""
  assert started.lines == [f"resumed   at step 4, saved by fsdp{where}", "note      a change", "note      a jump"]
  assert started.source == newest


@pytest.mark.parametrize("context, is_image, says", [(0, False, 0), (99, False, 1), (100, False, 0), (99, True, 0)])
def test_texts_that_are_longer_than_those_of_the_other_run_are_reported(
  context: int, is_image: bool, says: int, monkeypatch: pytest.MonkeyPatch
):
  started, _ = begun(Beginner(is_image=is_image), monkeypatch, context)
  note = f"note      model.seq_len=100 is more than the {context} tokens that they were made for"
  assert started.lines[2:] == [note] * says
  assert started.record["context"] == 100
  assert begun(Beginner(), monkeypatch, 4096)[0].record["context"] == 4096


def test_a_damaged_checkpoint_in_a_bucket_is_renamed_and_left_out_of_the_index(in_memory: Folder):
  checkpoints = in_memory / "checkpoints"
  for step in (2, 4):
    (checkpoints / str(step) / "record.json").write(b"{}")
  (checkpoints / "damaged-4-1" / "record.json").write(b"{}")  # of an earlier start
  (checkpoints / "index.json").write(json.dumps({"steps": [2, 4], "by": "this run"}).encode())
  assert restore._set_aside(checkpoints / "4") == "damaged-4-2"
  assert json.loads((checkpoints / "index.json").read_bytes()) == [2]
  records = [f"{name}/record.json" for name in ("2", "damaged-4-1", "damaged-4-2")]
  assert sorted(checkpoints.names()) == [*records, "index.json"]


def test_a_damaged_checkpoint_in_a_folder_is_renamed(tmp_path: Path):
  for name in ("2", "4", "damaged-4-1"):
    (tmp_path / name).mkdir()
  assert restore._set_aside(tmp_path / "4") == "damaged-4-2"
  assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "damaged-4-1", "damaged-4-2"]


def test_skipped_updates_are_counted_until_one_is_not():
  loop = LoopState(7, True, skipped_in_a_row=2, skipped_since_line=4, lowest_loss=1.5, since_lowest=1)
  skipped = loop.after(8, skipped=True)
  assert skipped == LoopState(8, False, 3, 5, 1.5, 1)
  assert skipped.after(9, skipped=False) == LoopState(9, False, 0, 5, 1.5, 1)


def test_the_lowest_loss_is_kept_and_counted_from():
  loop = LoopState(8, False, 0, 0, 1.5, 1)
  assert loop.after_evaluation(1.25) == LoopState(8, True, 0, 0, 1.25, 0)
  for loss in (1.5, 1.75, math.nan, -math.inf):
    assert loop.after_evaluation(loss) == LoopState(8, True, 0, 0, 1.5, 2)
  assert LoopState(2, False).after_evaluation(math.inf) == LoopState(2, True, 0, 0, None, 1)
  assert loop.after_evaluation(1.25).after_evaluation(1.0).lowest_loss == 1.25  # it was counted
