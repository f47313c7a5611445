"""Intervals between saves: near the best one, and what they refuse."""

import math

import pytest
from helpers import one_sentence

from checkpointing.interval import best_interval, expected_seconds, young_interval


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
