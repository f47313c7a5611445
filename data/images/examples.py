"""What a source of images must offer to be prepared, and which of its images are held out to validate on.

folder.py, arrays.py and tfds.py each define a `Form`: a way in which images are stored. Add another one to `find` in
__init__.py.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from data.images.decode import Encoded
from errors import ConfigError

TOGETHER, TOGETHER_BYTES = 128, 8 << 20  # images that are decoded together, and their bytes
HELD_OUT = 20  # 1 in 20 images of a class is for validation


class Examples(Protocol):
  """Labelled images, numbered from 0 and not yet decoded."""

  @property
  def labels(self) -> np.ndarray:
    """The class of each image, int64 [N]."""
    ...

  def encoded(self, start: int, stop: int) -> Sequence[Encoded]:
    """The images from `start` up to `stop`. Going on where the last call ended is the fastest."""
    ...

  @property
  def at_a_time(self) -> int:
    """How many images may be in memory together, in the form of `encoded`."""
    ...

  def name(self, number: int) -> str:
    """A name that stays the same when the data is moved."""
    ...

  def where(self, number: int) -> str:
    """Where the image is, for errors."""
    ...


@dataclasses.dataclass(frozen=True)
class Opened:
  """A source whose labels are known.

  Attributes:
    train: the images to train on.
    validation: the images to validate on; None to hold out some of `train`.
    channels: 1 if all images are grey, otherwise 3.
    classes: the names of the classes; () if they have none.
    note: for the description of the data.
  """

  train: Examples
  validation: Examples | None
  channels: int
  classes: tuple[str, ...] = ()
  note: str = ""


class Form(Protocol):
  """Images in one form of files."""

  @property
  def said(self) -> str:
    """The field of the config and its value, for errors."""
    ...

  def key(self) -> Any:
    """A value that changes when the files change. It is cheap: only names, sizes and times are read."""
    ...

  def open(self) -> Opened:
    """Reads the labels. Raises ConfigError for bad input."""
    ...


@dataclasses.dataclass(frozen=True)
class Joined:
  """One source to train on, and another to validate on: its validation split if it has one, otherwise all of it."""

  train: Form
  validation: Form

  @property
  def said(self) -> str:
    return self.train.said

  def key(self) -> Any:
    return (self.train.key(), self.validation.key())

  def open(self) -> Opened:
    train, other = self.train.open(), self.validation.open()
    validation = other.validation or other.train
    if train.classes and other.classes:
      for name in other.classes:
        if name not in train.classes:
          raise ConfigError(
            f"{self.validation.said} has the class {name!r}, but {self.train.said} has no such class to train on; "
            "remove it, or add it there"
          )
      numbers, labels = np.array([train.classes.index(name) for name in other.classes]), validation.labels
      validation = Renumbered(validation, np.where(labels < 0, labels, numbers[labels]))  # below 0: refused later
    return Opened(train.train, validation, max(train.channels, other.channels), train.classes, train.note or other.note)


@dataclasses.dataclass(frozen=True)
class Renumbered:
  """Examples with other labels."""

  examples: Examples
  labels: np.ndarray

  def encoded(self, start: int, stop: int) -> Sequence[Encoded]:
    return self.examples.encoded(start, stop)

  @property
  def at_a_time(self) -> int:
    return self.examples.at_a_time

  def name(self, number: int) -> str:
    return self.examples.name(number)

  def where(self, number: int) -> str:
    return self.examples.where(number)


@contextlib.contextmanager
def readable(said: str) -> Iterator[None]:
  """Raises ConfigError if the block fails to read a file."""
  try:
    yield
  except OSError as error:
    raise ConfigError(
      f"{said} cannot be read: {error.filename!r} ({error.strerror}); make that readable, or take it out of the data"
    ) from error


def held_out(labels: np.ndarray, names: Iterable[str]) -> np.ndarray:
  """Which of N images with these labels and names are for validation, bool [N]: 1 in 20, and at least one if possible.

  The names' hashes put the images of each class in an order. The first ones of each class are taken, from all classes
  alike. The last one of a class is never taken, so that each class has an image to train on.
  """
  hashes = np.array([_hash(name) for name in names], np.uint64)
  order = np.lexsort((hashes, labels))
  _, firsts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
  rank = np.arange(len(labels)) - np.repeat(firsts, sizes)
  size = np.repeat(sizes, sizes)
  taken = np.lexsort((hashes[order], (rank + 0.5) / size))  # by the place in the class, as a share of the class
  taken = taken[(rank < size - 1)[taken]][: max(1, len(labels) // HELD_OUT)]
  held = np.zeros(len(labels), np.bool_)
  held[order[taken]] = True
  return held


def _hash(name: str) -> int:
  return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "little")
