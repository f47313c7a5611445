"""What `data.load` returns: a Dataset of one or several parts, each with its own training and validation examples."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from errors import ConfigError

HostBatch = dict[str, np.ndarray]  # the first dimension of each array is the examples


class Source(Protocol):
  """Examples numbered from 0."""

  def __len__(self) -> int: ...

  def read(self, ids: np.ndarray) -> HostBatch:
    """The examples with these numbers, stacked. Several threads may call it at the same time."""
    ...


@dataclasses.dataclass(frozen=True)
class Part:
  """One source of a dataset. Most datasets have a single part; a mixture has several.

  Attributes:
    name: the path that the user gave.
    train, validation: the examples.
    fingerprint: a hash of everything that determines the examples. Equal fingerprints mean equal examples.
    bytes_per_token: of the validation text; None if unknown. Converts a loss in nats per token to bits per byte.
    byte_pairs: how often each pair of bytes occurs in the training text, int64 [256, 256]; None if unknown.
    counts: what there is, as {"documents": (to train on, to validate on), ...}.
  """

  name: str
  train: Source
  validation: Source
  fingerprint: str
  bytes_per_token: float | None = None
  byte_pairs: np.ndarray | None = None
  counts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Text:
  """The tokenizer of a text.

  Attributes:
    encode, decode: text to token ids, and back. `encode` is for prompts: it adds what the tokenizer puts before texts.
    to_bytes: token ids to the bytes that they stand for.
    files: returns the files in which others can load it, by name.
    ends: the ids that end a text.
  """

  encode: Callable[[str], list[int]]
  decode: Callable[[list[int]], str]
  to_bytes: Callable[[Sequence[int]], bytes]
  files: Callable[[], dict[str, str]]
  ends: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A data set: its parts, and what is known of all of them.

  Attributes:
    parts: the sources.
    description: for the user, one line a part.
    weights: the share of each part in training, in any unit; () for equal shares.
    model: the fields of config.model that the data determines, such as `classes`.
    tokenizer: the name of the tokenizer, empty for images. Equal names mean equal tokenizers.
    text: None without a tokenizer.
    class_names: of the classes 0, 1, ..., if they have names.
  """

  parts: tuple[Part, ...]
  description: str
  weights: tuple[float, ...] = ()
  model: dict[str, Any] = dataclasses.field(default_factory=dict)
  tokenizer: str = ""
  text: Text | None = None
  class_names: tuple[str, ...] = ()


def sources_of(path: Any) -> list[tuple[str, float]]:
  """The sources that `data.path` names, and their weights: one with weight 1, or those of a dict, sorted by name.

  Raises ConfigError for weights that are not numbers, negative, or all 0, and for a source that is named twice. Sources
  with weight 0 are left out.
  """
  if not isinstance(path, dict):
    if str(path).startswith("{"):
      raise ConfigError(f'data.path={path!r} is not complete; write a mixture as \'{{"FOLDER": 0.7, "FILE": 0.3}}\'')
    return [(str(path), 1.0)]
  for name, weight in path.items():
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
      raise ConfigError(f"data.path gives {name!r} the weight {weight!r}; use a finite number of at least 0")
  if not any(path.values()):
    raise ConfigError(f"data.path={path!r} has no source with a weight above 0; give one a weight")
  sources = sorted((str(name), float(weight)) for name, weight in path.items() if weight)
  places: dict[str, str] = {}
  for name, _ in sources:
    if (first := places.setdefault(os.path.realpath(os.path.expanduser(name)), name)) != name:
      raise ConfigError(f"data.path names one source twice, as {first!r} and {name!r}; name it once, with both weights")
  return sources
