"""Starts a job of several processes on this machine, as a cluster does on many machines. For trying out and for tests.

    python -m tools.launch --processes=2 --devices-per-process=4 -- --config=configs/fsdp.py [train.py's flags ...]

Each process simulates devices on the CPU. The processes communicate over local sockets (gloo), and their output lines
are prefixed by their rank. SIGINT and SIGTERM go to all processes. If one process fails, the others are ended, and the
job has its exit status.
"""

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from errors import ConfigError, positive
from runtime import command_line

TRAIN = Path(__file__).parents[1] / "train.py"
SECONDS_TO_END = 10.0  # after one process has failed, the others have this long to end before they are killed
NOISE = "[Gloo] Rank "  # lines that gloo prints; they are dropped


def launch(processes: int, devices_per_process: int, arguments: Sequence[str], program: Path = TRAIN) -> int:
  """Runs `program` with these arguments in several processes. Returns the first failed one's exit status, or 0.

  A process that a signal ended has the status 128 + the signal's number, as in a shell. So has the job, if the signal
  arrives before all processes are started. Raises ConfigError if one cannot be started. No process outlives this call.
  """
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  common = [
    *arguments,
    f"--config.simulated_devices={devices_per_process}",
    f"--config.distributed.coordinator=127.0.0.1:{port}",
    f"--config.distributed.processes={processes}",
  ]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
  jobs: list[subprocess.Popen] = []
  readers: list[threading.Thread] = []
  received: list[int] = []
  lock = threading.Lock()

  def forward(number: int, _: object) -> None:
    received.append(number)
    for job in jobs:
      if job.poll() is None:
        job.send_signal(number)

  handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    for rank in range(processes):
      try:
        job = subprocess.Popen(
          [sys.executable, str(program), *common, f"--config.distributed.process={rank}"],
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          errors="replace",
          env=environment,
          start_new_session=True,  # a terminal's signal then reaches the process once, through `forward`
        )
      except OSError as error:
        raise ConfigError(f"process {rank} cannot be started ({error.strerror}); use fewer --processes") from error
      jobs.append(job)
      reader = threading.Thread(target=_copy, args=(job.stdout, rank, lock))
      reader.start()
      readers.append(reader)
      if received:  # those that have started wait for the rest and have nothing to save
        return 128 + received[0]
    return _wait(jobs)
  finally:
    for job in jobs:
      job.kill()
      job.wait()
    for reader in readers:
      reader.join()
    for number, handler in handlers.items():
      signal.signal(number, handler)


def _copy(source: IO[str], rank: int, lock: threading.Lock) -> None:
  """Prints the output lines of a process, prefixed by its rank."""
  for line in source:
    if not line.startswith(NOISE):
      with lock:
        print(f"[{rank}] {line}", end="", flush=True)


def _wait(jobs: list[subprocess.Popen]) -> int:
  """Waits for all processes. After one fails, ends the others. Returns the first failed one's status, or 0.

  The others often fail a moment later, because their collectives lack the first. So a thread waits for each process.
  """
  ended: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()

  def wait_for(job: subprocess.Popen) -> None:
    job.wait()
    ended.put(job)

  for job in jobs:
    threading.Thread(target=wait_for, args=(job,), daemon=True).start()
  status, deadline = 0, None
  for _ in jobs:
    try:
      job = ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
      for job in jobs:
        job.kill()
      job = ended.get()
    if not status and job.returncode:
      status = 128 - job.returncode if job.returncode < 0 else job.returncode
      deadline = time.monotonic() + SECONDS_TO_END
  return status


def main() -> None:
  own, rest = _split(sys.argv[1:])
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--processes", type=int, default=2, help="default: 2")
  parser.add_argument("--devices-per-process", type=int, default=4, help="default: 4")
  options = parser.parse_args(own)
  with command_line.bad_input_ends_the_program():
    for name, value in vars(options).items():
      positive(name.replace("_", "-"), value)
    if not rest:
      raise ConfigError("the flags of train.py are missing; give them after --, such as -- --config=configs/fsdp.py")
  sys.exit(launch(options.processes, options.devices_per_process, rest))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
  """The arguments before and after the first `--`."""
  at = arguments.index("--") if "--" in arguments else len(arguments)
  return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
  main()
