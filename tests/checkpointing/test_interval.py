"""Intervals between saves: near the best one, and what they refuse."""

import math

import pytest
from helpers import one_sentence

from checkpointing.interval import best_interval, choose, duration, expected_seconds, young_interval


def searched(save: float, mtbf: float) -> float:
  """The interval at which the expected time is least, by trying 200,000 of them."""
  low, high = math.log(1e-3 * young_interval(save, mtbf)), math.log(20 * mtbf)
  tried = (math.exp(low + (high - low) * i / 200_000) for i in range(200_001))
  return min(tried, key=lambda interval: math.expm1((interval + save) / mtbf) / interval)


@pytest.mark.parametrize("save, within", [(1.0, 1e-4), (60.0, 1e-4), (600.0, 1e-3), (3600.0, 0.01)])
def test_dalys_interval_is_near_the_best(save: float, within: float):
  mtbf = 3 * 3600.0
  best = searched(save, mtbf)
  assert best_interval(save, mtbf) == pytest.approx(best, rel=within)
  assert abs(young_interval(save, mtbf) / best - 1) > 5 * within  # so the test can tell the two formulas apart


def test_the_restart_changes_the_time_and_not_the_best_interval():
  times = lambda restart: [expected_seconds(86400, every, 20, 7200, restart) for every in (300.0, 600.0, 900.0)]
  quick, slow = times(0), times(1800)
  assert [b / a for a, b in zip(quick, slow, strict=True)] == pytest.approx([math.exp(1800 / 7200)] * 3)


def test_without_failures_a_job_takes_its_work_and_its_saves():
  assert expected_seconds(86400, 600, 20, 1e12, 300) == pytest.approx(86400 / 600 * 620, rel=1e-6)


def test_a_job_that_cannot_end_takes_forever():
  assert expected_seconds(86400, 86400, 20, 60, 300) == math.inf


def test_a_save_as_long_as_two_failures_is_made_once_a_failure():
  assert best_interval(2000, 1000) == best_interval(5000, 1000) == 1000


@pytest.mark.parametrize("save, mtbf, parts", [
  (0, 60, ["save_seconds=0", "above 0", "use 10"]),
  (-1, 60, ["save_seconds=-1", "above 0"]),
  (10, 0, ["mtbf_seconds=0", "above 0", "86400"]),
  (10, math.inf, ["mtbf_seconds=inf", "finite"]),
  (math.nan, 60, ["save_seconds=nan", "above 0"]),
])  # fmt: skip
def test_a_mistake_is_one_sentence(save: float, mtbf: float, parts: list[str]):
  for formula in (young_interval, best_interval):
    with one_sentence(*parts):
      formula(save, mtbf)


def test_expected_seconds_refuses_what_is_no_job():
  with one_sentence("work_seconds=0"):
    expected_seconds(0, 60, 1, 60, 0)
  with one_sentence("interval=-5"):
    expected_seconds(60, -5, 1, 60, 0)
  with one_sentence("restart_seconds=-1", "0 or more"):
    expected_seconds(60, 60, 1, 60, -1)


def test_a_job_that_fails_saves_at_dalys_interval_for_its_own_failures():
  """4 failures in 8 h of running. Restarts cost time, but change no interval."""
  chosen = choose(pause=2.0, written=30.0, restart=60.0, running=8 * 3600, failures=4, hosts=4)
  assert chosen.seconds == best_interval(2.0, 2 * 3600)
  assert "a save stops training for 2 s, and 4 failures in 8 h mean one in 2 h" in chosen.why
  slow = choose(pause=2.0, written=30.0, restart=1800.0, running=8 * 3600, failures=4, hosts=4)
  assert slow.seconds == chosen.seconds
  share = lambda choice: float(choice.why.split("cost ")[1].split("%")[0])
  assert share(chosen) == pytest.approx(100 * (1 - 1 / (math.exp(60 / 7200) * (1 + 2 * 2.0 / chosen.seconds))), abs=0.2)
  assert share(slow) > 20


def test_before_the_first_failure_the_assumption_is_named():
  hosts = {1: "one host", 8: "8 hosts"}
  for count, named in hosts.items():
    chosen = choose(pause=1.0, written=5.0, restart=60.0, running=60.0, failures=0, hosts=count)
    days = 1000 / 6.5 / count
    assert chosen.seconds == pytest.approx(best_interval(1.0, 86400 * days))
    assert f"nothing has failed yet, so one failure in {days:.3g} days is assumed for {named}" in chosen.why
  long = choose(pause=1.0, written=5.0, restart=60.0, running=86400 * 400, failures=0, hosts=8)
  assert long.seconds == best_interval(1.0, 86400 * 400)


def test_saves_do_not_overlap():
  assert choose(pause=0.0, written=90.0, restart=0.0, running=600.0, failures=20, hosts=1).seconds == 90.0


def test_durations_have_units():
  texts = ["0.042 s", "119 s", "2 min", "2 h", "154 days"]
  assert [duration(x) for x in (0.042, 119, 120, 7200, 86400 * 153.85)] == texts
