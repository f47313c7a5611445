"""What a model is trained on. The batch at step t is a pure function of (seed, t), however many processes read it.

A data set is a `Source` of numbered examples; batches.py orders, slices, pads and prefetches them; text.py, cifar10.py
and synthetic.py are the sources. augment.py runs on the device, as part of the training step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from data import cifar10, synthetic, text
from data.batches import Batches, Source, prefetch
from errors import ConfigError, one_of
from models.config import ModelConfig

__all__ = ["Batches", "Dataset", "Source", "load", "prefetch"]


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Two sources and what is known about them.

  Attributes:
    train, validation: the examples.
    description: one line for the user.
    fingerprint: a hash of the content and of how it was tokenized; equal fingerprints mean equal examples.
    tokenizer: what the token ids mean; equal names mean the same. Empty for images.
    bytes_per_token: of the validation text, to turn a loss in nats a token into bits a byte; None for images.
    encode, decode: text to token ids and back; None for images.
    bigram: the loss in bits a byte of a byte bigram model on the validation text; None for images and synthetic data.
  """

  train: Source
  validation: Source
  description: str
  fingerprint: str
  tokenizer: str = ""
  bytes_per_token: float | None = None
  encode: Callable[[str], list[int]] | None = None
  decode: Callable[[list[int]], str] | None = None
  bigram: Callable[[int], float] | None = None


LOADERS = {"text": text.load, "cifar10": cifar10.load, "synthetic": synthetic.load}
INPUTS = {"text": "tokens", "cifar10": "images"}  # synthetic serves both


def load(config: Any, model: ModelConfig) -> Dataset:
  """The data set that `config.data` describes (configs/base.py), in the shape that `model` reads."""
  name = one_of("data.name", config.name, LOADERS)
  if INPUTS.get(name, model.inputs) != model.inputs:
    raise ConfigError(
      f"data.name={name!r} gives {INPUTS[name]}, but model.inputs={model.inputs!r}; set model.inputs={INPUTS[name]!r}"
    )
  return Dataset(**LOADERS[name](config, model))
