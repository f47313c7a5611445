"""The account of a job: no second is missing or counted twice, whatever ended its attempts."""

import functools
import math
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import in_full
from jobs import Job

from reporting import heartbeat, metrics
from reporting.account import CATEGORIES, account, attempts
from reporting.recorded import events
from reporting.speed import Clock, process_start

# A job that was killed in its second attempt, while it waited for the others in a step that never ended.
FIRST = {"set-up": 3.0, "initial state": 2.0, "compile": 4.0, "train": 20.0, "data": 1.0, "checkpoint": 0.5}
SECOND = {"set-up": 3.0, "initial state": 5.0, "compile": 1.0, "repeat": 6.0, "train": 100.0, "eval": 2.0}
THIRD = {"set-up": 3.0, "initial state": 5.0, "train": 30.0, "logging": 0.5, "sample": 1.5, "other": 0.25}
STUCK = {"doing": "train", "since": 1097.0}
EVENTS: list[dict[str, Any]] = [
  {"event": "start", "step": 0, "began": 1000.0, "time": 1005.0, "wall_time": {"set-up": 3.0, "initial state": 2.0}},
  {"event": "killed", "step": 30, "began": 1000.0, "time": 1030.5, "wall_time": FIRST, "doing": "checkpoint"},
  {"event": "start", "step": 20, "began": 1040.0, "time": 1048.0, "wall_time": {"set-up": 3.0}},
  {"event": "evaluation", "step": 40, "began": 1040.0, "time": 1097.0, "wall_time": {"set-up": 3.0, "train": 40.0}},
  {"event": "killed", "step": 40, "began": 1040.0, "time": 1157.0, "wall_time": SECOND, **STUCK},
  {"event": "start", "step": 40, "began": 1200.0, "time": 1208.0, "wall_time": {"set-up": 3.0}},
  {"event": "end", "step": 90, "began": 1200.0, "time": 1240.25, "wall_time": THIRD},
]  # fmt: skip


def test_every_second_of_a_job_has_one_category():
  found = account(attempts(EVENTS))
  assert found.seconds == {
    "training": 20.0 + 40.0 + 30.0, "repeating": 6.0, "compiling": 5.0, "restoring": 10.0, "saving": 0.5,
    "waiting for data": 1.0, "evaluating": 2.0, "starting": 2.0 + 9.0, "reporting": 2.25, "down": 9.5 + 43.0 + 60.0,
  }  # fmt: skip
  assert tuple(found.seconds) == CATEGORIES
  assert found.wall_time == pytest.approx(1240.25 - 1000.0)
  assert found.goodput == pytest.approx(90.0 / 240.25)
  assert found.restarts == 2


def test_repeated_steps_and_a_step_that_never_ended_train_nothing():
  after_the_first, stuck = attempts(EVENTS)[1:], EVENTS[4]
  assert account(after_the_first[:1]).seconds["training"] == 40.0
  assert account(after_the_first[:1]).seconds["repeating"] == 6.0
  failed = account(attempts([{**stuck, "event": "failure"}]))
  assert (failed.seconds["training"], failed.seconds["down"]) == (40.0, 60.0)
  going_on = {**stuck, "event": "evaluation"}  # a step that is not known to be lost trains
  assert account(attempts([going_on])).seconds["training"] == 100.0


def test_an_attempt_that_goes_on_counts_until_now():
  now = {"began": 1200.0, "wall_time": {"set-up": 3.0, "initial state": 5.0, "train": 12.0}}
  found = account(attempts([*EVENTS[:-1], now]))
  assert found.wall_time == pytest.approx(1220.0 - 1000.0)
  assert found.seconds["training"] == 20.0 + 40.0 + 12.0


def test_a_job_that_is_over_is_not_down():
  """It may be started again, with more steps."""
  more = {"event": "start", "step": 90, "began": 9000.0, "time": 9004.0, "wall_time": {"set-up": 4.0}}
  assert account(attempts([*EVENTS, more])).wall_time == pytest.approx(240.25 + 4.0)


def test_an_activity_without_a_category_is_not_left_out():
  (one,) = attempts([{"event": "start", "step": 0, "began": 5.0, "wall_time": {"new": 3.0}}])
  assert account([one]).seconds["reporting"] == 3.0


def test_journals_that_do_not_say_when_attempts_began_count_too():
  old = [
    {name: value for name, value in event.items() if name != "began"} for event in EVENTS if event["event"] != "killed"
  ]
  found = account(attempts(old))
  assert found.restarts == 2
  assert found.wall_time > 200.0


@pytest.mark.parametrize("events", [[], [{}], [{"event": "end", "step": 3}]])
def test_a_journal_that_says_nothing_has_an_empty_account(events: list[dict]):
  found = account(attempts(events))
  assert (found.wall_time, found.goodput, found.restarts) == (0.0, 0.0, 0)


def test_damaged_events_leave_numbers():
  wrong = (None, [], {}, "x", True, -1.0, 10**400, -(10**400), math.nan, math.inf, 1e308, 0, [1], {"train": []})
  draw = random.Random(0)
  for _ in range(2000):
    events = [dict(event) for event in EVENTS]
    for _ in range(draw.randrange(1, 6)):
      event = draw.choice(events)
      name = draw.choice(list(event))
      event[name] = draw.choice(wrong)
      if isinstance(event.get("wall_time"), dict) and draw.random() < 0.5:
        event["wall_time"] = {**event["wall_time"], draw.choice(("train", "x")): draw.choice(wrong)}
    found = account(attempts(events))
    assert math.isfinite(found.wall_time)
    assert all(value >= 0 for value in found.seconds.values())
    assert 0 <= found.goodput <= 1


def test_a_clock_counts_from_the_start_of_its_process():
  began = process_start()
  clock = Clock(began)
  assert clock.began == began
  assert 0 < clock.parts()["set-up"] <= clock.total
  assert process_start() == pytest.approx(began, abs=0.1)


RUN = {
  "model__depth": 1, "model__width": 32, "model__heads": 8, "model__kv_heads": 8, "model__seq_len": 8,
  "data__name": "synthetic", "eval_examples": 16, "sample_length": 0, "simulated_devices": 1, "log_every": 100,
  "steps": 400, "eval_every": 200, "runtime__heartbeat": 0.05,
}  # fmt: skip


def made(workdir: Path, job: Job, step: int) -> bool:
  """Whether a job has made so many steps. Until it gives a sign of life, the file is that of the one before."""
  beat = heartbeat.of_job(workdir).get(0, {})
  return beat.get("pid") == job.process.pid and beat["step"] >= step


@pytest.mark.parametrize(
  "number, times", in_full([(0, 0), (signal.SIGTERM, 1), (signal.SIGKILL, 1), (signal.SIGKILL, 2)], (signal.SIGKILL, 1))
)
def test_the_account_of_a_job_is_its_wall_time(number: int, times: int, tmp_path: Path):
  """Compared with the test's own clock, to 1%, for a job that is stopped or killed after its checkpoint of step 200."""
  workdir, log, begun = tmp_path / "run", tmp_path / "log", 0.0
  for i in range(times):
    job = Job("single", workdir, log, **RUN)
    begun = begun or time.time()
    job.wait_until(functools.partial(made, workdir, job, 220 + 20 * i), "has made some steps")
    job.send(number)
    assert job.wait() == (0 if number == signal.SIGTERM else -number), job.output
  last = Job("single", workdir, log, **RUN)
  begun = begun or time.time()
  last.wait_for("results in")
  took = time.time() - begun
  assert last.wait() == 0
  assert "goodput" in last.output
  line = [line for line in metrics.read(workdir / "metrics.jsonl") if line["split"] == "job"][-1]
  assert sum(line[f"seconds/{name}"] for name in CATEGORIES) == pytest.approx(took, rel=0.01)
  found = account(attempts(events(workdir)))
  assert found.wall_time == pytest.approx(took, rel=0.05)  # writing the last page is not in the journal
  assert found.restarts == line["restarts"] == times
  assert (found.seconds["repeating"] > 0) == (number == signal.SIGKILL)
  assert (found.seconds["restoring"] > 0) == (found.seconds["down"] > 0) == bool(times)
  assert 'meshwright_checkpoint_step{run="run"} 400\n' in (workdir / metrics.PROMETHEUS).read_text()
  assert min(found.seconds["training"], found.seconds["saving"]) > 0
