"""Checkpoints that are sent to a bucket count if they are complete. The bucket is in memory, without a network."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from checkpointing import reading, restore
from checkpointing.shipping import Shipping
from errors import first_line
from runtime import processes
from runtime.storage.answers import StorageError
from runtime.storage.bucket import Folder

Start = Callable[..., Shipping]


class Killed(BaseException):
  """Ends the run where it is raised."""


def raising(error: BaseException) -> Callable[..., None]:
  """A function that raises an error."""

  def function(*_: object) -> None:
    raise error

  return function


@pytest.fixture
def start(in_memory: Folder, tmp_path: Path) -> Start:
  """Starts a run on a machine of its own. `push` and `check` are what its mirror does."""
  machines = iter(range(9))

  def function(push: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None) -> Shipping:
    return Shipping(tmp_path / str(next(machines)), SimpleNamespace(remote=in_memory, push=push, check=check))

  return function


def write(shipping: Shipping, step: int) -> None:
  """Writes a checkpoint on this machine, as orbax does."""
  for name in ("params/d/data", "optimizer/d/data", str(reading.RECORD)):
    file = shipping.local / str(step) / name
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": step}))


def test_a_run_that_was_killed_during_its_first_upload_starts_again(start: Start):
  killed = start(push=raising(Killed()))
  write(killed, 2)
  with pytest.raises(Killed):
    killed.send(2, sorted)
  assert (killed.remote / "2").is_dir()
  assert reading.steps(killed.remote) == []
  assert restore.restore(killed.remote, None, {}, pytest.fail) is None
  second = start()
  assert second.remote.names() == [reading.INDEX]
  write(second, 4)
  second.send(4, sorted)
  assert reading.steps(second.remote) == [4]


def test_a_checkpoint_that_was_copied_into_a_bucket_by_hand_counts(in_memory: Folder):
  for step in (4, 10):
    (in_memory / str(step) / reading.RECORD).write(b"{}")
  (in_memory / "12" / "params" / "d").write(b"")
  assert reading.steps(in_memory) == [4, 10]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory"), StorageError(errno.EIO, "no answer")])
def test_a_part_that_was_not_sent_is_not_marked_as_sent(
  error: Exception, start: Start, monkeypatch: pytest.MonkeyPatch
):
  """Whatever has failed in process 1, process 0 hears of it, and the checkpoint does not count."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(processes, "all_gather", lambda value: [value])
  first, second = start(), start()
  second.attempt = first.attempt
  for one in (first, second):
    write(one, 2)
  with monkeypatch.context() as patched:
    patched.setattr(jax, "process_index", lambda: 1)
    patched.setattr(Folder, "upload", raising(error))
    with pytest.raises(type(error)):
      second.send(2, sorted)
  with pytest.raises(StorageError, match=f"process 1: {first_line(error)}"):
    first.send(2, sorted)
  assert reading.steps(first.remote) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_run_that_has_lost_its_lease_does_not_replace_the_index(known: bool, start: Start):
  """Another run begins while the first one sends checkpoint 4. The first one finds out, or only much later."""
  others, sent = list[Shipping](), []

  def push() -> None:  # what comes before the record and the index
    sent.append(first.steps)
    if known and first.steps == [2]:
      others.append(start())

  def check() -> None:
    if known and others:
      raise StorageError(errno.EBUSY, "another run has taken over")
    if not known and sent == [[], [2]] and not others:
      others.append(start())

  first = start(push=push)
  first.mirror.check = check
  for step in (2, 4):
    write(first, step)
  first.send(2, sorted)
  with pytest.raises(StorageError, match="another run has"):
    first.send(4, sorted)
  (second,) = others
  assert reading.steps(second.remote) == [2]
  write(second, 6)
  second.send(6, sorted)
  assert reading.steps(second.remote) == [2, 6]
  start()
  assert {name.partition("/")[0] for name in second.remote.names()} == {"2", "6", reading.INDEX}


def test_each_start_changes_the_index(start: Start):
  """The generation of an object in S3 is a hash of its content."""
  first, second = ((start().remote / reading.INDEX).read_bytes() for _ in range(2))
  assert first != second


def test_an_index_whose_answer_was_lost_is_in_place(start: Start, monkeypatch: pytest.MonkeyPatch):
  """Storage puts the object, the answer gets lost, and the second try finds another generation."""
  run, put = start(), Folder.write
  write(run, 2)
  monkeypatch.setattr(Folder, "write", lambda *given, **fields: put(*given, **fields) and put(*given, **fields))
  run.send(2, sorted)
  assert reading.steps(run.remote) == [2]


def test_programs_on_this_machine_never_read_half_of_the_list(start: Start, monkeypatch: pytest.MonkeyPatch):
  """They would count what is in the folder. A kill at the last moment leaves the list from before."""
  run = start()
  for step in (2, 4):
    write(run, step)
  run.send(2, sorted)
  monkeypatch.setattr(Path, "replace", raising(Killed()))
  with pytest.raises(Killed):
    run.send(4, sorted)
  assert reading.steps(run.local) == [2]
