"""Dataset: what `data.load` returns."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from data.batches import Source


@dataclasses.dataclass(frozen=True)
class Text:
  """What only a text data set has.

  Attributes:
    encode, decode: text to token ids, and back.
    to_bytes: token ids to the bytes they stand for.
    bytes_per_token: of the validation text; turns a loss in nats per token into bits per byte.
    byte_pairs: how often each byte follows each other one in the training text, int64 [256, 256].
  """

  encode: Callable[[str], list[int]]
  decode: Callable[[list[int]], str]
  to_bytes: Callable[[Sequence[int]], bytes]
  bytes_per_token: float
  byte_pairs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Two sources and what is known about them.

  Attributes:
    train, validation: the examples.
    description: one line for the user.
    fingerprint: a hash of the content and its tokenization; equal fingerprints mean equal examples.
    tokenizer: names the meaning of token ids; equal names mean equal tokenizers. Empty for images.
    text: what only a text has; None for other data.
  """

  train: Source
  validation: Source
  description: str
  fingerprint: str
  tokenizer: str = ""
  text: Text | None = None
