"""What a model is trained on. The batch at step t is a pure function of (seed, t), however many processes read it.

A data set is two sources of numbered examples. batches.py orders, slices, pads and prefetches them; text.py,
cifar10.py and synthetic.py are the data sets. Each of these modules has a `load(config, model)` that returns a
`Dataset`, and `GIVES`, the inputs and the objective it is made for (None: any).
"""

from typing import Any

from data import cifar10, synthetic, text
from data.batches import Batches, Source, prefetch
from data.dataset import Dataset
from errors import ConfigError, one_of
from models.config import ModelConfig

__all__ = ["Batches", "Dataset", "Source", "load", "prefetch"]

DATASETS: dict[str, Any] = {"text": text, "cifar10": cifar10, "synthetic": synthetic}  # the modules


def load(config: Any, model: ModelConfig) -> Dataset:
  """The data set that `config.data` describes (configs/base.py), in the shape that `model` reads."""
  module = DATASETS[one_of("data.name", config.name, DATASETS)]
  if module.GIVES not in (None, (model.inputs, model.objective)):
    inputs, objective = module.GIVES
    raise ConfigError(
      f"data.name={config.name!r} gives model.inputs={inputs!r} and model.objective={objective!r}, but the model has "
      f"model.inputs={model.inputs!r} and model.objective={model.objective!r}; set both to the former"
    )
  return module.load(config, model)
