"""Training and validation data. The batch at step t is a pure function of (seed, t), for any number of processes.

A data set is two sources of numbered examples, for training and validation. batches.py orders, slices, pads and
prefetches them. text.py, cifar10.py and synthetic.py each have a `load(config, model)`; add a new one to `DATASETS`.
"""

import dataclasses
from collections.abc import Callable

from ml_collections import ConfigDict

from data import cifar10, synthetic, text
from data.batches import Batches, Source, prefetch
from data.dataset import Dataset
from errors import ConfigError, one_of
from models.config import ModelConfig

__all__ = ["Batches", "Dataset", "Source", "load", "prefetch"]


@dataclasses.dataclass(frozen=True)
class Loader:
  """Loads a data set from `config.data`, for models with these inputs and this objective; None allows any."""

  load: Callable[[ConfigDict, ModelConfig], Dataset]
  inputs: str | None = None
  objective: str | None = None


DATASETS = {
  "text": Loader(text.load, inputs="tokens", objective="next_token"),
  "cifar10": Loader(cifar10.load, inputs="images", objective="class"),
  "synthetic": Loader(synthetic.load),
}


def load(config: ConfigDict, model: ModelConfig) -> Dataset:
  """Loads the data set of `config.data` (configs/base.py), with examples that fit `model`."""
  loader = DATASETS[one_of("data.name", config.name, DATASETS)]
  inputs, objective = loader.inputs or model.inputs, loader.objective or model.objective
  if (inputs, objective) != (model.inputs, model.objective):
    raise ConfigError(
      f"data.name={config.name!r} needs model.inputs={inputs!r} and model.objective={objective!r}, but the model has "
      f"model.inputs={model.inputs!r} and model.objective={model.objective!r}; change these two or data.name"
    )
  return loader.load(config, model)
