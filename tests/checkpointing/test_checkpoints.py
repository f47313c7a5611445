"""Checkpoints are written during training. Damaged ones are set aside, and failed writes are reported."""

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import config, initial_state, one_sentence, program, random_batch, strategy

import train
from checkpointing import initial, reading, restore
from checkpointing.save import Checkpoints, NotSaved
from strategies import Strategy
from training.loop import LoopState
from training.program import TrainState

# Orbax leaves exceptions behind when a read or write is given up. In a run, checkpointing/storage_logs.py hides them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RUN = {
  "config": {"model": {"width": 64}},
  "data": {"fingerprints": [], "turns": [], "tokenizer": "", "seed": 0, "batch_size": 16},
  "strategy": "fsdp", "devices": 8, "processes": 1,
}  # fmt: skip


class Messages(list):
  """Collects notes and warnings."""

  @property
  def text(self) -> str:
    return "\n".join(self)


def checkpoints(folder: Path, messages: Messages, keep: int = 9, keep_best: int = 0) -> Checkpoints:
  return Checkpoints(folder, keep, keep_best, messages.append, messages.append)


@pytest.fixture(scope="module")
def runner() -> Strategy:
  return strategy("fsdp", program(model__depth=1))


def save(writer: Checkpoints, step: int, state: TrainState, loss: float | None = None) -> None:
  writer.save(state, RUN, LoopState(step, evaluated=False))
  if loss is not None:
    writer.evaluated(step, loss)


def copy(state: TrainState) -> list[np.ndarray]:
  return [np.array(x) for x in jax.tree.leaves(state)]


def read(folder: Path, runner: Strategy, messages: Messages) -> tuple[list[np.ndarray], int]:
  state, saved = restore.restore(folder, runner.abstract_state(), RUN, messages.append)
  for x, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(runner.abstract_state()), strict=True):
    assert x.sharding == abstract.sharding
  return copy(state), saved["loop"]["step"]


def test_a_checkpoint_holds_the_state_of_its_step_while_training_continues(tmp_path: Path, runner: Strategy):
  """Later steps reuse the memory of the state (donation), which must not change what is written."""
  messages, expected = Messages(), {}
  state = initial_state(runner)
  batch = runner.shard(random_batch(runner.program, 16), 16)
  with checkpoints(tmp_path, messages) as writer:
    for step in range(1, 4):
      state, _ = runner.train_step(state, batch)
      expected[step] = copy(state)
      save(writer, step, state)
      state, _ = runner.train_step(state, batch)
  for step in range(3, 0, -1):
    found, number = read(tmp_path, runner, messages)
    assert number == step
    for x, y in zip(found, expected[step], strict=True):
      np.testing.assert_array_equal(x, y)
    shutil.rmtree(tmp_path / str(step))
  assert messages.text.count("saved") == 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, runner: Strategy) -> tuple[Path, list[np.ndarray]]:
  """A folder with checkpoints 1 and 2, and the state of the first."""
  folder = tmp_path_factory.mktemp("written")
  state = initial_state(runner)
  first = copy(state)
  batch = runner.shard(random_batch(runner.program, 16), 16)
  with checkpoints(folder, Messages()) as writer:
    for step in (1, 2):
      save(writer, step, state)
      state, _ = runner.train_step(state, batch)
  return folder, first


def data_files(checkpoint: Path) -> list[Path]:
  """The files that hold arrays, largest first."""
  return sorted((f for f in checkpoint.glob("*/ocdbt.process_0/d/*") if f.is_file()), key=lambda f: -f.stat().st_size)


def flip(file: Path) -> None:
  """Flips a bit in the middle."""
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
  "a file is missing": lambda c: data_files(c)[0].unlink(),
  "a file is truncated": lambda c: data_files(c)[0].write_bytes(data_files(c)[0].read_bytes()[:1000]),
  "a file is empty": lambda c: data_files(c)[0].write_bytes(b""),
  "one bit is flipped": lambda c: flip(data_files(c)[0]),
  "the parameters are missing": lambda c: shutil.rmtree(c / "params"),
  "the record is missing": lambda c: (c / "run" / "metadata").unlink(),
  "the record is not JSON": lambda c: (c / "run" / "metadata").write_text('{"step": 2'),
  "the record lacks its fields": lambda c: (c / "run" / "metadata").write_text('{"step": 2}'),
  "the record is nested without end": lambda c: (c / "run" / "metadata").write_text(100_000 * "["),
  "it is a copy of another step": lambda c: (shutil.rmtree(c), shutil.copytree(c.parent / "1", c)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
  damage: str, tmp_path: Path, written: tuple[Path, list[np.ndarray]], runner: Strategy
):
  folder, first = written
  shutil.copytree(folder, tmp_path / "c")
  DAMAGE[damage](tmp_path / "c" / "2")
  messages = Messages()
  found, step = read(tmp_path / "c", runner, messages)
  assert step == 1
  for x, y in zip(found, first, strict=True):
    np.testing.assert_array_equal(x, y)
  (message,) = messages
  for part in ("checkpoint 2 in", str(tmp_path), "is damaged", "renamed to damaged-2-1"):
    assert part in message
  assert (tmp_path / "c" / "damaged-2-1").is_dir()
  assert reading.steps(tmp_path / "c") == [1]


def test_digests_find_damage_that_decodes_without_an_error(tmp_path: Path, written: tuple, runner: Strategy):
  """The record of another checkpoint has other digests, as if the arrays had changed unnoticed."""
  shutil.copytree(written[0], tmp_path / "c")
  of_first = json.loads((tmp_path / "c" / "1" / "run" / "metadata").read_text())
  of_first["loop"]["step"] = 2
  (tmp_path / "c" / "2" / "run" / "metadata").write_text(json.dumps(of_first))
  messages = Messages()
  assert read(tmp_path / "c", runner, messages)[1] == 1
  assert "is not what was saved" in messages.text


@pytest.mark.parametrize("what", ["a pipe", "a link to a folder"])
def test_what_is_no_file_in_a_checkpoint_is_not_waited_for(what: str, tmp_path: Path):
  """The libraries below would wait for a pipe without end."""
  (tmp_path / "params" / "d").mkdir(parents=True)
  at = tmp_path / "params" / "d" / "ab"
  os.mkfifo(at) if what == "a pipe" else at.symlink_to(tmp_path)
  with pytest.raises(ValueError, match="'ab' is not a file"):
    reading.read_arrays(tmp_path, [("params/w", jax.ShapeDtypeStruct((1,), "float32"))])


def test_only_decimal_numbers_are_steps(tmp_path: Path):
  for name in ("10", "1\N{SUPERSCRIPT TWO}", "3.part"):
    (tmp_path / name).mkdir()
  assert reading.steps(tmp_path) == [10]


def test_if_all_checkpoints_are_damaged_the_run_does_not_start_over(tmp_path: Path, written: tuple, runner: Strategy):
  shutil.copytree(written[0], tmp_path / "c")
  for step in ("1", "2"):
    (tmp_path / "c" / step / "run" / "metadata").unlink()
  for _ in range(2):  # twice, because a cluster may restart a failed job
    with one_sentence("none of the checkpoints", str(tmp_path), "record cannot be read", "name another workdir"):
      restore.restore(tmp_path / "c", runner.abstract_state(), RUN, Messages().append)
    assert reading.steps(tmp_path / "c") == [1, 2]
  for step in ("1", "2"):
    (tmp_path / "c" / step).rename(tmp_path / "c" / f"damaged-{step}-1")
  with one_sentence("none of the checkpoints", "all are damaged"):
    restore.restore(tmp_path / "c", runner.abstract_state(), RUN, Messages().append)


def test_an_unreadable_loss_stops_neither_saving_nor_restoring(tmp_path: Path, written: tuple, runner: Strategy):
  shutil.copytree(written[0], tmp_path / "c")
  (tmp_path / "c" / "1" / "run" / "metadata").write_text("")
  with checkpoints(tmp_path / "c", Messages(), keep=9, keep_best=1) as writer:
    save(writer, 3, initial_state(runner), 1.0)
  assert reading.steps(tmp_path / "c") == [1, 2, 3]
  assert read(tmp_path / "c", runner, Messages())[1] == 3


def test_another_optimizer_is_not_mistaken_for_damage(tmp_path: Path, written: tuple, runner: Strategy):
  shutil.copytree(written[0], tmp_path / "c")
  abstract = runner.abstract_state()
  other = TrainState(abstract.step, abstract.params, {"momentum": abstract.params})
  with one_sentence("checkpoint 2", "another model or optimizer", "opt_state/momentum", "absent in the checkpoint"):
    restore.restore(tmp_path / "c", other, RUN, Messages().append)
  assert reading.steps(tmp_path / "c") == [1, 2]


class full_disk:
  """Limits files to 4 KB. A larger write fails in the middle, as on a full disk."""

  def __enter__(self) -> None:
    self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.before[1]))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # keeps the compilation cache out of the test

  def __exit__(self, *_: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path, runner: Strategy):
  messages = Messages()
  state = initial_state(runner)
  writer = checkpoints(tmp_path, messages)
  with pytest.raises(NotSaved, match=r"steps 2 could not be written"), writer:  # noqa: PT012
    save(writer, 1, state)
    writer.finish()
    with full_disk():
      save(writer, 2, state)
      writer._pending[-1].exception()  # waits until the write has failed
      assert "could not" not in messages.text
      writer.check()
    assert "checkpoint 2 in" in messages[-1]
    for part in ("could not be written", "File too large", "training continues, checkpoint 1 stays"):
      assert part in messages[-1]
    save(writer, 3, state)
  assert sorted(f.name for f in tmp_path.iterdir()) == ["1", "3"]  # nothing remains of the failed one
  assert read(tmp_path, runner, messages)[1] == 3


def test_a_loss_that_cannot_be_written_is_not_a_lost_checkpoint(tmp_path: Path, runner: Strategy):
  messages = Messages()
  with pytest.raises(NotSaved, match=r"^the losses of steps 1 could"), checkpoints(tmp_path, messages) as writer:  # noqa: PT012
    save(writer, 1, initial_state(runner))
    writer.finish()
    (tmp_path / "1" / reading.RECORD).with_suffix(".part").mkdir()  # in the way of what would be written
    writer.evaluated(1, 2.0)
    assert "the loss of checkpoint 1 could not be written" in messages[-1]
    assert writer.failed == []  # the end of a run says that this step is saved
  assert read(tmp_path, runner, messages)[1] == 1


def test_a_run_whose_folder_moves_does_not_write_elsewhere(tmp_path: Path, runner: Strategy):
  """A new folder at the same path would hold half of the run. Saving works again when the folder is back."""
  messages, folder, away = Messages(), tmp_path / "checkpoints", tmp_path / "moved"
  state = initial_state(runner)
  with pytest.raises(NotSaved, match=r"steps 2, 3 could not be written"), checkpoints(folder, messages) as writer:  # noqa: PT012
    save(writer, 1, state)
    writer.finish()
    folder.rename(away)
    for step in (2, 3):
      save(writer, step, state)
      assert "was moved or removed; move it back" in messages[-1]
    assert not folder.exists()
    away.rename(folder)
    save(writer, 4, state)
  assert reading.steps(folder) == [1, 4]


@pytest.mark.full
def test_a_run_with_a_full_disk_ends_with_an_error_and_its_results(tmp_path: Path, capsys: pytest.CaptureFixture):
  fields = {"steps": 2, "log_every": 1, "sample_length": 0, "data__name": "synthetic", "model__depth": 1}
  fields["compilation_cache_dir"] = ""
  small = config("fsdp", **fields)
  with full_disk(), pytest.raises(SystemExit) as ended:
    train.main(small, tmp_path / "full")
  assert ended.value.code == 1
  out, error = capsys.readouterr()
  assert "validation 2/2" in out
  assert "error: checkpoint 2 in" in error
  assert "error: the checkpoints of steps 2 could not be written" in error
  assert "Traceback" not in error


def test_the_latest_and_the_best_are_kept(tmp_path: Path, runner: Strategy):
  state = initial_state(runner)
  losses = [3.0, 1.0, float("nan"), 2.0, None, None]
  with checkpoints(tmp_path, Messages(), keep=2, keep_best=1) as writer:
    for step, loss in enumerate(losses, 1):
      save(writer, step, state, loss)
  assert reading.steps(tmp_path) == [2, 5, 6]
  assert [reading.read_record(tmp_path / step)["loop"]["evaluated"] for step in ("2", "5")] == [True, False]
  with checkpoints(tmp_path, Messages(), keep=1, keep_best=2) as writer:  # reads the losses from the folder
    save(writer, 7, state, 1.5)
  assert reading.steps(tmp_path) == [2, 7]


def test_what_cannot_be_removed_yet_is_no_checkpoint_and_is_tried_again(
  tmp_path: Path, runner: Strategy, monkeypatch: pytest.MonkeyPatch
):
  """NFS keeps a file that a program has open as `.nfs...`, and says "Device or resource busy"."""
  state, messages, remove = initial_state(runner), Messages(), shutil.rmtree

  def busy(folder: Path, ignore_errors: bool) -> None:
    remove(folder / "params", ignore_errors=ignore_errors)  # the rest stays

  with checkpoints(tmp_path, messages, keep=1) as writer:
    monkeypatch.setattr(shutil, "rmtree", busy)
    for step in (1, 2, 3):
      save(writer, step, state)
    writer.finish()
    assert reading.steps(tmp_path) == [3]
    assert {folder.name for folder in tmp_path.glob("removed-*")} == {"removed-1", "removed-2"}
    assert messages.text.count("removed-1' cannot be removed; it is tried again") == 1
    monkeypatch.setattr(shutil, "rmtree", remove)
    save(writer, 4, state)
  assert [folder.name for folder in tmp_path.iterdir()] == ["4"]


def test_a_checkpoint_stays_until_the_next_one_would_survive_a_power_failure(
  tmp_path: Path, runner: Strategy, monkeypatch: pytest.MonkeyPatch
):
  there, sync = list[list[int]](), os.fsync

  def synced(descriptor: int) -> None:
    sync(descriptor)
    if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):  # the last thing to sync: it has the new name
      there.append(reading.steps(tmp_path))

  monkeypatch.setattr(os, "fsync", synced)
  with checkpoints(tmp_path, Messages(), keep=1) as writer:
    for step in (1, 2):
      save(writer, step, initial_state(runner))
  assert there == [[1], [1, 2]]
  assert reading.steps(tmp_path) == [2]


def test_checkpoints_use_no_pickle(tmp_path: Path, runner: Strategy, monkeypatch: pytest.MonkeyPatch):
  for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
    monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("pickled"))
  messages = Messages()
  with checkpoints(tmp_path, messages) as writer:
    save(writer, 1, initial_state(runner))
  assert read(tmp_path, runner, messages)[1] == 1


def test_a_checkpoint_of_another_record_version_is_refused(tmp_path: Path, runner: Strategy):
  with checkpoints(tmp_path / reading.FOLDER, Messages()) as writer:
    save(writer, 2, initial_state(runner))
  newer = RUN | {"version": 99}
  file = tmp_path / reading.FOLDER / "2" / reading.RECORD
  found = json.loads(file.read_text())
  file.write_text(json.dumps({name: value for name, value in found.items() if name != "loop"}))  # unknown to others
  with one_sentence("record version None", "99"):
    restore.restore(tmp_path / reading.FOLDER, runner.abstract_state(), newer, pytest.fail)
  with one_sentence("init_from=", "record version None", "99"):
    initial.load(str(tmp_path), runner.abstract_state().params, runner.program, newer)
