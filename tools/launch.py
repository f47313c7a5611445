"""Starts a job of several processes on this machine, as a cluster does on many machines. For trying out and for tests.

    python -m tools.launch --processes=2 --devices-per-process=4 -- --config=configs/fsdp.py [train.py's flags ...]
    python -m tools.launch --processes=4 --restart -- --config=configs/fsdp.py --workdir=runs/a

Each process simulates devices on the CPU. The processes communicate over local sockets (gloo), and their output lines
are prefixed by their rank. SIGINT and SIGTERM go to all processes. If one process fails, the others are ended, and the
job has its exit status. With --restart, the job is started again from its newest checkpoint (job/supervisor.py).
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from errors import ConfigError, above_zero, not_negative, positive
from job.attempt import TRAIN, Attempt, Forwarded, Here, show
from job.slurm import Nodes
from job.supervisor import Policy, supervise
from reporting.heartbeat import PATIENCE, SHORTEST
from runtime import command_line

SECONDS_TO_FOLLOW = 10.0  # after one process has failed, the others have this long to end by themselves


def launch(processes: int, devices_per_process: int, arguments: Sequence[str], program: Path = TRAIN) -> int:
  """Runs `program` with these arguments in several processes. Returns the first failed one's exit status, or 0.

  A process that a signal ended has the status 128 + the signal's number, as in a shell. So has the job, if the signal
  arrives before all processes are started. Raises ConfigError if one cannot be started. No process outlives this call.
  """
  with (
    Forwarded() as signals,
    Attempt(Here(processes, devices_per_process), range(processes), arguments, program, show, signals) as attempt,
  ):
    return _wait(attempt) if attempt.whole else 128 + signals.received[0]


def _wait(attempt: Attempt) -> int:
  """Waits for all processes. After one fails, ends the others. Returns the first failed one's status, or 0.

  The others often fail a moment later, because their collectives lack the first.
  """
  status, deadline = 0, None
  for _ in range(attempt.count):
    rank = attempt.ended(None if deadline is None else deadline - time.monotonic())
    if rank is None:
      attempt.kill()
      return status
    if not status and attempt.status(rank):
      status = attempt.status(rank)
      deadline = time.monotonic() + SECONDS_TO_FOLLOW
  return status


def main(program: Path = TRAIN) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--processes", type=int, default=2, help="default: 2")
  parser.add_argument("--devices-per-process", type=int, default=4, help="default: 4")
  parser.add_argument("--restart", action="store_true", help="after a failure, start again from the newest checkpoint")
  again = parser.add_argument_group("with --restart")
  again.add_argument("--restarts", type=int, default=5, help="give up after so many without a new checkpoint")
  again.add_argument("--patience", type=float, default=PATIENCE, help="seconds without progress that are not a hang")
  again.add_argument("--shortest", type=float, default=SHORTEST, help="seconds that are never too long for a step")
  again.add_argument(
    "--lost-for", type=float, default=0.0,
    help="seconds for which a process that failed counts as lost; the job goes on with fewer (default: 0, none is)",
  )  # fmt: skip
  again.add_argument(
    "--smaller", default="", help="flags of train.py to add where fewer processes need them (default: plan's choice)"
  )
  again.add_argument(
    "--slurm", action="store_true", help="run on the nodes of the SLURM job, which says how many processes there are"
  )
  options, rest = parsed(parser)
  with command_line.bad_input_ends_the_program():
    check(options, rest, "restarts")
    above_zero("patience", options.patience, "--patience=1800")
    above_zero("shortest", options.shortest, "--shortest=30")
    not_negative("lost-for", options.lost_for, "use 0 to start all processes again")
    if not options.restart and not options.slurm:
      sys.exit(launch(options.processes, options.devices_per_process, rest, program))
    where = Nodes() if options.slurm else Here(options.processes, options.devices_per_process)
    policy = Policy(
      where.processes, where.devices, options.restarts, options.patience, options.shortest, options.lost_for,
      words(options.smaller), choose,
    )  # fmt: skip
    sys.exit(supervise(policy, rest, program, where))


def choose(*job: Any) -> tuple[tuple[str, ...], str] | None:
  """The flags that lab/smaller.py chooses for fewer processes, and why; None without the laboratory."""
  if find_spec("lab") is None:
    return None
  from lab import smaller  # now, since most jobs never need it

  return smaller.choose(*job)


def words(flags: str) -> tuple[str, ...]:
  """The flags of --smaller. Raises ConfigError if a quote is left open."""
  try:
    return tuple(shlex.split(flags))
  except ValueError as error:
    raise ConfigError(f"--smaller={flags!r} cannot be read ({error}); close each quote") from error


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
  """The options of the command line, up to the first `--`, and the flags of train.py behind it."""
  arguments = sys.argv[1:]
  at = arguments.index("--") if "--" in arguments else len(arguments)
  return parser.parse_args(arguments[:at]), arguments[at + 1 :]


def check(options: argparse.Namespace, rest: Sequence[str], *counts: str) -> None:
  """Raises ConfigError if flags of train.py are missing, or if a number of processes, devices, `counts` is below 1."""
  for name in ("processes", "devices_per_process", *counts):
    positive(name.replace("_", "-"), getattr(options, name))
  if not rest:
    raise ConfigError("the flags of train.py are missing; give them after --, such as -- --config=configs/fsdp.py")


if __name__ == "__main__":
  main()
