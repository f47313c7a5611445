"""Random examples of the right shape, to measure speed and for tests. A model cannot learn anything from them.

Example i is a pure function of i, so it is the same on every process and in every run.
"""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from data.dataset import Dataset, HostBatch, Part
from models.inputs import Field
from models.sizes import ModelSizes, model_sizes

TRAIN_EXAMPLES, VALIDATION_EXAMPLES = 8192, 256


@dataclasses.dataclass(frozen=True)
class Synthetic:
  """`size` random examples for a model, numbered from `first`."""

  sizes: ModelSizes
  first: int
  size: int

  def __len__(self) -> int:
    return self.size

  def read(self, ids: np.ndarray) -> HostBatch:
    examples = [self._example(self.first + int(i)) for i in ids]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}

  def _example(self, number: int) -> dict[str, np.ndarray]:
    random = np.random.Generator(np.random.Philox(key=number))
    example = {name: _values(random, field) for name, field in self.sizes.example_shapes().items()}
    if self.sizes.segments:
      example["segments"] = _segments(random, len(example["segments"]), 4 if self.sizes.predicts.causal else 1)
    return example


def _values(random: np.random.Generator, field: Field) -> np.ndarray:
  if field.below is None:
    return random.standard_normal(field.shape, field.dtype)
  return random.integers(0, field.below, field.shape, dtype=field.dtype)


def _segments(random: np.random.Generator, length: int, documents: int) -> np.ndarray:
  """At most so many documents of random lengths, and then padding."""
  is_first = np.zeros(length, np.int32)
  is_first[[0, *random.integers(0, length, documents - 1)]] = 1
  return np.where(np.arange(length) < random.integers(1, length + 1), np.cumsum(is_first, dtype=np.int32), 0)


def load(config: ConfigDict) -> Dataset:
  """Makes random examples for the model of a config."""
  sizes = model_sizes(config)
  return Dataset(
    parts=(
      Part(
        "synthetic",
        train=Synthetic(sizes, 0, TRAIN_EXAMPLES),
        validation=Synthetic(sizes, TRAIN_EXAMPLES, VALIDATION_EXAMPLES),
        fingerprint=f"synthetic-{sizes.inputs}-{TRAIN_EXAMPLES}-{VALIDATION_EXAMPLES}",
      ),
    ),
    description=f"synthetic {sizes.inputs}: random, for measuring speed; nothing can be learned from them",
    tokenizer="synthetic" if sizes.inputs == "tokens" else "",
  )
