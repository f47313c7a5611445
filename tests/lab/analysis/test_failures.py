"""The simulated job: closed forms where there are any, and otherwise stories whose every second is known.

A mean over seeds is compared within three of its own standard errors.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from checkpointing.interval import expected_seconds
from lab.analysis.failures import (
  DEVICES,
  KINDS,
  PUBLISHED,
  Job,
  Outcome,
  Policy,
  Rates,
  Rhythm,
  Tier,
  progress,
  simulate,
  time_of_return,
  to_the_end,
)

HOUR = 3600.0
SLOW, QUICK = Tier(pause=60, delay=0, restore=300), Tier(pause=2, delay=1, restore=10)


def runs(job: Job, policy: Policy, rhythm: Rhythm, seeds: int) -> list[Outcome]:
  return [simulate(job, policy, rhythm, np.random.default_rng(seed)) for seed in range(seeds)]


def equals_the_mean(values: Sequence[float], expected: float, within: float) -> None:
  """The mean is the expected value, to three standard errors. `within`: how small these must be, relative to it."""
  error = statistics.stdev(values) / math.sqrt(len(values))
  assert error < within * expected
  assert abs(statistics.fmean(values) - expected) < 3 * error


def test_a_job_takes_as_long_as_dalys_equation_says():
  job = Job(16, work=60_000, rates=Rates(other=16 * 3000 / HOUR), start=0, repair=0)
  assert job.mtbf == pytest.approx(3000)
  found = [run.seconds for run in runs(job, Policy(SLOW), Rhythm(600), 400)]
  equals_the_mean(found, expected_seconds(60_000, 600, 60, 3000, 300), within=0.005)


def test_a_job_that_waits_for_repairs_takes_as_long_as_it_should():
  """Nothing fails during a repair, so it adds to the mean time between failures in Daly's equation, as a factor."""
  job = Job(16, work=60_000, rates=Rates(host=2 * 3000 / HOUR), start=0, repair=1000)
  found = [run.seconds for run in runs(job, Policy(SLOW), Rhythm(600), 400)]
  equals_the_mean(found, expected_seconds(60_000, 600, 60, 3000, 300) * (3000 + 1000) / 3000, within=0.006)


def test_an_elastic_job_has_the_hosts_that_are_not_in_repair():
  """With free saves and restarts, each host is up for 100 hours and then away for 25."""
  job = Job(10 * DEVICES, work=3e6, rates=Rates(host=100), start=0, repair=25 * HOUR)
  found = [run.shares["training"] for run in runs(job, Policy(Tier(0, 0, 0), elastic=True), Rhythm(60), 60)]
  equals_the_mean(found, 0.8, within=0.005)


STORAGE = Tier(pause=30, delay=100, restore=200)
POLICIES = [
  Policy(STORAGE, memory, spares, elastic)
  for memory in (None, QUICK)
  for spares, elastic in ((0, False), (3, False), (0, True))
]


@pytest.mark.parametrize("policy", POLICIES)
def test_shares_add_up_and_training_is_the_work(policy: Policy):
  rates = Rates(device=2000, host=1000, other=5000)
  job = Job(40 * DEVICES, work=1e6, rates=rates, start=120, repair=2 * HOUR)
  for run in runs(job, policy, Rhythm(150, 4 if policy.memory else 1), 5):
    assert run.failures > 20
    assert tuple(run.shares) == KINDS
    assert all(share >= 0 for share in run.shares.values())
    assert sum(run.shares.values()) == pytest.approx(1)
    assert run.shares["training"] * run.seconds * (40 + policy.spares) / 40 == pytest.approx(job.work)
    assert run.shares["repeating"] > 0
    assert run.shares["spare"] == pytest.approx(policy.spares / (40 + policy.spares))


def timeline(policy: Policy, rhythm: Rhythm) -> Iterator[tuple[str, float]]:
  """What a job without failures does, piece by piece."""
  while True:
    for _ in range(rhythm.to_storage):
      yield "train", rhythm.interval
      yield "memory", policy.memory.pause if policy.memory else 0
    yield "storage", policy.storage.pause


@pytest.mark.parametrize("policy", [Policy(STORAGE), Policy(SLOW), Policy(STORAGE, QUICK)])
@pytest.mark.parametrize("to_storage", [1, 3])
def test_progress_equals_a_timeline_that_is_followed(policy: Policy, to_storage: int):
  rhythm = Rhythm(150, to_storage)
  for seconds in (0, 99, 150, 151.5, 153, 320, 457, 480, 490, 584, 590, 1111, 2222, 7777.7):
    clock = trained = in_memory = in_storage = 0.0
    for what, length in timeline(policy, rhythm):
      if clock >= seconds:
        break
      trained += min(length, seconds - clock) if what == "train" else 0
      clock += length
      if what == "memory" and policy.memory and clock + policy.memory.delay <= seconds:
        in_memory = trained
      if what == "storage" and clock + policy.storage.delay <= seconds:
        in_storage = trained
    assert progress(policy, rhythm, seconds) == pytest.approx((trained, in_memory, in_storage)), seconds


def test_the_end_is_when_all_is_in_storage():
  assert to_the_end(Policy(STORAGE), Rhythm(150), 450) == 450 + 3 * 30 + 100
  assert to_the_end(Policy(STORAGE), Rhythm(150), 451) == 451 + 4 * 30 + 100
  assert to_the_end(Policy(STORAGE, QUICK), Rhythm(150, 2), 450) == 450 + 3 * 2 + 2 * 30 + 100


class Story:
  """Random numbers that are given: when the next failure comes after a restart, and the host that it takes away."""

  def __init__(self, *failures: tuple[float, int]):
    self.times, self.hosts = [time for time, _ in failures], [host for _, host in failures]

  def exponential(self, scale: float) -> float:
    return self.times.pop(0) if self.times else 1e12

  def random(self) -> float:
    return 0.0  # every failure takes a host away

  def integers(self, high: int) -> int:
    return self.hosts.pop(0)


def told(
  policy: Policy, *failures: tuple[float, int], work: float = 1000, to_storage: int = 100, repair: float = 5000
) -> dict[str, float]:
  """The seconds that all six hosts spend on each kind. The job starts in 5 s and saves every 100 s of training."""
  job = Job(6 * DEVICES, work=work, rates=Rates(host=1000), start=5, repair=repair)
  run = simulate(job, policy, Rhythm(100, to_storage), Story(*failures))
  return {kind: round(share * run.seconds, 6) for kind, share in run.shares.items() if share}


TWO_TIERS = Policy(Tier(0, 0, restore=200), Tier(0, 0, restore=7), spares=0, elastic=False)


def test_steps_since_the_last_save_are_repeated():
  spent = told(Policy(Tier(0, 0, restore=200)), (5 + 930, 0), to_storage=1)
  assert spent == {"training": 1000, "repeating": 30, "restoring": 200, "starting": 10, "down": 5000}


def test_a_save_that_is_not_complete_is_lost():
  spent = told(Policy(Tier(0, delay=50, restore=200)), (5 + 930, 0), to_storage=1)
  assert spent == {"training": 1000, "repeating": 130, "saving": 50, "restoring": 200, "starting": 10, "down": 5000}


def test_a_lost_host_is_restored_from_its_neighbours_memory():
  spent = told(TWO_TIERS, (5 + 930, 3))
  assert spent == {"training": 1000, "repeating": 30, "restoring": 7, "starting": 10, "down": 5000}


@pytest.mark.parametrize("first, second", [(3, 4), (3, 2), (0, 5), (5, 0)])
def test_two_neighbours_lost_at_once_need_storage(first: int, second: int):
  """The second is lost before the first one's memory has been copied again."""
  spent = told(TWO_TIERS, (5 + 930, first), (5 + 7 + 60, second))
  assert spent["restoring"] == 7 + 200
  assert spent["repeating"] == 30 + 960  # from the last save, and then from the beginning


@pytest.mark.parametrize("failures", [
  [(5 + 930, 3), (5 + 7 + 60, 5)],  # no neighbours
  [(5 + 930, 3), (5 + 7 + 100, 4)],  # neighbours, but all memory has been copied again between the two
])  # fmt: skip
def test_other_hosts_lost_in_turn_need_no_storage(failures: list[tuple[float, int]]):
  assert told(TWO_TIERS, *failures, work=2000)["restoring"] == 7 + 7


def test_a_spare_host_replaces_a_lost_one_at_once():
  spent = told(dataclasses.replace(TWO_TIERS, spares=1), (5 + 930, 3))
  assert "down" not in spent
  spent = told(dataclasses.replace(TWO_TIERS, spares=1), (5 + 930, 3), (5 + 7 + 60, 0))
  assert spent["down"] == pytest.approx(6 / 7 * (5000 - 72))  # until the first is repaired


def test_an_elastic_job_is_slower_and_grows_back():
  """It trains for 900 s, repeats 30 s with five hosts of six, and goes on with them until the sixth is back."""
  spent = told(dataclasses.replace(TWO_TIERS, elastic=True), (5 + 930, 3), work=10_000)
  slow = 5000 - 5 - 7  # seconds with five hosts, of which some repeat
  assert spent["starting"] == pytest.approx(5 + 5 * 5 / 6 + 5)
  assert spent["restoring"] == pytest.approx(7 * 5 / 6 + 7)
  assert spent["repeating"] == pytest.approx(30)
  assert spent["down"] == pytest.approx((slow + 5 + 7) / 6)
  assert spent["training"] == pytest.approx(10_000)


def test_an_elastic_job_can_end_with_fewer_hosts():
  spent = told(dataclasses.replace(TWO_TIERS, elastic=True), (5 + 930, 3))
  slow = 100 * 6 / 5  # seconds for the steps after the last save
  assert spent["training"] == pytest.approx(1000)
  assert spent["down"] == pytest.approx((5 + 7 + slow) / 6)


def test_a_host_that_returns_while_an_elastic_job_restarts_is_used_at_once():
  spent = told(dataclasses.replace(TWO_TIERS, elastic=True), (5 + 930, 3), repair=6)
  assert spent["starting"] == pytest.approx(5 + 5 * 5 / 6 + 5)
  assert spent["down"] == pytest.approx((5 + 7) / 6)
  assert spent["training"] == 1000


def test_hosts_return_when_a_restart_is_worth_it():
  job = Job(10 * DEVICES, work=1e6, rates=Rates(host=10 * 1000 / HOUR), start=0, repair=0)
  assert job.mtbf == pytest.approx(1000)
  assert time_of_return(job, [5.0, 6.0, 7.0], restart=0) == 5  # nothing to lose
  assert time_of_return(job, [5.0, 6.0, 7.0], restart=99) == 5  # a tenth of the hosts for 1,000 s gains 100 s
  assert time_of_return(job, [5.0, 6.0, 7.0], restart=101) == 6
  assert time_of_return(job, [5.0, 6.0, 7.0], restart=301) == math.inf


def test_a_job_that_cannot_end_is_ended():
  job = Job(16, work=86_400, rates=Rates(other=16 * 10 / HOUR), start=60, repair=0)
  (run,) = runs(job, Policy(SLOW), Rhythm(600), 1)
  assert run.failures == 5000
  assert run.shares["training"] < 0.01


def test_published_rates_give_the_published_counts():
  llama3 = Job(16_384, work=1, rates=PUBLISHED["llama3"], start=0, repair=0)
  assert 54 * 24 * HOUR / llama3.mtbf == pytest.approx(419)
  assert llama3.losses * llama3.mtbf == pytest.approx((268 + 53) / 419)
  for devices, hours in ((16_384, 1.8), (131_072, 0.23)):  # as arXiv:2410.21680 computes them
    rsc1 = Job(devices, work=1, rates=PUBLISHED["rsc1"], start=0, repair=0)
    assert rsc1.mtbf / HOUR == pytest.approx(hours, rel=0.03)


def test_a_job_as_llama_3_is_more_than_nine_tenths_effective():
  """With the paper's 466 interruptions in 54 days, all of them unexpected, and 10 minutes to start.

  It saves in the background, with the times of docs/failures.md for 405 billion parameters.
  """
  rates = Rates(other=54 * 24 * 16_384 / 466)
  job = Job(16_384, work=54 * 24 * HOUR, rates=rates, start=600, repair=0)
  found = runs(job, Policy(Tier(0.59, 51.06, 129.49)), Rhythm(120), 5)
  assert 0.90 < statistics.fmean(run.shares["training"] for run in found) < 0.95
