"""One start of a job: its processes, where they run, their output, and the signals that they are sent."""

import collections
import contextlib
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from errors import ConfigError, visible
from reporting.appender import Appender, warn
from runtime.signals import stops
from runtime.stderr import print_if_read
from runtime.storage.bucket import Location, location

TRAIN = Path(__file__).parents[1] / "train.py"
KEPT = "\n\t"  # stay in the lines of processes; other control characters are shown as escapes
# Lines of gloo, and lines of SLURM about the end of a process, which is known already. They are dropped.
NOISE = re.compile(
  r"\[Gloo\] Rank |slurmstepd\S*: error: \*\*\*|"
  r"srun: (error: \S+: task 0: |Force Terminated|forcing job termination|Job step aborted)"
)
# On Linux a process first asks for a signal when the program that started it ends, even if that is killed; 1 is prctl's
# PR_SET_PDEATHSIG. Then it becomes the process of the job. (Code between fork and exec could do the same, but JAX warns
# of forks.)
BECOME = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
SECONDS_TO_END = 30.0  # for the processes of an attempt to be gone, once they are killed
SECONDS_TO_READ = 5.0  # and then for the rest of their output
_printing = threading.Lock()
Take = Callable[[int, str], None]  # gets the rank of a process and a line of its output


class Forwarded:
  """While entered, signals that stop a run (signals.STOPS) go to all processes of the attempt in `to`.

  `received`: the signals' numbers.
  """

  def __init__(self) -> None:
    self.to: Attempt | None = None
    self.received: list[int] = []

  def __enter__(self) -> "Forwarded":
    self._before = {number: signal.signal(number, self._forward) for number in stops()}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _forward(self, number: int, _: FrameType | None) -> None:
    self.received.append(number)
    if self.to:
      self.to.send(number)


class Here:
  """Where processes run: on this machine, with devices simulated from the CPU. job/slurm.py has another one.

  A place is a number from 0 on, for one process. A job with fewer processes leaves places out.

  Attributes:
    unit: how many places are lost together.
    ends: the signal that ends what `command` starts, at once and with all that it has started.
    sees_ends: whether the end of a process is seen at once, whatever ends it.
  """

  unit, ends, sees_ends = 1, signal.SIGKILL, True

  def __init__(self, processes: int, devices_per_process: int):
    self.processes, self.devices = processes, devices_per_process

  def places(self) -> list[int]:
    """The places that can be used now."""
    return list(range(self.processes))

  def ending(self) -> bool:
    """Whether something else ends the job now, so that it makes no sense to start it again."""
    return False

  def name(self, place: int) -> str:
    """The name of what is lost if the process at this place is lost."""
    return str(place)

  def host(self, place: int) -> str:
    return socket.gethostname()

  def address(self, place: int) -> str:
    """The host's address, for the other processes of the job."""
    return "127.0.0.1"

  def flags(self) -> list[str]:
    """Flags of train.py for all processes."""
    return [f"--config.simulated_devices={self.devices}"]

  def flags_of(self, place: int) -> list[str]:
    """Flags of train.py for the process at this place, which counts as a host of its own."""
    return [f"--config.distributed.host={simulated_host(place)}"]

  def command(self, place: int) -> list[str]:
    """What comes before the program's own command, to run it at this place."""
    return [sys.executable, "-c", BECOME, str(int(self.ends))] if sys.platform == "linux" else []

  def environment(self, place: int) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}

  def end(self, job: subprocess.Popen) -> None:
    """Ends what `command` has started at once, with all that it has started."""
    if job.poll() is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
        os.killpg(job.pid, self.ends)

  def end_rest(self) -> None:
    """Ends what `end` has not ended, and waits a while until it is gone. On this machine, `end` ends everything."""

  def send(self, jobs: Sequence[subprocess.Popen], number: int) -> None:
    """Sends a signal to the processes that run."""
    for job in jobs:
      if job.poll() is None:
        job.send_signal(number)


class Attempt:
  """The processes of a job. Use it as a context manager: no process outlives it, nor the program that entered it.

  Args:
    where: what runs processes.
    places: the places of the processes, in the order of their ranks.
    take: called with each line of output, in threads.
    signals: where signals come from. If a signal comes before all processes are started, the rest is not started.
  """

  def __init__(
    self, where: Here, places: Sequence[int], arguments: Sequence[str], program: Path, take: Take, signals: Forwarded
  ):
    self.where, self.places, self.count = where, places, len(places)
    self.arguments, self.program = arguments, program
    self.take, self.signals = take, signals
    self.jobs: list[subprocess.Popen] = []
    self._reached = 0  # how many processes had been started when the last signal came
    self._readers: list[threading.Thread] = []
    self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()

  def __enter__(self) -> "Attempt":
    """Starts the processes. Raises ConfigError if one cannot be started."""
    self.signals.to = self
    try:
      self._start()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_: object) -> None:
    self.signals.to = None
    self.kill()
    until = time.monotonic() + SECONDS_TO_READ
    for reader in self._readers:  # it ends with the last process that has the pipe, which may be a detached one
      reader.join(max(0.0, until - time.monotonic()))

  def _start(self) -> None:
    address = self.where.address(self.places[0])
    port = free_port()  # probably free on another host, too
    program = [
      sys.executable,
      str(self.program),
      *self.arguments,
      *self.where.flags(),
      f"--config.distributed.coordinator={address}:{port}",
      f"--config.distributed.processes={self.count}",
    ]
    for rank, place in enumerate(self.places):
      if self.signals.received:  # the started processes wait for the rest and have nothing to save
        return
      own = [f"--config.distributed.process={rank}", *self.where.flags_of(place)]
      try:
        job = subprocess.Popen(
          [*self.where.command(place), *program, *own],
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          errors="replace",
          env=os.environ | self.where.environment(place),
          start_new_session=True,  # a terminal's signal then reaches the process once, through `Forwarded`
        )
      except OSError as error:
        raise ConfigError(f"process {rank} cannot be started ({error.strerror}); use fewer --processes") from error
      self.jobs.append(job)
      for work in (self._read, self._wait):
        thread = threading.Thread(target=work, args=(job, rank), daemon=True)
        thread.start()
        if work == self._read:
          self._readers.append(thread)
    if self.signals.received and self._reached < self.count:  # a signal came while the last process started
      self.where.send(self.jobs[self._reached :], self.signals.received[-1])

  @property
  def whole(self) -> bool:
    """Whether all processes were started."""
    return len(self.jobs) == self.count

  def send(self, number: int) -> None:
    """Sends a signal to all processes that run."""
    self._reached = len(self.jobs)
    self.where.send(self.jobs, number)

  def kill(self) -> None:
    """Ends all processes at once, and waits until they are gone."""
    until, left = time.monotonic() + SECONDS_TO_END, list[subprocess.Popen]()
    for job in self.jobs:
      self.where.end(job)
    for job in self.jobs:
      try:
        job.wait(max(0.0, until - time.monotonic()))
      except subprocess.TimeoutExpired:  # it could not be ended, as on a host that is gone
        left.append(job)
    if left:
      self.where.end_rest()
    for job in left:
      job.kill()
      job.wait()

  def ended(self, seconds: float | None) -> int | None:
    """Waits at most so long for the next process that ends. Returns its rank; None if none has ended."""
    try:
      return self._ended.get(timeout=None if seconds is None else max(0.0, seconds))
    except queue.Empty:
      return None

  def status(self, rank: int) -> int:
    """The exit status of a process that has ended: 128 + the signal's number if a signal ended it, as in a shell."""
    code = self.jobs[rank].returncode
    return 128 - code if code < 0 else code

  def ended_by(self, rank: int) -> str:
    """The name of the signal that ended a process; "" if none did."""
    return next((number.name for number in signal.Signals if self.status(rank) == 128 + number), "")

  def _read(self, job: subprocess.Popen, rank: int) -> None:
    """Takes the lines of a process. Whatever fails, it goes on reading: a process whose pipe is full would wait."""
    source: IO[str] = job.stdout  # type: ignore[assignment]  # a pipe
    for line in source:
      if not NOISE.match(line):
        with contextlib.suppress(OSError, ValueError):
          self.take(rank, line)

  def _wait(self, job: subprocess.Popen, rank: int) -> None:
    job.wait()
    self._ended.put(rank)


def workdir_of(arguments: Sequence[str]) -> Location:
  """The workdir that flags of train.py name. Raises ConfigError if they name none."""
  if not {"--workdir", "-workdir"}.isdisjoint(arguments):
    raise ConfigError("--workdir has no value here; write --workdir=DIR")
  given = [flag.partition("=")[2] for flag in arguments if flag.startswith(("--workdir=", "-workdir="))]
  if not given or not given[-1]:
    raise ConfigError("--workdir is missing after --; name one, or each start would be a new run")
  return location(given[-1], "workdir")


def free_port() -> int:
  """A free port. It is outside the range that Linux gives to connections, so it stays free for a while."""
  while True:
    port = random.randrange(20_000, 32_000)
    with contextlib.suppress(OSError), socket.create_server(("", port)):
      return port


def simulated_host(place: int) -> str:
  """The name of the host that a place counts as. The host keeps what is in its memory until that is removed."""
  return f"host{place}"


def show(rank: int, line: str) -> None:
  """Prints a line, prefixed by the rank of its process."""
  with _printing:
    print_if_read(lambda: print(f"[{rank}] {visible(line, KEPT)}", end="", flush=True), "the job goes on")


class Output:
  """The lines of a job: all go to a file for each start, and to the terminal after they were held for a while."""

  def __init__(self, folder: Path):
    self.folder, self.path = folder, folder
    self._file: Appender | None = None
    self._held: collections.deque[tuple[float, int, str]] = collections.deque()
    self._last: dict[int, str] = {}
    self._lock = threading.Lock()

  def open(self, number: int) -> None:
    """Begins the file of a start. If the disk is full, the file gets what there is room for."""
    self.path = self.folder / f"{number}.log"
    try:
      self.path.unlink(missing_ok=True)
      self._file = Appender(self.path)
    except OSError as error:
      warn(f"{self.path} cannot be written ({error.strerror}); the job goes on without it")
    self._last = {}

  def close(self) -> None:
    with self._lock:
      if self._file:
        self._file.close()
      self._file = None

  def take(self, rank: int, line: str) -> None:
    line = visible(line, KEPT)
    with self._lock:
      self._held.append((time.monotonic(), rank, line))
      if line.strip():
        self._last[rank] = line.strip().removeprefix("error: ")
      if self._file:
        self._file.write(f"[{rank}] {line}".encode())

  def last(self, rank: int) -> str:
    """The last line of a process, which names its error if it has failed."""
    return self._last.get(rank, "it printed nothing")

  def release(self, held: float = 0.0) -> None:
    """Prints the lines that were held for so many seconds."""
    with self._lock:
      while self._held and time.monotonic() - self._held[0][0] >= held:
        _, rank, line = self._held.popleft()
        show(rank, line)

  def drop(self) -> None:
    """Leaves out the lines that are still held."""
    self._held.clear()

  def say(self, text: str) -> None:
    with _printing:
      print_if_read(lambda: print(text, flush=True), "the job goes on")
