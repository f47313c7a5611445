"""Makes the checked, frozen Program from a config (configs/base.py), and registers the models that have one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from configs import project
from errors import ConfigError, one_of
from models.ops.attention import choose
from models.sizes import model_sizes, with_sizes_made_up
from training.optimizer import Optimizer
from training.program import Program
from training.transformer import TransformerProgram


def check(config: ConfigDict, platform: str) -> None:
  """Raises ConfigError for a field that cannot make a Program, whatever the data is. Comes before data is prepared."""
  program(with_sizes_made_up(config), platform)


def program(config: ConfigDict, platform: str) -> Program:
  """The Program of a config. Resolves `auto` fields for the platform: "cpu", "gpu" or "tpu"."""
  project.load(config)
  return PROGRAMS[one_of("model.name", config.model.name, PROGRAMS)](config, platform)


def of_training(config: ConfigDict) -> dict[str, Any]:
  """The arguments of every Program."""
  optimizer = Optimizer(steps=config.steps, **config.optimizer)
  return {"optimizer": optimizer, "seed": config.seed, "accumulation": config.accumulation}


def transformer(config: ConfigDict, platform: str) -> TransformerProgram:
  """The Program of a Transformer."""
  sizes = model_sizes(config, platform)
  attention = choose(sizes, platform)
  sizes = dataclasses.replace(sizes, attention=attention.name, attention_why=attention.why)
  if config.data.augment and not sizes.reads.is_image:
    raise ConfigError(f"data.augment=True is for images, but model.inputs={sizes.inputs!r}; set data.augment=False")
  if sizes.lora and not config.init_from:
    raise ConfigError(
      f"model.lora_rank={sizes.lora.rank} trains adapters of a model that is there already; name it with init_from, or "
      "train all weights with model.lora_rank=0"
    )
  return TransformerProgram(
    sizes=sizes, augment=config.data.augment, by_position=config.eval_by_position, **of_training(config)
  )


# By `model.name`: (config, platform) → its Program. A project adds its own.
PROGRAMS: dict[str, Callable[[ConfigDict, str], Program]] = {"transformer": transformer}
