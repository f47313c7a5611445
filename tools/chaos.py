"""Hurts a job at random and shows that it heals: its losses are those of a job that was never hurt.

    python -m tools.chaos --faults=10 -- --config=configs/fsdp.py:tiny --workdir=runs/chaos

First runs the job undisturbed, in WORKDIR/undisturbed. Then runs it again, in WORKDIR/hurt, with a supervisor
(tools.launch --restart), and does one of these to a random process, again and again: kills it, also with all that its
host has in memory, stops it, so that all others wait, makes it slow for a while, or flips a bit of a weight
(lab/fragile.py). Sometimes the supervisor is the process that is killed; then it is started again. At the end it prints
what it did, and compares all losses. The job logs every step, compares the copies of its weights after every step, and
saves often, also in the hosts' memory.
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
from job.attempt import simulated_host, workdir_of
from lab import fragile
from reporting import heartbeat, metrics
from runtime import command_line
from runtime.folders import writable
from runtime.storage import Folder
from tools.launch import check, parsed

LOSE = "lose the host of"  # kills a process, and removes what its host has in memory
FAULTS = {"kill": 4, LOSE: 1, "stop": 1, "slow": 2, "corrupt": 1, "kill the supervisor": 1}  # how often each, among ten
# How the last line counts them.
COUNTED = {
  "kill": "process killed", LOSE: "host lost", "stop": "process stopped", "slow": "process slowed",
  "corrupt": "bit flipped", "kill the supervisor": "supervisor killed",
}  # fmt: skip
AT_START = 0.25  # of the faults come while processes start; the others, while they train
WITHIN_SECONDS = 4.0  # those come
WITHIN_STEPS = 20  # the others come
PATIENCE = 120  # seconds without progress, outside of steps, after which the supervisor takes a process for hung
SLOW = 2.0  # seconds for which a process is slow
EVERY = 5  # steps between checkpoints
IN_MEMORY = 2  # steps between saves in the hosts' memory
POLL = 0.1
# The supervisor's command, for a job of this program.
LAUNCH = f"from pathlib import Path; from tools import launch; launch.main(Path({str(fragile.__file__)!r}))"
SHARED = Path("/dev/shm")


class Job:
  """A job under a supervisor, which is a process of its own."""

  def __init__(self, workdir: Path, options: argparse.Namespace, arguments: Sequence[str], memory: Path):
    self.workdir, self.memory = workdir, memory
    checks = () if any("runtime.check_every" in flag for flag in arguments) else ("--config.runtime.check_every=1",)
    self.command = [
      sys.executable, "-c", LAUNCH, "--restart", f"--processes={options.processes}",
      f"--devices-per-process={options.devices_per_process}", "--restarts=1000", "--shortest=10",
      f"--patience={PATIENCE}", "--", *arguments, f"--workdir={workdir}", "--config.log_every=1",
      f"--config.checkpoint.every={EVERY}", *checks,
      f"--config.checkpoint.memory_every={IN_MEMORY}", f"--config.checkpoint.memory_dir={memory}",
    ]  # fmt: skip
    self.start()

  def start(self) -> None:
    self.process = subprocess.Popen(self.command, cwd=Path(__file__).parents[1])

  def beats(self) -> dict[int, heartbeat.Beat]:
    """The last signs of life of processes that run."""
    return {rank: beat for rank, beat in heartbeat.of_job(self.workdir).items() if _runs(beat["pid"])}

  def wait_for_steps(self, after: float, count: int) -> None:
    """Waits until processes that began after this time have done a step and then `count` more, or the job has ended."""
    first = 0
    while self.process.poll() is None:
      done = max((beat["step"] for beat in self.beats().values() if beat["began"] > after), default=0)
      first = first or done
      if done and done >= first + count:
        return
      time.sleep(POLL)


def hurt(job: Job, faults: int, chance: random.Random) -> collections.Counter[str]:
  """Hurts a job so many times, or until it has ended. Returns what was done how often."""
  done: collections.Counter[str] = collections.Counter()
  began, deck = 0.0, list[str]()
  while done.total() < faults and job.process.poll() is None:
    deck = deck or chance.sample(list(FAULTS), counts=list(FAULTS.values()), k=sum(FAULTS.values()))
    if chance.random() > AT_START or deck[-1] in ("corrupt", "stop"):
      job.wait_for_steps(began, round(chance.uniform(0, WITHIN_STEPS)))
    else:
      time.sleep(chance.uniform(0, WITHIN_SECONDS))
    beats = job.beats()
    if job.process.poll() is not None or not beats:
      continue
    fault = deck.pop()
    rank = chance.choice(sorted(beats))
    what = f"{fault} process {rank}" if fault != "kill the supervisor" else fault
    print(f"chaos     {what} after step {beats[rank]['step']}", flush=True)
    _do(fault, job, beats[rank]["pid"], rank)
    if fault == "corrupt":
      job.wait_for_steps(began, 2)  # the bit flips after the next one
    began = began if fault in ("slow", "corrupt") else time.time()
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
    _send(pid, {"stop": signal.SIGSTOP, "corrupt": fragile.SIGNAL}.get(fault, signal.SIGKILL))
  if fault == LOSE:
    for folder in job.memory.glob(f"*/{simulated_host(rank)}"):
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


def compared(undisturbed: Path, found: Path) -> tuple[set[tuple[str, int]], float]:
  """The lines, by split and step, that are missing or there twice, and the largest relative difference of a loss."""
  ours, theirs = (_losses(workdir / "metrics.jsonl") for workdir in (found, undisturbed))
  wrong = {key for key in ours.keys() | theirs.keys() if key not in theirs or len(ours.get(key, [])) != 1}
  apart = [_apart(ours[key][0], loss) for key, (loss, *_) in theirs.items() if key in ours]
  return wrong, max(apart, default=math.inf)


def _apart(ours: float | None, theirs: float | None) -> float:
  """The relative difference of two losses. None is one that was not finite."""
  if ours is None or theirs is None:
    return 0.0 if ours == theirs else math.inf
  return abs(ours - theirs) / abs(theirs)


def _losses(path: Path) -> dict[tuple[str, int], list[float | None]]:
  found = collections.defaultdict(list)
  for line in metrics.read(path):
    if line["split"] in ("train", "validation"):
      found[line["split"], line["step"]].append(line["loss"])
  return found


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
  """Does all of it, and returns the exit status: 1 if the job did not end, or if it is not what it would have been."""
  named = workdir_of(arguments)
  if isinstance(named, Folder):
    raise ConfigError(f"--workdir={named} is a bucket, but chaos hurts jobs of this machine; name a folder of it")
  workdir = writable(named, "workdir")
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
  what = ", ".join(f"{count} × {COUNTED[fault]}" for fault, count in done.items())
  equal = "bit by bit" if apart == 0 else f"to {apart:.0e}"
  config = heartbeat.read(undisturbed / "config.json")  # the examples of a batch follow from its step
  examples = [config["batch_size"] * count for count in (sum(split == "train" for split, _ in wrong), config["steps"])]
  lost = f"{examples[0]:,} of {examples[1]:,} examples lost or repeated"
  print(f"chaos     {done.total()} faults ({what}); {lost}; losses equal {equal}")
  return status or int(bool(wrong) or apart > 1e-5)


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
