"""From a config (configs/base.py) to the checked, frozen objects that the rest of the code takes."""

import dataclasses
from typing import Any

from errors import ConfigError, one_of, positive
from models.attention import resolve
from models.config import DTYPES, ModelConfig
from training.optimizer import Optimizer
from training.program import Program


def program(config: Any, platform: str) -> Program:
  """The Program a config describes, its `auto` fields settled for a platform ("cpu", "gpu" or "tpu")."""
  model = dict(config.model)
  one_of("model.dtype", model["dtype"], ("auto", *DTYPES))
  if model["dtype"] == "auto":
    model["dtype"] = "float32" if platform == "cpu" else "bfloat16"
  checked = ModelConfig(**model)
  attention = resolve(checked.attention, platform, checked.dtype, checked.head_size)
  if config.data.augment and not checked.is_image:
    raise ConfigError("data.augment=True is for images, but model.inputs='tokens'; set data.augment=False")
  return Program(
    model=dataclasses.replace(checked, attention=attention),
    optimizer=Optimizer(steps=config.steps, **config.optimizer),
    seed=config.seed,
    accumulation=config.accumulation,
    augment=config.data.augment,
  )


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When the loop does what, in steps; `configs/base.py` explains each field."""

  steps: int
  stop_after: int
  log_every: int
  eval_every: int
  max_skipped: int
  save_every: int
  learning_rate: float  # for messages

  @staticmethod
  def of(config: Any) -> "Schedule":
    for name in ("steps", "log_every", "max_skipped", "eval_batch_size"):
      positive(name, config[name])
    for name in ("stop_after", "eval_every", "eval_examples", "sample_temperature"):
      if config[name] < 0:
        raise ConfigError(f"{name}={config[name]} must not be negative; use 0 for its default")
    positive("checkpoint.keep", config.checkpoint.keep)
    for name in ("every", "minutes", "keep_best"):
      if config.checkpoint[name] < 0:
        raise ConfigError(f"checkpoint.{name}={config.checkpoint[name]} must not be negative; use 0 to switch it off")
    fields = {"save_every": config.checkpoint.every, "learning_rate": config.optimizer.learning_rate} | dict(config)
    return Schedule(**{field.name: fields[field.name] for field in dataclasses.fields(Schedule)})

  @property
  def last(self) -> int:
    """The step this run ends at."""
    return min(self.steps, self.stop_after or self.steps)

  def evaluates(self, step: int) -> bool:
    return step == self.last or (self.eval_every > 0 and step % self.eval_every == 0)

  def saves(self, step: int) -> bool:
    return self.evaluates(step) or (self.save_every > 0 and step % self.save_every == 0)
