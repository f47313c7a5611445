"""Keeps a second run out of a folder of a bucket.

An object `lock.json` says who writes there. It is only ever changed if it still is as it was read, so of two runs that
want it one gets it. A run renews it every few seconds. One that was killed renews it no more: another machine waits
PATIENCE seconds to see that, and the same machine need not wait, because its own lock (runtime/folders.py) tells it.
Times of different machines are never compared.

The lock also carries the last sign of life of process 0. If its machine is lost, the next run knows from it what was
done until a few seconds before.
"""

import contextlib
import errno
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import Unavailable
from runtime.storage.answers import StorageError
from runtime.storage.bucket import Folder

LOCK = "lock.json"
RENEW = 10.0  # seconds between two renewals
PATIENCE = 35.0  # seconds without a renewal after which a run has ended


class Lease:
  """The right to write into a folder of a bucket. Enter it to get the right, and leave it to give it up.

  Args:
    home: names this machine's working folder of the run.
    owner: names this run in the error that another run gets.
    say: prints a line, if it takes long.

  Attributes:
    before: the home of the run that had the right before, if that had all files of the folder; "" if there was none.
    beat: the last sign of life that the lock carries; "" if there is none.
    beats: the file that holds this run's. Until it is known, the lock keeps that of the run before.
  """

  def __init__(self, folder: Folder, home: str, owner: str, say: Callable[[str], None]):
    self.folder, self.home, self.owner, self.say = folder, home, owner, say
    self.before, self.beat = "", ""
    self.beats: Path | None = None
    self._object = folder / LOCK
    self._generation, self._count, self._renewed = b"", 0, 0.0
    self._whole = False  # whether this home has all files of the folder
    self._taken_by = ""  # who took the right while this run had it, with the time of its start
    self._change = threading.Lock()
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def __enter__(self) -> "Lease":
    """Raises Unavailable if another run has the right, and StorageError if that cannot be found out."""
    self._take()
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._done.set()
    self._thread.join()
    with contextlib.suppress(StorageError):  # then the next run waits for the end of this one
      self._write(held=False)

  def check(self) -> None:
    """Raises StorageError unless this run surely still has the right."""
    if not self._taken_by and time.monotonic() - self._renewed > PATIENCE / 2:
      self._renew()
    if why := self.lost():
      raise StorageError(errno.EBUSY, why)

  def lost(self) -> str:
    """Why this run must end, as a sentence without a full stop: another one has the right now. "" if none is known."""
    return self._taken_by and (
      f"workdir={str(self.folder)!r} was taken over by {self._taken_by}, so this run ends and saves nothing more; let "
      "that one go on, or end it and run this command again"
    )

  def brought(self) -> None:
    """Notes in the lock that this home has all files of the folder now. Raises StorageError."""
    self._whole = True
    self._renew()

  def _take(self) -> None:
    probe = self.folder / ".write-test"  # what is refused here gets its own sentence, and is no second run
    probe.write(b"")
    probe.unlink()
    generation, found = self._look()
    if found.get("held") and found.get("home") != self.home:
      generation, found = self._wait_for_its_end(generation, found)
    self.before = str(found.get("home", "")) if found.get("whole", True) else ""
    self.beat = str(found.get("beat", ""))
    self._whole = self.before == self.home
    self._generation = generation
    if not self._write(held=True):
      raise self._in_use(self._look()[1])

  def _look(self) -> tuple[bytes, dict[str, Any]]:
    """The generation of the lock, and what it says: {} if there is none."""
    data, generation = self._object.read()
    return generation, _parsed(data or b"{}")

  def _wait_for_its_end(self, generation: bytes, found: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Waits until the other run has given up the right, or has not renewed it for PATIENCE seconds."""
    self.say(f"waiting up to {PATIENCE:.0f} s: {self.folder} was in use by {found.get('owner')}")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
      time.sleep(PATIENCE / 35)
      newer, now = self._look()
      if newer != generation:
        if now.get("held"):
          raise self._in_use(now)
        return newer, now
    return generation, found

  def _in_use(self, found: dict[str, Any]) -> Unavailable:
    return Unavailable(
      f"workdir={str(self.folder)!r} is in use by another run ({found.get('owner')}); name another, or end that run"
    )

  def _write(self, held: bool) -> bool:
    """Changes the lock, if it is still as this run knows it."""
    with self._change:
      self._count += 1  # S3's ETag is a hash of the content: without it, equal versions would have the same one
      if self.beats:
        self.beat = _text(self.beats)
      said = {"held": held, "owner": self.owner, "home": self.home, "whole": self._whole, "count": self._count}
      said["beat"] = self.beat
      written = self._object.write(json.dumps(said).encode(), only_if=self._generation)
      if written is None:
        # An answer may have been lost, and the second try refused: then the lock says what we wrote.
        written, found = self._look()
        if found != said:
          self._taken_by = f"another run ({found['owner']})" if "owner" in found else f"whoever changed {self._object}"
          return False
      self._generation, self._renewed = written, time.monotonic()
      return True

  def _renew(self) -> None:
    if not self._taken_by:
      self._write(held=True)

  def _run(self) -> None:
    while not self._done.wait(RENEW):
      with contextlib.suppress(StorageError):  # `check` tries again
        self._renew()


def _text(path: Path) -> str:
  """The content of a file; "" if there is none."""
  try:
    return path.read_text()
  except OSError:
    return ""


def _parsed(data: bytes) -> dict[str, Any]:
  """What a lock says. One that cannot be read is held by nobody."""
  with contextlib.suppress(ValueError, RecursionError):
    found = json.loads(data)
    if isinstance(found, dict):
      return found
  return {}
