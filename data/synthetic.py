"""Random examples of the right shape, to measure speed and for tests. A model cannot learn anything from them.

Example i is a pure function of i, so it is the same on every process and in every run.
"""

import dataclasses
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from data.batches import HostBatch
from data.dataset import Dataset
from models.config import ModelConfig

TRAIN_EXAMPLES, VALIDATION_EXAMPLES = 8192, 256


@dataclasses.dataclass(frozen=True)
class Synthetic:
  """`size` random examples for a model, numbered from `first`."""

  model: ModelConfig
  first: int
  size: int

  def __len__(self) -> int:
    return self.size

  def read(self, ids: np.ndarray) -> HostBatch:
    examples = [self._example(self.first + int(i)) for i in ids]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}

  def _example(self, number: int) -> dict[str, Any]:
    random = np.random.Generator(np.random.Philox(key=number))
    shapes = self.model.reads.shapes(self.model, self.model.predicts.ahead) | self.model.predicts.shapes()
    limits = {"tokens": self.model.vocab_size, "image": 256, "label": self.model.classes}
    return {name: random.integers(0, limits[name], shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}


def load(config: ConfigDict, model: ModelConfig) -> Dataset:
  """Makes random examples for any model."""
  return Dataset(
    train=Synthetic(model, 0, TRAIN_EXAMPLES),
    validation=Synthetic(model, TRAIN_EXAMPLES, VALIDATION_EXAMPLES),
    description=f"synthetic {model.inputs}: random, for measuring speed; nothing can be learned from them",
    tokenizer="synthetic" if model.inputs == "tokens" else "",
    fingerprint=f"synthetic-{model.inputs}-{TRAIN_EXAMPLES}-{VALIDATION_EXAMPLES}",
  )
