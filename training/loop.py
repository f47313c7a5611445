"""The training loop as data: which steps log, evaluate and save, and what a resumed run must know."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from errors import ConfigError, not_negative, positive

MEMORY_SAVES = 2  # saves that need the hosts' memory at a time: a complete one, and the one that is being written
AUTO = "auto"  # the value of checkpoint.minutes that leaves the choice to the run


@dataclasses.dataclass(frozen=True)
class StepPlan:
  """Which steps of a run log, evaluate and save. `configs/base.py` explains each field."""

  steps: int
  stop_after: int
  log_every: int
  eval_every: int
  max_skipped: int
  save_every: int
  learning_rate: float  # for error messages
  memory_every: int = 0
  patience: int = 0

  @staticmethod
  def of(config: ConfigDict) -> "StepPlan":
    """The plan of a config. Raises ConfigError for an invalid value; also checks the config's other counts."""
    for name in ("steps", "log_every", "max_skipped", "batch_size", "eval_batch_size"):
      positive(name, config[name])
    not_negative("seed", config.seed, "use 0 or more")
    not_negative("stop_after", config.stop_after, "use 0 to run all steps")
    not_negative("eval_every", config.eval_every, "use 0 to evaluate at the end only")
    _check_patience(config.stop.patience, config.eval_every, config.steps)
    not_negative("eval_examples", config.eval_examples, "use 0 for all examples")
    not_negative("sample_length", config.sample_length, "use 0 for no sample")
    not_negative("runtime.heartbeat", config.runtime.heartbeat)
    not_negative("runtime.check_every", config.runtime.check_every)
    not_negative("sample_temperature", config.sample_temperature, "use 0 for the likeliest token")
    positive("checkpoint.keep", config.checkpoint.keep)
    for name in ("every", "keep_best", "memory_every"):
      not_negative(f"checkpoint.{name}", config.checkpoint[name])
    _check_minutes(config.checkpoint.minutes)
    for name in ("start", "steps"):
      not_negative(f"profile.{name}", config.profile[name])
    fields = {"save_every": config.checkpoint.every, "memory_every": config.checkpoint.memory_every}
    fields |= {"learning_rate": config.optimizer.learning_rate, "patience": config.stop.patience} | dict(config)
    plan = StepPlan(**{field.name: fields[field.name] for field in dataclasses.fields(StepPlan)})
    start, count = config.profile.start, config.profile.steps
    if count and start + count > plan.last:
      fix = f"profile.start={plan.last - count}" if count <= plan.last else f"profile.steps={plan.last}"
      raise ConfigError(
        f"profile.start={start} and profile.steps={count} go beyond the run's last step, {plan.last}; use {fix} or less"
      )
    return plan

  @property
  def last(self) -> int:
    """The step after which this run ends."""
    return min(self.steps, self.stop_after or self.steps)

  def evaluates(self, step: int) -> bool:
    return step == self.last or (self.eval_every > 0 and step % self.eval_every == 0)

  def saves(self, step: int) -> bool:
    return self.evaluates(step) or (self.save_every > 0 and step % self.save_every == 0)

  def saves_in_memory(self, step: int) -> bool:
    """Whether the state is saved in the hosts' memory after this step."""
    return self.memory_every > 0 and step % self.memory_every == 0

  def gives_up(self, loop: "LoopState") -> bool:
    """Whether the run ends after the evaluation that was just made, because its loss has not fallen for so long."""
    return loop.evaluated and 0 < self.patience <= loop.since_lowest


def _check_patience(patience: int, eval_every: int, steps: int) -> None:
  not_negative("stop.patience", patience)
  if patience and not 0 < eval_every < steps:
    raise ConfigError(
      f"stop.patience={patience} counts evaluations, but with eval_every={eval_every} there is none before the end of "
      f"steps={steps}; use a smaller eval_every above 0, or stop.patience=0"
    )


def _check_minutes(minutes: Any) -> None:
  if minutes == AUTO:
    return
  if not isinstance(minutes, int | float) or isinstance(minutes, bool):
    raise ConfigError(f"checkpoint.minutes={minutes!r} is not a number of minutes; use one, such as 5, or {AUTO}")
  not_negative("checkpoint.minutes", minutes)


@dataclasses.dataclass(frozen=True)
class LoopState:
  """What the loop knows between two steps. A checkpoint keeps it, so that a resumed run decides and reports the same.

  Attributes:
    step: updates tried so far.
    evaluated: false if the evaluation due at this step has not been made yet.
    skipped_in_a_row: how many updates, up to this step, were skipped without a break. An update is skipped if its loss
      or gradient is not finite.
    skipped_since_line: updates skipped since the last line of metrics.
    lowest_loss: the lowest validation loss so far; None if no evaluation had a finite one.
    since_lowest: how many evaluations came after it.
  """

  step: int = 0
  evaluated: bool = True
  skipped_in_a_row: int = 0
  skipped_since_line: int = 0
  lowest_loss: float | None = None
  since_lowest: int = 0

  def after(self, step: int, skipped: bool) -> "LoopState":
    """The state after one more step. Its evaluation has not been made."""
    in_a_row = self.skipped_in_a_row + 1 if skipped else 0
    counted = {"skipped_in_a_row": in_a_row, "skipped_since_line": self.skipped_since_line + skipped}
    return dataclasses.replace(self, step=step, evaluated=False, **counted)

  def after_evaluation(self, loss: float) -> "LoopState":
    """The state after the evaluation of its step. A loss that is not finite is not lower than any other."""
    if self.evaluated:
      return self  # it was counted
    lower = math.isfinite(loss) and (self.lowest_loss is None or loss < self.lowest_loss)
    found = {"lowest_loss": loss, "since_lowest": 0} if lower else {"since_lowest": self.since_lowest + 1}
    return dataclasses.replace(self, evaluated=True, **found)
