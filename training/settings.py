"""Makes the checked, frozen Program from a config (configs/base.py)."""

import dataclasses

from ml_collections import ConfigDict

from errors import ConfigError
from models.ops.attention import choose
from models.sizes import model_sizes, with_sizes_made_up
from training.optimizer import Optimizer
from training.program import Program


def check(config: ConfigDict, platform: str) -> None:
  """Raises ConfigError for a field that cannot make a Program, whatever the data is. Comes before data is prepared."""
  program(with_sizes_made_up(config), platform)


def program(config: ConfigDict, platform: str) -> Program:
  """The Program of a config. Resolves `auto` fields for the platform: "cpu", "gpu" or "tpu"."""
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
  return Program(
    sizes=sizes,
    optimizer=Optimizer(steps=config.steps, **config.optimizer),
    seed=config.seed,
    accumulation=config.accumulation,
    augment=config.data.augment,
    by_position=config.eval_by_position,
  )
