"""Makes the checked, frozen Program from a config (configs/base.py)."""

from ml_collections import ConfigDict

from errors import ConfigError
from models.settings import model_config
from training.optimizer import Optimizer
from training.program import Program


def program(config: ConfigDict, platform: str, draft: bool = False) -> Program:
  """The Program of a config. Resolves `auto` fields for the platform: "cpu", "gpu" or "tpu".

  In a draft, the sizes that only the data can say are made up. It serves to check all other fields early.
  """
  model = model_config(config, platform, draft)
  if config.data.augment and not model.reads.is_image:
    raise ConfigError(f"data.augment=True is for images, but model.inputs={model.inputs!r}; set data.augment=False")
  if model.lora_rank and not config.init_from:
    raise ConfigError(
      f"model.lora_rank={model.lora_rank} trains adapters of a model that is there already; name it with init_from, or "
      "train all weights with model.lora_rank=0"
    )
  return Program(
    model=model,
    optimizer=Optimizer(steps=config.steps, **config.optimizer),
    seed=config.seed,
    accumulation=config.accumulation,
    augment=config.data.augment,
  )
