"""Signs of life of a process: WORKDIR/heartbeats/PROCESS.json says what it is doing, for whoever watches the job.

    python -m reporting.heartbeat WORKDIR PROCESS    # fails if the process hangs; for a container's liveness probe

A file without its process means that the process was killed, or that it failed. The next run reads what it did until
then, so that no second is missing in the job's account. A run that ends in order removes its file.

If the workdir is in a bucket, the file is in the folder of this machine that is copied there.
"""

import collections
import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import limits
from errors import visible
from reporting import pages
from reporting.speed import Clock, process_start
from runtime.storage.bucket import Location, here, location
from runtime.workdir import BEATS

FOLDER = BEATS  # in a workdir
STEPS = ("data", "train", "repeat")  # what a process does in steps
PATIENCE = 1800.0  # seconds without progress after which a process hangs outside of steps, as while it compiles
SHORTEST = 30.0  # seconds that are never too long for a step
SILENT = 5.0  # seconds without a sign of life after which a process is silent
SLOW = 10.0  # a step that takes so many times as long as the slowest one before hangs
PROBE, PROBE_BYTES = ".probe", 1 << 16  # a file that shows whether beats, which are smaller, can be written
AGAIN = 10.0  # seconds until the liveness probe looks again at a silent process
HANGS = 4  # exit status of this file's program
LAST = 100  # steps of which a beat gives the mean times
MOST = 1 << 53  # numbers in a beat are below this
READ: dict[str, Any] = {"host": str, "doing": str, "wall_time": dict}  # what is read of a beat, and its type
READ |= dict.fromkeys(("pid", "process", "step", "furthest"), int)
READ |= dict.fromkeys(("time", "began", "since", "slowest"), int | float)
Beat = dict[str, Any]


class Heartbeat:
  """Writes a process's file every few seconds while it is entered, from a thread of its own.

  The thread goes on while the program hangs, so each beat says since when nothing has changed.

  Args:
    rank: the number of the process in its job.
    clock: says what the process is doing, and for how long it has done what.
    seconds: the time between two beats; 0: no beats.

  Attributes:
    killed: the last beats of earlier processes, until the next run finds them in its journal. This journal may be lost
      with the machine, or be moved away by a run that begins at step 0.
    furthest: the last step that any of these processes is known to have done. Up to this step, the run repeats.
  """

  def __init__(self, workdir: Path, rank: int, clock: Clock, seconds: float):
    self.path, self.rank, self.clock, self.seconds = workdir / FOLDER / f"{rank}.json", rank, clock, seconds
    self.step, self.slowest = 0, 0.0  # the last step that is done; seconds of the slowest step
    self._doing = (time.time(), clock.current)  # since when the process does this, and what it does
    self.killed: list[Beat] = []
    self.furthest = 0
    self._spent: float | None = None  # seconds spent in steps, when the last one was done
    self._steps = collections.deque[tuple[float, float]](maxlen=LAST)  # seconds of a step, and those on the host
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def __enter__(self) -> "Heartbeat":
    self.killed = self._of_killed()
    self.furthest = max((beat["furthest"] for beat in self.killed), default=0)
    if self.rank:
      self.killed = []  # only process 0 has a journal
    if self.seconds:
      self.write()
      self._thread.start()
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    self._done.set()
    if self.seconds:
      self._thread.join()
      self.write()
      if kind is None:
        with contextlib.suppress(OSError):
          self.path.unlink()

  def _of_killed(self) -> list[Beat]:
    """The last beats of earlier processes that were killed or failed, and that no journal is sure to keep."""
    last = read(self.path)
    return [beat for beat in (*last.pop("killed", []), last) if is_whole(beat)] if last else []

  def work(self, step: int) -> str:
    """What the clock calls a step: "train", or "repeat" if an earlier run has done it and lost it."""
    return "repeat" if step <= self.furthest else "train"

  def after(self, step: int, waited: float = 0.0) -> None:
    """Must be called when a step is known to be done. `waited`: seconds of it that this process waited for devices."""
    spent = sum(self.clock.spent.get(name, 0.0) for name in STEPS)
    if self._spent is not None:
      seconds = spent - self._spent
      self.slowest = max(self.slowest, seconds)
      self._steps.append((seconds, max(0.0, seconds - waited)))
    self.step, self._spent = step, spent
    self.alive()

  def alive(self) -> None:
    """May be called in the middle of long work, which then does not seem to hang."""
    self._doing = time.time(), self.clock.current

  def unchanged(self) -> Beat:
    """What the process was doing at its last beat, and since when nothing has changed."""
    return {"doing": self._doing[1], "since": self._doing[0]}

  def write(self) -> None:
    """Writes the file, as a whole. A disk that is full ends nothing."""
    if self.clock.current != self._doing[1]:
      self._doing = time.time(), self.clock.current
    found = {
      "process": self.rank, "pid": os.getpid(), "time": time.time(),
      "began": self.clock.began, "step": self.step, **self.unchanged(), "slowest": self.slowest,
      "wall_time": self.clock.parts(), "furthest": max(self.furthest, self.step), "killed": self.killed,
      **self.pace(),
    }  # fmt: skip
    with contextlib.suppress(OSError):
      self.path.parent.mkdir(exist_ok=True)
      pages.write(self.path, json.dumps(found))

  def pace(self) -> Beat:
    """The host's name, and seconds of a step and of the host's work in it, without waiting: means of the last steps."""
    steps = list(self._steps)
    sums = [sum(times) / len(steps) for times in zip(*steps, strict=True)]
    return {"host": socket.gethostname(), **dict(zip(("step_time", "on_host"), sums, strict=False))}

  def _run(self) -> None:
    while not self._done.wait(self.seconds):
      self.write()


def read(path: Location) -> dict[str, Any]:
  """The JSON object in a file; {} if there is none, or if it is damaged."""
  with contextlib.suppress(OSError, ValueError):
    found = limits.described(path, most=limits.RECORD)
    if isinstance(found, dict):
      return found
  return {}


def is_whole(beat: Any) -> bool:
  """Whether a beat has all fields that are read (READ), in the form in which they are written."""
  if not (isinstance(beat, dict) and beat.keys() >= READ.keys()):
    return False
  return all(
    isinstance(beat[name], kind) and (kind in (str, dict) or 0 <= beat[name] < MOST) for name, kind in READ.items()
  )


def of_job(workdir: Location) -> dict[int, Beat]:
  """The last beats of a job's processes, by their numbers."""
  files = (workdir / FOLDER).glob("*.json")
  return {int(file.stem): beat for file in files if file.stem.isdigit() and is_whole(beat := read(file))}


def process(beat: Beat) -> tuple[object, ...]:
  """What tells the process of a beat from all others."""
  return beat["host"], beat["pid"], beat["began"]


def starting(since: float) -> Beat:
  """What is known of a process that has given no sign of life yet."""
  return {"doing": "starting", "since": since, "slowest": 0.0, "step": 0}


def late(beat: Beat, now: float, patience: float = PATIENCE, shortest: float = SHORTEST) -> bool:
  """Whether a process has made no progress for so long that it hangs, or waits for one that does."""
  limit = patience
  if beat["doing"] in STEPS and beat["slowest"]:
    limit = min(limit, max(shortest, SLOW * beat["slowest"]))
  return now - beat["since"] > limit


def hanging(
  beats: Mapping[int, Beat], now: float, patience: float, shortest: float, writable: Callable[[], bool]
) -> int | None:
  """The process of a job that hangs; None if none does.

  All others wait for it, so those that give signs of life make no progress, either. The one that is silent or behind is
  to blame. If none gives signs of life, the disk may be full, and that says nothing.

  Args:
    beats: the last beat of each process that runs, or `starting`.
    patience, shortest: as for `late`.
    writable: whether beats can be written. Called if no process gives a sign of life.
  """
  alive = {rank for rank, beat in beats.items() if now - beat.get("time", 0.0) <= SILENT}
  stuck = {rank for rank in alive or beats if late(beats[rank], now, patience, shortest)}
  if not stuck or (not alive and not writable()):
    return None
  return min(beats.keys() - alive or stuck, key=lambda rank: (beats[rank]["step"], beats[rank]["since"]))


class Watcher:
  """Reads the beats of a job again and again, also while its workdir cannot be read or written."""

  def __init__(self, workdir: Path):
    self.workdir = workdir
    self._found: dict[int, Beat] = {}
    self._full = -math.inf  # when beats last could not be written

  def beats(self) -> dict[int, Beat]:
    """The last beats of the job's processes; those of the last look, if the workdir cannot be read now."""
    with contextlib.suppress(OSError):
      self._found = of_job(self.workdir)
    return self._found

  def takes_beats(self) -> bool:
    """Whether beats can be written, and could a moment ago, so that a silent process has not tried."""
    if not can_be_written(self.workdir):
      self._full = time.monotonic()
    return time.monotonic() - self._full > SILENT


def can_be_written(workdir: Path) -> bool:
  """Whether a process can write its beats. A full disk takes none, though training continues."""
  try:
    (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
    pages.write(workdir / FOLDER / PROBE, " " * PROBE_BYTES)
    return True
  except OSError:
    return False


def main() -> None:
  """The liveness probe. A sign of life from before this container started is of an earlier start of the job.

  A silent process is looked at again a moment later: a full disk may have room for its beats only now.
  """
  workdir, rank = here(location(sys.argv[1], "workdir")), int(sys.argv[2])
  began = process_start(1)
  for wait in (0.0, AGAIN):
    time.sleep(wait)
    last, now = of_job(workdir).get(rank), time.time()
    beat = last if last and last["began"] >= began else starting(began)
    if hanging({rank: beat}, now, PATIENCE, SHORTEST, lambda: can_be_written(workdir)) is None:
      return
    if now - beat.get("time", 0.0) <= SILENT:
      break
  seconds, doing = now - beat["since"], beat["doing"]
  print(f"process {rank} made no progress for {seconds:.0f} s ({visible(doing)}) after step {beat['step']}")
  sys.exit(HANGS)


if __name__ == "__main__":
  main()
