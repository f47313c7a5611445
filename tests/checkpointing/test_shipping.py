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
from storage.answers import StorageError
from storage.bucket import Folder


class Killed(BaseException):
  """Ends the run where it is raised."""


def raising(error: BaseException) -> Callable[..., None]:
  """A function that raises an error."""

  def function(*_: object) -> None:
    raise error

  return function


@pytest.fixture
def start(in_memory: Folder, tmp_path: Path) -> Callable[[], Shipping]:
  """Starts a run on a machine of its own."""
  machines = iter(range(9))
  mirror = SimpleNamespace(remote=in_memory, push=lambda: None)
  return lambda: Shipping(tmp_path / str(next(machines)), mirror)


def write(shipping: Shipping, step: int) -> None:
  """Writes a checkpoint on this machine, as orbax does."""
  for name in ("params/d/data", "optimizer/d/data", str(reading.RECORD)):
    file = shipping.local / str(step) / name
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": step}))


def test_a_run_that_was_killed_during_its_first_upload_starts_again(start: Callable[[], Shipping]):
  killed = start()
  write(killed, 2)
  killed.before = raising(Killed())
  with pytest.raises(Killed):
    killed.send(2, sorted)
  assert (killed.remote / "2").is_dir()
  assert reading.steps(killed.remote) == []
  assert restore.restore(killed.remote, None, {}, pytest.fail) is None
  second = start()
  assert second.remote.names() in ([], [reading.INDEX])
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
  error: Exception, start: Callable[[], Shipping], monkeypatch: pytest.MonkeyPatch
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
