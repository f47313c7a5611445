"""Dataset and Text: what `data.load` returns."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from data.batches import Source


@dataclasses.dataclass(frozen=True)
class Text:
  """The part of a Dataset that only text has.

  Attributes:
    encode, decode: text to token ids, and back.
    to_bytes: token ids to the bytes that they stand for.
    bytes_per_token: of the validation text. Converts a loss in nats per token to bits per byte.
    byte_pairs: how often each pair of bytes occurs in the training text, int64 [256, 256].
  """

  encode: Callable[[str], list[int]]
  decode: Callable[[list[int]], str]
  to_bytes: Callable[[Sequence[int]], bytes]
  bytes_per_token: float
  byte_pairs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A data set: training and validation examples, and their description.

  Attributes:
    train, validation: the examples.
    description: one line for the user.
    fingerprint: a hash of content and tokenization. Equal fingerprints mean equal examples.
    tokenizer: the name of the tokenizer, empty for images. Equal names mean equal tokenizers.
    text: None if the data is not text.
  """

  train: Source
  validation: Source
  description: str
  fingerprint: str
  tokenizer: str = ""
  text: Text | None = None
