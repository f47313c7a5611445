"""A long training job on hosts that fail: how much of its devices' time trains new steps, and where the rest goes.

`simulate` is the whole model: a loop from one failure to the next. Above it are its inputs: how often something fails
(`Rates`), where checkpoints go (`Tier`), the job, what it does about failures (`Policy`), and how often it saves
(`Rhythm`). Times are in seconds unless a comment says hours. tools/failures.py prints and draws the results.

Failures are independent of one another, and each stops the whole job. They come only while the job starts, restores,
trains or saves, not while it waits for a repair. The time to notice a failure is part of the time to start.
"""

import dataclasses
import heapq
import math
from typing import NamedTuple, Protocol

from runtime.hardware import HOURS_OF_A_HOST

DEVICES = 8  # of a host
MOST_FAILURES = 5000  # a run that has not ended by then ends there: its shares no longer change much
# What a device's time goes into. training: new steps. repeating: lost steps. saving, restoring: of checkpoints, while
# training waits. starting: from a failure to the restoring. down: waiting for the repair of a host. spare: standing by.
KINDS = ("training", "repeating", "saving", "restoring", "starting", "down", "spare")


@dataclasses.dataclass(frozen=True)
class Rates:
  """Hours between two failures, on average; infinity for what never fails.

  Attributes:
    device: of one device. The job loses its host until that is repaired.
    host: of one host, for its other parts: network card, power supply, maintenance. The job loses it, too.
    other: of one device's share of everything that takes no host away: the program, the network between hosts.
  """

  device: float = math.inf
  host: float = math.inf
  other: float = math.inf


# From the counts of unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, table 5; they add up to 419):
# 268 of GPUs and their memory, 53 of hosts (maintenance 32, network cards 7, solid-state disks 3, power supplies 3,
# chassis 2, IO expansion boards 2, processors 2, memory 2), 98 others (software 54, switches and cables 35, timeouts of
# NCCL 7, dependencies 2). And those of a host on Meta's RSC-1 cluster.
_HOURS = 54 * 24 * 16384
PUBLISHED = {
  "llama3": Rates(device=_HOURS / 268, host=_HOURS / DEVICES / 53, other=_HOURS / 98),
  "rsc1": Rates(host=HOURS_OF_A_HOST),
}


@dataclasses.dataclass(frozen=True)
class Tier:
  """A place for checkpoints.

  Attributes:
    pause: how long training stops for a save.
    delay: after that, how long until the save is complete. Training goes on meanwhile.
    restore: how long it takes to read a checkpoint.
  """

  pause: float
  delay: float
  restore: float


@dataclasses.dataclass(frozen=True)
class Job:
  """A job without what it does about failures.

  Attributes:
    devices: how many it has, in hosts of `DEVICES`.
    work: seconds of training with all of them.
    start: from a failure to the restoring of a checkpoint.
    repair: from the loss of a host to its return.
  """

  devices: int
  work: float
  rates: Rates
  start: float
  repair: float

  @property
  def hosts(self) -> int:
    return self.devices // DEVICES

  @property
  def losses(self) -> float:
    """How many hosts are lost in a second, while all are up."""
    return (self.devices / self.rates.device + self.hosts / self.rates.host) / 3600

  @property
  def mtbf(self) -> float:
    """Seconds between two failures of the whole job, while all hosts are up."""
    return 1 / (self.losses + self.devices / self.rates.other / 3600)


@dataclasses.dataclass(frozen=True)
class Policy:
  """What a job does about failures.

  Attributes:
    storage: the checkpoints that no failure can destroy.
    memory: those in the hosts' memory, if any. The next host has a copy of each host's part, so both must be lost.
    spares: hosts that stand by. One takes the place of a lost host at once, and a repaired one stands by in its turn.
    elastic: without a host to take its place, the job goes on with fewer, and is slower in proportion. Otherwise it
      waits for the repair.
  """

  storage: Tier
  memory: Tier | None = None
  spares: int = 0
  elastic: bool = False


@dataclasses.dataclass(frozen=True)
class Rhythm:
  """When a job saves: after every `interval` seconds of training, and every `to_storage`-th time to storage.

  With one tier that is every time. With two, the other saves stay in memory.
  """

  interval: float
  to_storage: int = 1


class Progress(NamedTuple):
  """After some seconds without a failure: how many of them trained, and how much of that can be restored from where."""

  trained: float
  in_memory: float
  in_storage: float


def progress(policy: Policy, rhythm: Rhythm, seconds: float) -> Progress:
  """What a job has done after so many seconds without a failure, since it began to train."""
  memory, storage = policy.memory or Tier(0, 0, 0), policy.storage
  period = rhythm.interval + memory.pause  # from one save to the next
  cycle = period * rhythm.to_storage + storage.pause  # from one save in storage to the next

  def saves(by: float) -> tuple[int, float]:
    """How many intervals and pauses have passed by then, and the seconds of training since."""
    cycles, rest = divmod(max(by, 0.0), cycle)
    passed = min(int(rest / period), rhythm.to_storage)
    trained = 0.0 if passed == rhythm.to_storage else min(rest - passed * period, rhythm.interval)
    return int(cycles) * rhythm.to_storage + passed, trained

  passed, trained = saves(seconds)
  in_memory = saves(seconds - memory.delay)[0] if policy.memory else 0
  in_storage = int(max(seconds - storage.delay, 0.0) / cycle) * rhythm.to_storage
  return Progress(passed * rhythm.interval + trained, in_memory * rhythm.interval, in_storage * rhythm.interval)


def to_the_end(policy: Policy, rhythm: Rhythm, training: float) -> float:
  """Seconds until so much training is done and in storage, without a failure."""
  saves = max(1, math.ceil(training / rhythm.interval - 1e-9))
  to_storage = math.ceil(saves / rhythm.to_storage)
  pauses = saves * (policy.memory.pause if policy.memory else 0) + to_storage * policy.storage.pause
  return training + pauses + policy.storage.delay


class Random(Protocol):
  """What a run needs of `numpy.random.Generator`."""

  def exponential(self, scale: float) -> float: ...
  def random(self) -> float: ...
  def integers(self, high: int) -> int: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run went: its seconds, its failures, and the shares of all devices' time, which add up to 1.

  The share of training is the job's goodput: the time without failures and saves, over the time that it took.
  """

  seconds: float
  failures: int
  shares: dict[str, float]


def simulate(job: Job, policy: Policy, rhythm: Rhythm, random: Random) -> Outcome:
  """One run of a job, from its start to the end of its work, or to its failure number `MOST_FAILURES`.

  What it has done is counted in seconds of training with all hosts.
  """
  clock, failures = 0.0, 0
  spent = dict.fromkeys(KINDS, 0.0)  # seconds of all hosts together
  reached = stored = 0.0  # what has been done: at most, and as storage has it
  copied: float | None = None  # as the hosts' memory has it
  uncopied: set[int] = set()  # lost hosts whose part only their neighbour has
  away: list[float] = []  # when each lost host returns: a heap
  up = job.hosts  # the hosts that run the job

  def spend(kind: str, seconds: float) -> None:
    nonlocal clock
    clock += seconds
    spent[kind] += seconds * up
    spent["down"] += seconds * (job.hosts - up)
    spent["spare"] += seconds * policy.spares

  while stored < job.work and failures < MOST_FAILURES:
    # Repaired hosts come back. If some are still missing, the job waits for one or goes on without them.
    while away and away[0] <= clock:
      heapq.heappop(away)
    missing = max(0, len(away) - policy.spares)
    up = job.hosts - missing
    if missing and (up == 0 or not policy.elastic):
      up = 0
      spend("down", away[0] - clock)
      continue
    speed = up / job.hosts
    to_failure = random.exponential(job.mtbf / speed)

    # It starts, and reads the newest checkpoint there is.
    in_memory = policy.memory if copied is not None and copied >= stored else None
    begin = copied if in_memory and copied is not None else stored
    restore = (in_memory or policy.storage).restore if failures else 0.0
    for kind, seconds in (("starting", job.start), ("restoring", restore)):
      seconds = min(seconds, to_failure)
      spend(kind, seconds)
      to_failure -= seconds

    # It trains and saves until it ends, something fails, or enough repaired hosts are back to be worth a restart.
    to_end = to_the_end(policy, rhythm, (job.work - begin) / speed)
    to_return = time_of_return(job, sorted(away)[-missing:], job.start + restore) - clock if missing else math.inf
    seconds = max(0.0, min(to_failure, to_end, to_return))
    ended, returned = seconds >= to_end, seconds >= to_return
    done = progress(policy, rhythm, seconds)
    trained = (job.work - begin) / speed if ended else done.trained
    again = min(trained, max(0.0, reached - begin) / speed)
    spend("repeating", again)
    spend("training", trained - again)
    spend("saving", seconds - trained)
    reached = max(reached, begin + speed * trained)
    if done.in_storage:
      stored = begin + speed * done.in_storage
    if done.in_memory:
      copied = begin + speed * done.in_memory
      uncopied.clear()
    if ended:
      stored = job.work
    to_failure -= seconds

    # Before it restarts with hosts that are back, it saves all that it has done.
    if returned and not ended:
      tier = policy.memory or policy.storage
      seconds = min(tier.pause + tier.delay, to_failure)
      spend("saving", seconds)
      to_failure -= seconds
      if to_failure > 0:
        copied, stored = (begin + speed * trained, stored) if policy.memory else (None, begin + speed * trained)
        uncopied.clear()
        continue

    # Something fails. It may take a host away, and with it what only that host's memory has.
    if not ended:
      failures += 1
      if random.random() < job.losses * job.mtbf:
        heapq.heappush(away, clock + job.repair)
        host = random.integers(job.hosts)
        if {(host - 1) % job.hosts, (host + 1) % job.hosts} & uncopied:
          copied = None
        uncopied.add(host)

  total = clock * (job.hosts + policy.spares)
  return Outcome(clock, failures, {kind: seconds / total for kind, seconds in spent.items()})


def time_of_return(job: Job, returns: list[float], restart: float) -> float:
  """When so many missing hosts are back that a restart gains more than it costs; infinity if that is never.

  Until the next failure, at which they come back anyway, each of them would have added a host's work.

  Args:
    returns: when each missing host is back, in order.
    restart: how long a restart takes.
  """
  enough = max(1, math.ceil(restart * job.hosts / job.mtbf))
  return returns[enough - 1] if enough <= len(returns) else math.inf
