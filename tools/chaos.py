"""Hurts a job at random and shows that it heals: its losses are those of a job that was never hurt.

    python -m tools.chaos --faults=10 -- --config=configs/fsdp.py:tiny --workdir=runs/chaos

First runs the job undisturbed, in WORKDIR/undisturbed. Then runs it again, in WORKDIR/hurt, with a supervisor
(tools.launch --restart), and does one of these to a random process, again and again: kills it, also with all that its
host has in memory, stops it, so that all others wait, or makes it slow for a while. Sometimes the supervisor is the
process that is killed; then it is started again. At the end it prints what it did, and compares all losses. The job
logs every step, and saves often, also in the hosts' memory.
"""

import argparse
import collections
import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from checkpointing.reading import FOLDER, steps
from errors import ConfigError
from reporting import heartbeat, metrics
from runtime import command_line
from tools.attempt import host
from tools.launch import check, parsed
from tools.supervisor import workdir_of

LOSE = "lose the host of"  # kills a process, and removes what its host has in memory
FAULTS = {"kill": 4, LOSE: 2, "stop": 1, "slow": 2, "kill the supervisor": 1}  # how often each of them is, among ten
AT_START = 0.25  # of the faults come while processes start; the others, while they train
LONGEST = 4.0  # seconds until the next fault may come
SLOW = 2.0  # seconds for which a process is slow
EVERY = 5  # steps between checkpoints
IN_MEMORY = 2  # steps between saves in the hosts' memory
POLL = 0.1
SHARED = Path("/dev/shm")


class Job:
  """A job under a supervisor, which is a process of its own."""

  def __init__(self, workdir: Path, options: argparse.Namespace, arguments: Sequence[str], memory: Path):
    self.workdir, self.memory = workdir, memory
    self.command = [
      sys.executable, "-m", "tools.launch", "--restart", f"--processes={options.processes}",
      f"--devices-per-process={options.devices_per_process}", "--restarts=1000", "--shortest=10", "--",
      *arguments, f"--workdir={workdir}", "--config.log_every=1", f"--config.checkpoint.every={EVERY}",
      f"--config.checkpoint.memory_every={IN_MEMORY}", f"--config.checkpoint.memory_dir={memory}",
    ]  # fmt: skip
    self.start()

  def start(self) -> None:
    self.process = subprocess.Popen(self.command, cwd=Path(__file__).parents[1])

  def beats(self) -> dict[int, heartbeat.Beat]:
    """The last signs of life of processes that run."""
    return {rank: beat for rank, beat in heartbeat.of_job(self.workdir).items() if _runs(beat["pid"])}

  def wait_for_a_step(self, after: float) -> None:
    """Waits until a process that began after this time has done a step, or until the job has ended."""
    while self.process.poll() is None:
      if any(beat["began"] > after and beat["doing"] in heartbeat.STEPS for beat in self.beats().values()):
        return
      time.sleep(POLL)


def hurt(job: Job, faults: int, chance: random.Random) -> collections.Counter[str]:
  """Hurts a job so many times, or until it has ended. Returns what was done how often."""
  done: collections.Counter[str] = collections.Counter()
  began = 0.0
  while done.total() < faults and job.process.poll() is None:
    if chance.random() > AT_START:
      job.wait_for_a_step(began)
    time.sleep(chance.uniform(0, LONGEST))
    (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
    beats = job.beats()
    if job.process.poll() is not None or not beats:
      continue
    rank = chance.choice(sorted(beats))
    what = f"{fault} process {rank}" if fault != "kill the supervisor" else fault
    print(f"chaos     {what} after step {beats[rank]['step']}", flush=True)
    _do(fault, job, beats[rank]["pid"], rank)
    began = time.time() if fault != "slow" else began
    done[fault] += 1
  return done


def _do(fault: str, job: Job, pid: int, rank: int) -> None:
  if fault == "kill the supervisor":
    job.process.kill()
    job.process.wait()
    job.start()
  elif fault == "slow":
    until = time.monotonic() + SLOW
    while time.monotonic() < until and _runs(pid):
      for number in (signal.SIGSTOP, signal.SIGCONT):
        _send(pid, number)
        time.sleep(POLL)
  else:
    _send(pid, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
  if fault == LOSE:
    for folder in job.memory.glob(f"*/{host(rank)}"):
      shutil.rmtree(folder, ignore_errors=True)


def _send(pid: int, number: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, number)


def _runs(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def compared(undisturbed: Path, found: Path) -> tuple[int, float]:
  """The steps whose lines are missing or there twice, and the largest relative difference of a loss."""
  ours, theirs = (_losses(workdir / "metrics.jsonl") for workdir in (found, undisturbed))
  wrong = sum(len(ours.get(key, [])) != 1 for key in theirs) + len(ours.keys() - theirs.keys())
  apart = [abs(ours[key][0] - loss) / abs(loss) for key, (loss, *_) in theirs.items() if key in ours]
  return wrong, max(apart, default=math.inf)


def _losses(path: Path) -> dict[tuple[str, int], list[float]]:
  found = collections.defaultdict(list)
  for line in metrics.read(path):
    if line["split"] in ("train", "validation"):
      found[line["split"], line["step"]].append(line["loss"])
  return found


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
  """Does all of it, and returns the exit status: 1 if the job did not end, or if it is not what it would have been."""
  workdir = workdir_of(arguments)
  rest = [flag for flag in arguments if not flag.lstrip("-").startswith("workdir=")]
  undisturbed, found = workdir / "undisturbed", workdir / "hurt"
  if steps(found / FOLDER) or steps(undisturbed / FOLDER):
    raise ConfigError(f"--workdir={str(workdir)!r} holds an earlier job; name a new folder")
  with tempfile.TemporaryDirectory(prefix="meshwright-", dir=SHARED if SHARED.is_dir() else None) as memory:
    if status := Job(undisturbed, options, rest, Path(memory)).process.wait():
      return status
    job = Job(found, options, rest, Path(memory))
    try:
      done = hurt(job, options.faults, random.Random(options.seed))
      status = job.process.wait()
    finally:
      job.process.terminate()
  wrong, apart = compared(undisturbed, found)
  what = ", ".join(f"{count} × {fault}" for fault, count in done.items())
  equal = "bit by bit" if apart == 0 else f"to {apart:.0e}"
  print(f"chaos     {done.total()} faults ({what}); {wrong} steps lost or repeated; losses equal {equal}")
  return status or int(wrong > 0 or apart > 1e-5)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--faults", type=int, default=10, help="default: 10")
  parser.add_argument("--seed", type=int, default=0, help="of what is done to whom and when (default: 0)")
  parser.add_argument("--processes", type=int, default=4, help="default: 4")
  parser.add_argument("--devices-per-process", type=int, default=2, help="default: 2")
  options, rest = parsed(parser)
  with command_line.bad_input_ends_the_program():
    check(options, rest, "faults")
    sys.exit(run(options, rest))


if __name__ == "__main__":
  main()
