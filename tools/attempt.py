"""One start of a job on this machine: its processes, their output, and the signals that they are sent."""

import collections
import os
import queue
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

from errors import ConfigError

TRAIN = Path(__file__).parents[1] / "train.py"
NOISE = "[Gloo] Rank "  # lines that gloo prints; they are dropped
# On Linux a process first asks to be killed when the program that started it ends, even if that is killed; 1 is prctl's
# PR_SET_PDEATHSIG. Then it becomes the process of the job. (Code between fork and exec could do the same, but JAX warns
# of forks.)
BECOME = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
BEFORE = [sys.executable, "-c", BECOME] if sys.platform == "linux" else []
_printing = threading.Lock()
Take = Callable[[int, str], None]  # gets the rank of a process and a line of its output


class Forwarded:
  """While entered, SIGINT and SIGTERM go to all processes of the attempt in `to`. `received` holds their numbers."""

  def __init__(self) -> None:
    self.to: Attempt | None = None
    self.received: list[int] = []

  def __enter__(self) -> "Forwarded":
    self._before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _forward(self, number: int, _: FrameType | None) -> None:
    self.received.append(number)
    if self.to:
      self.to.send(number)


class Attempt:
  """The processes of a job. Use it as a context manager: no process outlives it, nor the program that entered it.

  Args:
    take: called with each line of output, in threads.
    places: the numbers of the places that the processes have, each of which counts as a host.
    signals: where signals come from. If one comes before all processes are started, the rest is not started.
  """

  def __init__(
    self, processes: int, devices_per_process: int, arguments: Sequence[str], program: Path, take: Take,
    signals: Forwarded, places: Sequence[int] = (),
  ):  # fmt: skip
    self.count, self.devices, self.arguments, self.program = processes, devices_per_process, arguments, program
    self.take, self.signals, self.places = take, signals, list(places) or list(range(processes))
    self.jobs: list[subprocess.Popen] = []
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
    for reader in self._readers:
      reader.join()

  def _start(self) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
      port = probe.getsockname()[1]
    common = [
      *self.arguments,
      f"--config.simulated_devices={self.devices}",
      f"--config.distributed.coordinator=127.0.0.1:{port}",
      f"--config.distributed.processes={self.count}",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    for rank in range(self.count):
      if self.signals.received:  # those that have started wait for the rest and have nothing to save
        return
      own = [f"--config.distributed.process={rank}", f"--config.distributed.host={host(self.places[rank])}"]
      try:
        job = subprocess.Popen(
          [*BEFORE, sys.executable, str(self.program), *common, *own],
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          errors="replace",
          env=environment,
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

  @property
  def whole(self) -> bool:
    """Whether all processes were started."""
    return len(self.jobs) == self.count

  def send(self, number: int) -> None:
    """Sends a signal to all processes that run."""
    for job in self.jobs:
      if job.poll() is None:
        job.send_signal(number)

  def kill(self) -> None:
    """Ends all processes at once, and waits until they are gone."""
    for job in self.jobs:
      job.kill()
    for job in self.jobs:
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

  def _read(self, job: subprocess.Popen, rank: int) -> None:
    source: IO[str] = job.stdout  # type: ignore[assignment]  # a pipe
    for line in source:
      if not line.startswith(NOISE):
        self.take(rank, line)

  def _wait(self, job: subprocess.Popen, rank: int) -> None:
    job.wait()
    self._ended.put(rank)


def host(place: int) -> str:
  """The name of the host that a place for a process counts as. It keeps its memory until that is removed."""
  return f"host{place}"


def show(rank: int, line: str) -> None:
  """Prints a line, prefixed by the rank of its process."""
  with _printing:
    print(f"[{rank}] {line}", end="", flush=True)


class Output:
  """The lines of a job: all go to a file for each start, and to the terminal after they were held for a while."""

  def __init__(self, folder: Path):
    self.folder, self.path = folder, folder
    self._held: collections.deque[tuple[float, int, str]] = collections.deque()
    self._last: dict[int, str] = {}
    self._lock = threading.Lock()

  def open(self, number: int) -> None:
    """Begins the file of a start."""
    self.path = self.folder / f"{number}.log"
    self._file = self.path.open("w")
    self._last = {}

  def close(self) -> None:
    self._file.close()

  def take(self, rank: int, line: str) -> None:
    with self._lock:
      self._file.write(f"[{rank}] {line}")
      self._file.flush()
      self._held.append((time.monotonic(), rank, line))
      if line.strip():
        self._last[rank] = line.strip().removeprefix("error: ")

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
    print(text, flush=True)
