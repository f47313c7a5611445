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
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from errors import ConfigError, of_system
from storage.answers import StorageError


def prepared(root: str, name: str, key: Any, write: Callable[[Path], None]) -> Path:
  """Returns the folder for (name, key) under `root`. If there is none yet, `write(folder)` fills it first.

  The folder that `write` gets is empty, or holds what a killed `write` with the same key left there. Raises ConfigError
  or Unavailable if `root` cannot be written, or if its disk is full.
  """
  digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
  folder = Path(root).expanduser()
  final, unfinished = folder / f"{name}-{digest}", folder / f".{name}-{digest}"
  if final.exists():
    return final
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / f".{name}-{digest}.lock") as locked:
      if final.exists():  # another process has prepared it meanwhile
        return final
      if not locked:
        unfinished = Path(tempfile.mkdtemp(prefix=f"{unfinished.name}-", dir=folder))
      unfinished.mkdir(exist_ok=True)
      try:
        write(unfinished)
      except ConfigError:
        shutil.rmtree(unfinished, ignore_errors=True)  # bad input; nothing to go on from
        raise
      _flush(unfinished)
      try:
        os.rename(unfinished, final)
      except OSError:
        if not final.exists():
          raise
        shutil.rmtree(unfinished, ignore_errors=True)  # without locks, another process was first
      (folder / f".{name}-{digest}.lock").unlink(missing_ok=True)
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


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
  """Waits until no other process is in this block with this lock. The lock ends with the process that holds it.

  Yields false if the file system has no locks.
  """
  locked = True
  with lock.open("a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f"waiting for another process to prepare {lock.stem[1:]} in {lock.parent}", file=sys.stderr, flush=True)
      fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
      locked = False
    yield locked


def _flush(folder: Path) -> None:
  """Flushes all files to disk, so that after a power failure the renamed folder is still whole."""
  for path in [*folder.rglob("*"), folder]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
