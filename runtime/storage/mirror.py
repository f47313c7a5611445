"""Copies the small files of a run to a bucket, and back to a machine that has none of them.

A run writes metrics, journal, pages and so on into a folder on this machine, as always. The mirror puts those that
have changed into the bucket, each as a whole. `files.json` there names them, and is put after them, so a listing of the
bucket that lags behind loses none. Of a job on several machines, process 0 does so. Another process sends what it alone
has: its sign of life, and its part of a trace.
"""

import contextlib
import fnmatch
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from errors import JobConfigError, JobError
from runtime.storage.bucket import Folder, is_file
from runtime.storage.lease import LOCK, Lease

INDEX = "files.json"


class Holds(NamedTuple):
  """What a folder holds that a mirror treats apart, by name.

  Attributes:
    own: files and folders of this machine, which are not copied.
    sent: the beginning of the names that somebody else sends.
    passing: files and folders that say something of earlier processes on a machine. They are removed if another machine
      was the last to write into the bucket.
    beat: the file whose text the lease carries.
  """

  own: tuple[str, ...]
  sent: str
  passing: tuple[str, ...]
  beat: str


class NotSent(JobError):
  """A run has ended, but not all of its results are in the bucket."""


class Mirror:
  """A folder of this machine whose small files are copied to a bucket. Enter it to copy the rest at the end.

  Args:
    lease: the right to write there, which process 0 of a job has for all.
    warn: called with a message when files could not be copied by `soon`.
    holds: what is not copied, or treated apart.
    only: patterns of the files that another process sends; none if it shares its folder with process 0.
  """

  def __init__(
    self, local: Path, remote: Folder, lease: Lease | None, warn: Callable[[str], None], holds: Holds,
    only: Sequence[str] = (),
  ):  # fmt: skip
    self.local, self.remote, self.lease, self.warn, self.holds = local, remote, lease, warn, holds
    self.only = ("*",) if lease else only
    self._sent: dict[str, tuple[int, int]] = {}  # size and time of change when they were sent
    self._listed: list[str] = []  # what this process has in the bucket; for process 0, what INDEX says
    self._failing = False
    self._copying = threading.Lock()
    self._wanted, self._done = threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def lost(self) -> str:
    """Why this run must end: another one writes there now. "" if none is known."""
    return self.lease.lost() if self.lease else ""

  def check(self) -> None:
    """Raises StorageError unless this run surely still has the right to write there."""
    if self.lease is not None:
      self.lease.check()

  def bring(self) -> None:
    """Copies the files of the bucket to this machine, unless this machine was the last to write there and has them all.

    If that is interrupted, the next start does it again. Otherwise `push` would remove from the bucket what is missing.
    """
    if self.lease is None:
      return
    self._listed, beats = self._index(), self.local / self.holds.beat
    if self.lease.before != self.lease.home:
      for old in (self.local / name for name in self.holds.passing):  # a new run at the same place gets nothing of it
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
      for name in self._listed:
        try:
          (self.remote / name).download(self.local / name)
        except FileNotFoundError:
          continue  # somebody removed it
        self._sent[name] = _stamp(self.local / name)
      if self.lease.beat:  # mostly newer than the file that was sent
        beats.parent.mkdir(exist_ok=True)
        beats.write_text(self.lease.beat)
      self.lease.brought()
    self.lease.beats = beats

  def push(self) -> None:
    """Copies to the bucket what has changed, and removes there what is no longer here. Raises StorageError."""
    if not self.only:
      return
    with self._copying:
      self.check()
      here = {name: _stamp(self.local / name) for name in self._names()}
      changed = [name for name, stamp in here.items() if self._sent.get(name) != stamp]
      self.remote.upload(self.local, changed)
      if self.lease and sorted(here) != self._listed:
        (self.remote / INDEX).write(json.dumps(sorted(here)).encode())
      for name in set(self._listed) - here.keys():
        (self.remote / name).unlink()
      self._sent, self._listed, self._failing = here, sorted(here), False

  def soon(self) -> None:
    """Does the same in a thread of its own. Warns once if that fails; the next time tries again."""
    self._wanted.set()

  def __enter__(self) -> "Mirror":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    """Copies what is left. Raises NotSent if that cannot be done, unless the run has failed anyway.

    Raises JobConfigError if another run writes there now.
    """
    self._done.set()
    self._wanted.set()
    self._thread.join()
    failed = ""
    try:
      self.push()
    except OSError as error:
      failed = f"the last results in {self.local} could not be copied to {self.remote} ({error.strerror})"
    if self.lost() and (kind is None or issubclass(kind, JobError)):
      raise JobConfigError(self.lost())
    if failed and kind is None:
      raise NotSent(failed)
    if failed:
      self.warn(failed)

  def _run(self) -> None:
    while not self._done.is_set():
      self._wanted.wait()
      self._wanted.clear()
      if self._done.is_set():
        return
      try:
        self.push()
      except OSError as error:
        if not self._failing and not self.lost():  # which ends this run
          self.warn(
            f"the results cannot be copied to {self.remote} ({error.strerror}); training continues, and the next time "
            "retries"
          )
        self._failing = True

  def _index(self) -> list[str]:
    """The names of the files in the bucket. Without an index that can be read, those that are listed."""
    data, _ = (self.remote / INDEX).read()
    names: Any = None
    with contextlib.suppress(ValueError, RecursionError):
      names = json.loads(data or b"null")
    if not isinstance(names, list):
      names = self.remote.names()
    return [name for name in names if is_file(name) and self._is_ours(name)]

  def _names(self) -> list[str]:
    found = []
    for folder, folders, files in os.walk(self.local):  # without an error for folders that are removed meanwhile
      at = Path(folder).relative_to(self.local)
      folders[:] = [name for name in folders if self._is_ours((at / name).as_posix())]
      found += [name for file in files if self._is_ours(name := (at / file).as_posix())]
    return [name for name in found if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)]

  def _is_ours(self, name: str) -> bool:
    """Whether this mirror copies a file, or the files of a folder, with this name."""
    parts = name.split("/")
    hidden = any(part.startswith(".") or part.endswith(".part") for part in parts)
    return not hidden and not parts[0].startswith(self.holds.sent) and parts[0] not in (*self.holds.own, LOCK, INDEX)


def _stamp(file: Path) -> tuple[int, int]:
  try:
    stat = file.stat()
  except FileNotFoundError:  # removed a moment ago
    return 0, 0
  return stat.st_size, stat.st_mtime_ns
