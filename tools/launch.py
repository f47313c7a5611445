"""Starts a job of several processes on this machine, as a cluster would on many: to try it out, and for tests.

    python -m tools.launch --processes=2 --devices-per-process=4 -- --config=configs/fsdp.py [train.py's flags ...]

Each process simulates its devices from the CPU, and they talk over local sockets (gloo). Their lines are prefixed by
their rank. SIGINT and SIGTERM go to all of them. If one fails the rest are ended, and its exit status is the job's.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TRAIN = Path(__file__).parents[1] / "train.py"
SECONDS_TO_END = 10.0  # that the others are given after one has failed, before they are killed
NOISE = "[Gloo] Rank "  # lines of the transport's own


def launch(processes: int, devices_per_process: int, arguments: Sequence[str], program: Path = TRAIN) -> int:
  """Runs `program` with these arguments in so many processes; returns the exit status of the first that failed, or 0.

  A process that was ended by a signal has the status 128 + its number, as in a shell.
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

  def forward(number: int, _: object) -> None:
    for job in jobs:
      if job.poll() is None:
        job.send_signal(number)

  handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
  jobs += [
    subprocess.Popen(
      [sys.executable, str(program), *common, f"--config.distributed.process={rank}"],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
      env=environment,
      start_new_session=True,  # so that a signal of the terminal comes to them once, by way of us
    )
    for rank in range(processes)
  ]
  lock = threading.Lock()
  readers = [threading.Thread(target=_copy, args=(job.stdout, rank, lock)) for rank, job in enumerate(jobs)]
  for reader in readers:
    reader.start()

  try:
    return _wait(jobs)
  finally:
    for job in jobs:
      job.kill()
    for reader in readers:
      reader.join()
    for number, handler in handlers.items():
      signal.signal(number, handler)


def _copy(source: IO[str], rank: int, lock: threading.Lock) -> None:
  """Copies the lines of a process to ours, prefixed by its rank."""
  for line in source:
    if not line.startswith(NOISE):
      with lock:
        print(f"[{rank}] {line}", end="", flush=True)


def _wait(jobs: list[subprocess.Popen]) -> int:
  """Waits for all; once one has failed, ends the rest. The status of the first that failed, or 0."""
  status, deadline = 0, None
  while any(job.poll() is None for job in jobs):
    if deadline is None:
      status = next((_status(job) for job in jobs if job.poll()), 0)
      if status:
        deadline = time.monotonic() + SECONDS_TO_END
    elif time.monotonic() > deadline:
      for job in jobs:
        job.kill()
    time.sleep(0.05)
  return status or next((_status(job) for job in jobs if job.returncode), 0)


def _status(job: subprocess.Popen) -> int:
  return 128 - job.returncode if job.returncode < 0 else job.returncode


def main() -> None:
  own, _, rest = _split(sys.argv[1:])
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--devices-per-process", type=int, default=4)
  options = parser.parse_args(own)
  for name, value in vars(options).items():
    if value < 1:
      parser.error(f"--{name.replace('_', '-')}={value} must be at least 1")
  if not rest:
    parser.error("nothing to run; give train.py's flags after --, such as -- --config=configs/fsdp.py")
  sys.exit(launch(options.processes, options.devices_per_process, rest))


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
  if "--" not in arguments:
    return arguments, "", []
  at = arguments.index("--")
  return arguments[:at], "--", arguments[at + 1 :]


if __name__ == "__main__":
  main()
