"""From a config (configs/base.py) to the checked, frozen objects that the rest of the code takes."""

import dataclasses
from typing import Any

from errors import ConfigError, one_of
from models.attention import resolve
from models.config import DTYPES, ModelConfig
from training.optimizer import Optimizer
from training.program import Program


def program(config: Any, platform: str) -> Program:
  """The Program that a config describes, with its `auto` fields resolved for a platform ("cpu", "gpu" or "tpu")."""
  model = dict(config.model)
  one_of("model.dtype", model["dtype"], ("auto", *DTYPES))
  if model["dtype"] == "auto":
    model["dtype"] = "float32" if platform == "cpu" else "bfloat16"
  checked = ModelConfig(**model)
  attention = resolve(checked.attention, platform, checked.dtype, checked.head_dim)
  if config.data.augment and not checked.reads.is_image:
    raise ConfigError(f"data.augment=True is for images, but model.inputs={checked.inputs!r}; set data.augment=False")
  return Program(
    model=dataclasses.replace(checked, attention=attention),
    optimizer=Optimizer(steps=config.steps, **config.optimizer),
    seed=config.seed,
    accumulation=config.accumulation,
    augment=config.data.augment,
  )
