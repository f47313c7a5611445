"""What follows a step, and in which order, without a run: everything that the keeper calls is noted."""

import contextlib
import types
from unittest import mock

import pytest
from helpers import config

from job.keeper import Due, Keeper
from runtime.signals import Decision
from training.loop import StepPlan

NOTHING = Decision()


def keeper(asked: Decision = NOTHING) -> tuple[Keeper, mock.Mock]:
  """Of a run that saves every 6 steps, in memory every 2, evaluates every 12, and compares every 3."""
  fields = {"steps": 24, "eval_every": 12, "checkpoint__every": 6, "checkpoint__memory_every": 2}
  made, calls = object.__new__(Keeper), mock.Mock()
  calls.requests.decide.return_value = asked
  calls.replicas.check.side_effect = lambda state, step: f"{state} compared"
  made.plan, made.clock = StepPlan.of(config(**fields)), lambda _: contextlib.nullcontext()
  made.checkpoints, made.tier, made.writer = calls.checkpoints, calls.tier, calls.writer
  made.interval, made.requests = calls.interval, calls.requests
  made.replicas = types.SimpleNamespace(due=lambda step, saves: saves or step % 3 == 0, check=calls.replicas.check)
  return made, calls


@pytest.mark.parametrize(
  "step, asked, due",
  [
    (1, NOTHING, ()),
    (2, NOTHING, ("compare", "save_in_memory")),
    (3, NOTHING, ("compare",)),
    (6, NOTHING, ("compare", "save")),  # a save in storage makes one in memory superfluous
    (12, NOTHING, ("compare", "save", "evaluate")),
    (1, Decision(save=True), ("compare", "save")),
    (12, Decision(save=True), ("compare", "save", "evaluate")),
    (2, Decision(stop=True), ("compare", "save", "stop")),
    (12, Decision(stop=True), ("compare", "save", "stop")),  # the next run makes the evaluation
    (24, NOTHING, ("compare", "save", "evaluate")),
  ],
)
def test_what_is_due_after_a_step(step: int, asked: Decision, due: tuple[str, ...]):
  names = ("compare", "save_in_memory", "save", "evaluate", "stop")
  made, calls = keeper(asked)
  assert made.due(step) == Due(step, **{name: name in due for name in names})
  assert calls.mock_calls == [mock.call.checkpoints.check(), mock.call.interval.update(), mock.call.requests.decide()]


@pytest.mark.parametrize("step, where", [(2, "tier"), (6, "checkpoints")])
def test_the_state_is_compared_and_the_lines_are_safe_before_it_is_saved(step: int, where: str):
  made, calls = keeper()
  due = made.due(step)
  calls.reset_mock()
  assert made.keep("state", due, "record", "loop") == "state compared"
  save = getattr(mock.call, where).save("state compared", "record", "loop")
  assert calls.mock_calls == [mock.call.replicas.check("state", step), mock.call.writer.sync(), save]
