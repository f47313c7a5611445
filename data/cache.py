"""The cache of prepared data. A folder becomes visible only when it is complete, whatever ends the program before that.

A folder is prepared under a hidden name and renamed at the end. One process prepares it; others that need it wait. If
the preparation is killed, the hidden folder stays, and the next one that needs it may go on where it was.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data import sealed
from errors import ConfigError, expanded, of_system
from runtime.storage import owners
from runtime.storage.answers import StorageError
from runtime.storage.flushing import flush

verify = [False]  # whether contents are hashed that this user has prepared
MARK, COMPLETE = "key", "meta.json"  # in a folder that several keys may fill; the second is written last


class ToGoOn(ConfigError):
  """Bad input that the user may correct. What has been prepared so far stays, and the next start may go on from it."""


def prepared(root: str, name: str, key: Any, write: Callable[[Path], None], same: Any = None) -> Path:
  """Returns the folder for (name, key) under `root`. If there is none yet, `write(folder)` fills it first.

  The folder that `write` gets is empty, or holds what a killed `write` with the same key left there, or one that ended
  with ToGoOn. If `same` is given, that may also be one with another key, and `write` must check what it finds. Raises
  ConfigError or Unavailable if `root` cannot be written, if its disk is full, or if what it has is not what was
  prepared.
  """
  whole, folder = _digest(key), expanded(root, "data.cache_dir")
  begun, name = f".{name}-{_digest(key if same is None else same)[:16]}", f"{name}-{whole[:16]}"
  try:
    place = owners.place(folder, "data.cache_dir")
    for shelf in place.read:
      if (final := shelf.folder / name).exists():
        sealed.check(final, whole, shelf, verify[0])
        return final
    if place.write is None:
      raise ConfigError(
        f"data.cache_dir={root!r} lacks {name}, and is read only; let its owner prepare that, or use another folder"
      )
    folder = place.write
    final, unfinished = folder / name, folder / begun
    with _alone(folder / f"{begun}.lock") as locked:
      if final.exists():  # another process has prepared it meanwhile
        return final
      if not locked:
        unfinished = Path(tempfile.mkdtemp(prefix=f"{unfinished.name}-", dir=folder))
      _remove_planted(unfinished)
      unfinished.mkdir(mode=0o700, exist_ok=True)
      if same is not None:
        _mark(unfinished, whole)
      try:
        write(unfinished)
      except ToGoOn:
        raise
      except ConfigError:
        shutil.rmtree(unfinished, ignore_errors=True)  # bad input; nothing to go on from
        raise
      (unfinished / MARK).unlink(missing_ok=True)
      _flush(unfinished, folder.stat().st_mode)
      sealed.seal(unfinished, final, whole)
      try:
        os.rename(unfinished, final)
      except OSError:
        if not final.exists():
          raise
        shutil.rmtree(unfinished, ignore_errors=True)  # without locks, another process was first
      (folder / f"{begun}.lock").unlink(missing_ok=True)
  except OSError as error:
    if isinstance(error, StorageError) or error.errno is None:
      raise  # of a bucket, from which the folder is filled
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      raise of_system(
        error,
        f"data.cache_dir={root!r} is full ({error.strerror}); free some space and run the same command again, which "
        "continues the preparation, or use another folder",
      ) from error
    at = Path(error.filename) if error.filename else folder
    if at != folder and folder not in at.parents and at not in folder.parents:
      raise  # not about the cache
    raise of_system(
      error, f"data.cache_dir={root!r} cannot be written ({error.strerror}); use another folder"
    ) from error
  return final


def _mark(unfinished: Path, digest: str) -> None:
  """Notes the key for which a folder is filled. What was complete for another key is removed."""
  mark = unfinished / MARK
  if (unfinished / COMPLETE).exists() and (not mark.exists() or mark.read_text() != digest):
    for path in unfinished.iterdir():
      path.unlink()
  mark.write_text(digest)


def _digest(key: Any) -> str:
  return hashlib.sha256(repr(key).encode()).hexdigest()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
  """Waits until no other process is in this block with this lock. The lock ends with the process that holds it.

  Yields false if the file system has no locks.
  """
  locked = True
  with open(lock, "a", opener=owners.mine_alone) as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f"waiting for another process to prepare {lock.stem[1:]} in {lock.parent}", file=sys.stderr, flush=True)
      fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
      locked = False
    yield locked


def _remove_planted(unfinished: Path) -> None:
  """Removes an unfinished folder in which anything is not a file or folder that its owner alone has made there."""
  if unfinished.is_symlink():
    unfinished.unlink()
    return
  owner = unfinished.parent.stat().st_uid
  for path in [unfinished, *unfinished.rglob("*")] if unfinished.exists() else ():
    seen = path.lstat()
    is_folder = stat.S_ISDIR(seen.st_mode)
    if seen.st_uid != owner or not (is_folder or (stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1)):
      shutil.rmtree(unfinished)
      return


def _flush(folder: Path, mode: int) -> None:
  """Flushes all files to disk, so that after a power failure the renamed folder is still whole.

  Nobody else may write to them. Others may read them if they may read the folder around, whose `mode` is given.
  """
  for path in [*folder.rglob("*"), folder]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
      own = os.fstat(descriptor).st_mode
      with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(descriptor, 0o700 | mode & 0o055 if path == folder else stat.S_IMODE(own) & ~0o022)
      flush(descriptor)
    finally:
      os.close(descriptor)
