"""Made-up examples of the right shape, for measuring speed and for tests. Nothing can be learnt from the labels.

Example i is a pure function of i, so it is the same on every process and in every run.
"""

import dataclasses
from typing import Any

import numpy as np

from data.batches import HostBatch
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
    if self.model.is_image:
      side = self.model.image_size
      image = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
      return {"image": image, "label": np.int32(random.integers(self.model.classes))}
    return {"tokens": random.integers(0, self.model.vocab_size, self.model.seq_len + 1, dtype=np.int32)}


def load(config: Any, model: ModelConfig) -> dict[str, Any]:
  """The fields of a `data.Dataset`."""
  return {
    "train": Synthetic(model, 0, TRAIN_EXAMPLES),
    "validation": Synthetic(model, TRAIN_EXAMPLES, VALIDATION_EXAMPLES),
    "description": f"synthetic {model.inputs}: random, for measuring speed; nothing can be learnt from them",
    "tokenizer": "" if model.is_image else "synthetic",
    "fingerprint": f"synthetic-{model.inputs}-{TRAIN_EXAMPLES}-{VALIDATION_EXAMPLES}",
  }
