"""Makes the checked, frozen Program from a config (configs/base.py)."""

import dataclasses

from ml_collections import ConfigDict

from errors import ConfigError, one_of
from models.attention import resolve
from models.config import DTYPES, ModelConfig
from training.optimizer import Optimizer
from training.program import Program


def program(config: ConfigDict, platform: str) -> Program:
  """The Program of a config. Resolves `auto` fields for the platform: "cpu", "gpu" or "tpu"."""
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
