"""checkpoint.minutes="auto": the run chooses when to save, says so in one line, and again only if much has changed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import config, one_sentence

from checkpointing.interval import best_interval
from checkpointing.save import Cost
from reporting import save_interval
from reporting.account import account, attempts
from reporting.journal import Journal
from reporting.save_interval import SaveInterval
from reporting.speed import Clock
from runtime.signals import Requests
from training.loop import StepPlan

DAY = 86400.0


def chooser(workdir: Path, minutes: Any = "auto", before: float = 0.0) -> tuple[SaveInterval, list[str], Clock]:
  """One of a job on 2 hosts, its lines, and the clock of its process."""
  clock, lines = Clock(), []
  clock.born -= before
  clock.spent["train"] = before
  journal = Journal(workdir, clock, True, pytest.fail)
  requests = Requests(save_interval.first_minutes(minutes))
  return SaveInterval(minutes, 2, requests, SimpleNamespace(cost=None), journal, lines.append), lines, clock


def test_the_interval_follows_the_cost_of_saves(tmp_path: Path):
  ours, lines, _ = chooser(tmp_path)
  mtbf = DAY * 1000 / 6.5 / 2
  ours.update()
  assert (ours.requests._timer.seconds, lines) == (60.0, [])  # the first save comes soon, to see what it costs
  for step, waited in enumerate([1.0, 1.2, 4.0], 1):
    ours.checkpoints.cost = Cost(step, waited, 5.0)
    ours.update()
    ours.update()
    assert ours.requests._timer.seconds == pytest.approx(best_interval(waited, mtbf))
  assert len(lines) == 2  # 1.2 s is not worth a line
  assert lines[0].startswith("interval  a checkpoint every 60.8 min: a save stops training for 1 s")
  assert "nothing has failed yet, so one failure in 76.9 days is assumed for 2 hosts" in lines[0]


def test_minutes_that_are_given_stay(tmp_path: Path):
  ours, lines, _ = chooser(tmp_path, 5.0)
  ours.checkpoints.cost = Cost(1, 1.0, 5.0)
  ours.update()
  assert (ours.requests._timer.seconds, lines) == (300.0, [])


def test_only_failures_after_which_a_checkpoint_was_needed_count(tmp_path: Path):
  """Of five attempts, one was stopped in order, one went on from the hosts' memory, and one still runs."""
  ends = [("killed", "checkpoint"), ("stop", "checkpoint"), ("failure", "memory"), ("failure", "checkpoint")]
  events: list[dict[str, Any]] = []
  for i, (end, after) in enumerate(ends):
    events += [{"event": "start" if i == 0 else end, "step": 10 * i, "began": 1000.0 * i, "time": 1000.0 * i + 900}]
    events[-1]["wall_time"] = {"train": 900.0}
    events += [{**events[-1], "event": end}]
    events += [{"event": "start", "step": 10 * i + 10, "began": 1000.0 * (i + 1), "source": after, "time": 0.0}]
  known = attempts(events)
  assert [attempt.source for attempt in known] == ["", "checkpoint", "checkpoint", "memory", "checkpoint"]
  assert save_interval.lost(known) == 2
  ours, lines, _ = chooser(tmp_path, before=900.0)
  ours.journal.before, ours.checkpoints.cost = known[:-1], Cost(1, 1.0, 5.0)
  ours.journal.past = account(known[:-1])
  ours.journal.source = "checkpoint"
  ours.update()
  assert ours.requests._timer.seconds == pytest.approx(best_interval(1.0, 5 * 900 / 2), rel=1e-3)
  assert "2 failures in 75 min mean one in 37.5 min" in lines[0]


@pytest.mark.parametrize(
  "minutes, parts",
  [
    ("soon", ["checkpoint.minutes='soon' is not a number of minutes", "such as 5, or auto"]),
    (None, ["checkpoint.minutes=None"]),
    (-1, ["checkpoint.minutes=-1", "use 0 to switch it off"]),
    (float("inf"), ["checkpoint.minutes=inf", "finite"]),
  ],
)
def test_a_mistake_is_one_sentence(minutes: Any, parts: list[str]):
  with one_sentence(*parts):
    StepPlan.of(config(checkpoint__minutes=minutes))
  for right in ("auto", 0, 2, 0.5):
    StepPlan.of(config(checkpoint__minutes=right))
