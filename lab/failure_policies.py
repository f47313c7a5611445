"""What a job may do about failures: the policies that tools.failures compares, and how often each of them should save.

A policy is a way to save and a way to replace lost hosts, such as background+spares. lab/analysis/failures.py simulates
it.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable

import numpy as np

from checkpointing.interval import best_interval, young_interval
from errors import one_of
from lab.analysis.failures import KINDS, Job, Outcome, Policy, Rhythm, Tier, simulate

SAVES = ("storage", "background", "memory")
HOSTS = ("wait", "spares", "elastic")
NAMES = [f"{saves}+{hosts}" for saves in SAVES for hosts in HOSTS]


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of a checkpoint's parts, and of a step.

  Attributes:
    copy: from the devices to the memory of their host, while training waits.
    write: from there to storage.
    restore: from storage to the devices.
    send: from a host's memory to its neighbour's.
    fetch: from the memory of hosts to the devices, for a lost host from its neighbour's memory.
    step: of training. A job saves at most once a step.
  """

  copy: float
  write: float
  restore: float
  send: float
  fetch: float
  step: float


def spares_for(job: Job) -> int:
  """Spare hosts that nearly always suffice: the mean number of lost hosts, and three standard deviations more."""
  lost = job.losses * job.repair
  return max(1, math.ceil(lost + 3 * math.sqrt(lost)))


def policy_of(name: str, times: Times, spares: int) -> Policy:
  """The policy of a name. Raises ConfigError if there is none.

  storage: training waits until a save is in storage. background: only until it is copied, and the rest goes on during
  training. memory: the same in two tiers, of which the hosts' memory is the first.
  """
  saves, _, hosts = one_of("policies", name, NAMES).partition("+")
  storage = Tier(times.copy, times.write, times.restore)
  if saves == "storage":
    storage = Tier(times.copy + times.write, 0, times.restore)
  memory = Tier(times.copy, times.send, times.fetch) if saves == "memory" else None
  return Policy(storage, memory, spares if hosts == "spares" else 0, elastic=hosts == "elastic")


def rhythm_of(job: Job, policy: Policy, interval: float) -> Rhythm:
  """When a policy saves, given its most frequent saves.

  With two tiers only the loss of two neighbours needs storage, the second before the first one's part is copied again.
  So saves to storage have Daly's interval for the mean time between such losses.
  """
  if not policy.memory:
    return Rhythm(interval)
  memory, storage = policy.memory, policy.storage
  exposed = job.start + memory.restore + interval + memory.pause + memory.delay
  of_neighbours = job.losses * (2 * job.losses / job.hosts) * exposed  # in a second
  between = best_interval(storage.pause, 1 / of_neighbours) if of_neighbours else math.inf
  between = max(min(between, job.work), storage.delay)
  return Rhythm(interval, max(1, math.ceil(between / interval)))


def pause_of(policy: Policy) -> float:
  """How long training stops for one of the most frequent saves."""
  return (policy.memory or policy.storage).pause


def shortest(policy: Policy, times: Times) -> float:
  """The shortest interval: a step, or the time to write what was copied, because saves do not overlap."""
  return max(times.step, (policy.memory or policy.storage).delay)


def runs(job: Job, policy: Policy, interval: float, seeds: int) -> list[Outcome]:
  """The same failures for every interval: those of the seeds from 0."""
  rhythm = rhythm_of(job, policy, interval)
  return [simulate(job, policy, rhythm, np.random.default_rng(seed)) for seed in range(seeds)]


def shares(found: Iterable[Outcome]) -> dict[str, float]:
  """The shares of the time of several runs together. They add up to 1."""
  found = list(found)
  total = sum(run.seconds for run in found)
  return {kind: sum(run.shares[kind] * run.seconds for run in found) / total for kind in KINDS}


def search(job: Job, policy: Policy, times: Times, seeds: int) -> float:
  """The interval with the highest goodput, in seconds of training between two saves.

  It simulates nine intervals around Daly's, and fits a + b·interval + c/interval to the time for a second of work: b is
  the cost of lost steps, c that of saves. Simulations alone are too uneven to find the best interval.
  """
  least = shortest(policy, times)
  middle = max(least, best_interval(pause_of(policy), job.mtbf))
  tried = sorted({max(least, min(middle * 2 ** (k / 2), job.work)) for k in range(-4, 5)})
  goodputs = [shares(runs(job, policy, interval, seeds))["training"] for interval in tried]
  if min(goodputs) > 0:
    terms = np.array([[1, interval, 1 / interval] for interval in tried])
    _, of_lost, of_saves = np.linalg.lstsq(terms, 1 / np.array(goodputs), rcond=None)[0]
    if of_lost > 0 and of_saves > 0:
      return min(max(math.sqrt(of_saves / of_lost), tried[0]), tried[-1])
  return tried[int(np.argmax(goodputs))]


@dataclasses.dataclass(frozen=True)
class Result:
  """What the simulation says of a policy at its best interval. Times are in seconds.

  Attributes:
    error: the standard error of the goodput, over the seeds; not a number with a single one.
    to_storage: between two saves to storage.
  """

  name: str
  shares: dict[str, float]
  error: float
  interval: float
  to_storage: float
  young: float
  daly: float

  @property
  def goodput(self) -> float:
    return self.shares["training"]


def result_of(name: str, job: Job, times: Times, spares: int, seeds: int) -> Result:
  """Searches the policy's best interval, and simulates that."""
  policy = policy_of(name, times, spares)
  interval = search(job, policy, times, seeds)
  found = runs(job, policy, interval, seeds)
  error = statistics.stdev(run.shares["training"] for run in found) / math.sqrt(seeds) if seeds > 1 else math.nan
  pause = pause_of(policy)
  to_storage = interval * rhythm_of(job, policy, interval).to_storage
  young, daly = young_interval(pause, job.mtbf), best_interval(pause, job.mtbf)
  return Result(name, shares(found), error, interval, to_storage, young, daly)


def goodput_at_dalys_interval(job: Job, policy: Policy, times: Times, seeds: int) -> float:
  """The goodput without a search: for curves of many points."""
  interval = max(shortest(policy, times), best_interval(pause_of(policy), job.mtbf))
  return shares(runs(job, policy, interval, seeds))["training"]
