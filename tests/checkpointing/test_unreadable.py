"""What cannot be seen or read now is neither absent nor damaged: the run says so, and nothing is renamed or moved."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from helpers import ROOT, config, one_sentence
from users import AS_ROOT, another_user

import train
from checkpointing import form, reading
from checkpointing.finished import is_finished
from checkpointing.memory import tier
from checkpointing.save import Checkpoints
from errors import Unavailable, unseen
from reporting.source import checkpoint_of
from runtime.storage.answers import Unreadable, unreadable
from tools import checkpoint

CHECKPOINT_FIELDS = {"model__depth": 1, "steps": 2, "sample_length": 0, "compilation_cache_dir": ""}


def run(folder: Path) -> Path:
  """A workdir, as far as a program sees that its checkpoints are of a run."""
  record = folder / "checkpoints" / "8" / reading.RECORD
  record.parent.mkdir(parents=True)
  record.write_text("{}")
  for name in ("metrics.jsonl", "journal.jsonl", "report.html"):
    (folder / name).touch()
  return folder


def names(folder: Path) -> list[str]:
  return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def away(workdir: Path) -> str:
  """The checkpoints are on a disk that is not mounted."""
  (workdir / "checkpoints").rename(workdir / "unmounted")
  (workdir / "checkpoints").symlink_to(workdir / "disk" / "checkpoints")
  return f"'{workdir}/checkpoints' is a link to '{workdir}/disk/checkpoints', which is not there; mount that disk"


def closed(workdir: Path) -> str:
  """They are in a folder of another owner, that cannot be listed."""
  (workdir / "checkpoints").chmod(0)
  return (
    f"'{workdir}/checkpoints' cannot be read (Permission denied; it belongs to root, and this user is 4711); give this"
  )


CASES = [away, pytest.param(closed, marks=AS_ROOT)]


@pytest.mark.parametrize("how", CASES)
def test_checkpoints_that_are_not_seen_are_not_taken_for_none(how: Callable[[Path], str], tmp_path: Path):
  says = how(workdir := run(tmp_path / "run"))
  for look in (
    lambda: reading.steps(workdir / "checkpoints"),
    lambda: reading.newest(workdir),
    lambda: checkpoint_of(workdir, None),
    lambda: checkpoint.find(workdir),
  ):
    with one_sentence(says, kind=Unavailable), another_user(workdir):
      look()


@pytest.mark.parametrize("how", CASES)
def test_a_run_moves_nothing_before_it_has_seen_its_checkpoints(how: Callable[[Path], str], tmp_path: Path):
  says = how(workdir := run(tmp_path / "run"))
  os.chown(workdir, 4711, 4711)
  before = names(workdir)
  with one_sentence(says, kind=Unavailable), another_user(workdir):
    train.train(config("single", **CHECKPOINT_FIELDS, runtime__heartbeat=0, data__name="synthetic"), workdir)
  assert set(names(workdir)) - {"lock"} == set(before)


@AS_ROOT
def test_a_record_that_may_not_be_read_is_not_damaged(tmp_path: Path):
  folder = run(tmp_path / "run") / "checkpoints" / "8"
  (folder / reading.RECORD).chmod(0)
  with one_sentence(f"{str(folder / reading.RECORD)!r} cannot be read (Permission denied", kind=Unavailable):
    with another_user(folder):
      reading.read_record(folder)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("kind", ["of the system", "of tensorstore", "wrapped by orbax"])
def test_errors_of_the_machine_are_told_from_damage(
  kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """No test can make a disk fail, so orbax raises here what it raised when it was tried."""
  (tmp_path / "params").mkdir()

  def fails(*_: object, **__: object) -> None:
    if kind == "of the system":
      raise OSError(number, os.strerror(number), f"{tmp_path}/params/_METADATA")
    text = f'PERMISSION_DENIED: Error reading local file "{tmp_path}/params/d/a": Failed to open: {os.strerror(number)}'
    raise ValueError(text) if kind == "of tensorstore" else Exception("Failed") from ValueError(text)

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fails)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = [("params/w", jax.ShapeDtypeStruct((1,), "float32", sharding=here))]
  saved = {"arrays": {"params/w": [[1], "float32", "00000000"]}}
  for read in (
    lambda: reading.read_arrays(tmp_path, wanted),
    lambda: reading.read_array(tmp_path, saved, "params/w"),
    lambda: reading.read_tree(tmp_path, {"params": {"w": wanted[0][1]}}, saved),
  ):
    with one_sentence(str(tmp_path), os.strerror(number), kind=Unavailable):
      read()


def test_what_is_wrong_with_files_is_damage():
  for error in (
    FileNotFoundError(errno.ENOENT, "x"),
    ValueError("checksum mismatch"),
    EOFError("x"),
    IsADirectoryError(),
  ):
    assert not unseen(error)


def test_a_missing_file_is_no_reason_to_forget_what_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """The folder in memory of another run is removed; that of a run that cannot be read is not."""
  assert tier.note_of(tmp_path) == {}

  def fails(path: Path, *_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files", str(path))

  monkeypatch.setattr(form, "read", fails)
  monkeypatch.setattr(Path, "read_text", fails)
  with pytest.raises(OSError, match="Too many"):
    tier.note_of(tmp_path)
  with pytest.raises(OSError, match="Too many"):
    tier._is_of(tmp_path, "abc")
  assert tier.newest(tmp_path) == -1


def test_a_launcher_is_told_that_nothing_is_known(tmp_path: Path):
  workdir = run(tmp_path / "run")
  (workdir / "config.json").write_text('{"steps": 8, "stop_after": 0}')
  away(workdir)
  with one_sentence("which is not there", kind=Unreadable):
    is_finished(workdir)


def test_an_unreadable_file_has_a_sentence_by_its_error(tmp_path: Path):
  for number, fix in ((errno.EMFILE, "ulimit -n"), (errno.EIO, "check its disk"), (errno.ESTALE, "mount")):
    found = unreadable(OSError(number, os.strerror(number), str(tmp_path)), ROOT)
    assert str(found).startswith(f"{str(tmp_path)!r} cannot be read ({os.strerror(number)}); ")
    assert fix in str(found)
    assert isinstance(found, Unavailable)


@AS_ROOT
def test_checkpoints_that_cannot_be_written_are_named_at_the_start(tmp_path: Path):
  """Not when the first one is due, which may be after hours of training."""
  (tmp_path / "checkpoints").mkdir()
  with one_sentence(f"workdir='{tmp_path}/checkpoints' cannot be written (Permission denied; it belongs to root"):
    with another_user(tmp_path / "checkpoints"):
      Checkpoints(tmp_path / "checkpoints", 1, 0, print, print)
