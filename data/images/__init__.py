"""Images: folders and files of the user, and the data sets of TensorFlow Datasets.

`find` recognizes the form of a source. store.py decodes a source once, into files that are read at training time. The
size, the channels, the classes and the mean of the pixels are those of the data.
"""

import itertools
import math
import os
from pathlib import Path

from ml_collections import ConfigDict

from data.dataset import Dataset, Part, sources_of
from data.images import arrays, folder, tfds
from data.images.examples import Form, Joined, readable
from data.images.store import Stored, prepare
from data.remote import brought
from data.tfds import PREFIX, names_images
from errors import ConfigError, not_negative

SOME = 100  # names to look at before guessing
FORMS = "a folder with one subfolder for each class, an .npz file, or tfds:NAME"


def load(config: ConfigDict) -> Dataset:
  """Loads the images of `config.data`. Prepares them first if needed. Raises ConfigError for bad input."""
  not_negative("data.resize", config.data.resize, "use 0 to keep the images as they are")
  sources, other = sources_of(config.data.path), config.data.validation_path
  if other and isinstance(config.data.path, dict):
    raise ConfigError(f"data.validation_path={other!r} needs a single source in data.path, not several; use ''")
  names = [name for name, _ in sources]
  forms = [find(name, "data.path", config.data) for name in names]
  if other:
    forms = [Joined(forms[0], find(other, "data.validation_path", config.data))]
  stored = [prepare(form, config.data.cache_dir, config.data.resize, config.data.limit_mb << 20) for form in forms]
  counts = [class_count(one, config.model.classes) for one in stored]
  check_agreement(stored, counts if not config.model.classes else [])
  mean, std = pixel_moments(stored)
  side, _, channels = stored[0].shape
  lines = (
    f"images of {name}: {len(one.train):,} to train on and {len(one.validation):,} to validate on "
    f"({side}×{side}, {'grey' if channels == 1 else 'color'}, {count} classes{one.note})"
    for name, one, count in zip(names, stored, counts, strict=True)
  )
  return Dataset(
    parts=tuple(
      Part(name, one.train, one.validation, one.fingerprint, counts={"images": (len(one.train), len(one.validation))})
      for name, one in zip(names, stored, strict=True)
    ),
    description="\n".join(lines),
    weights=tuple(weight for _, weight in sources),
    model={
      "image_size": side, "channels": channels, "classes": max(counts), "pixel_mean": mean, "pixel_std": std,
    },
    class_names=next((one.classes for one in stored if one.classes), ()),
  )  # fmt: skip


def find(path: str, field: str, data: ConfigDict) -> Form:
  """The form of the images at a path. Raises ConfigError if there are none; `field` names the path in errors."""
  said, at = f"{field}={path!r}", Path(os.path.expanduser(brought(path, field, data.cache_dir)))
  if not path:
    raise ConfigError(f"{said} names no images; use {FORMS}")
  with readable(said):
    if path.startswith(PREFIX):
      return tfds.find(path, data, said)
    if at.is_dir():
      return folder.find(at, said)
    if at.is_file() and at.suffix == ".npz":
      return arrays.Arrays(at, said, data.limit_mb << 20)
  found = "is a file of another kind" if at.exists() else "does not exist"
  raise ConfigError(f"{said} {found}; use {FORMS}")


def holds_images(path: str, data: ConfigDict) -> bool:
  """Whether there seem to be images at a path: a quick guess, mostly from names."""
  at = Path(os.path.expanduser(path))
  if path.startswith(PREFIX):
    return names_images(path, data)
  if at.suffix == ".npz":
    return True
  if not path or not at.is_dir():
    return False
  names = itertools.chain.from_iterable(itertools.islice(at.glob(pattern), SOME) for pattern in ("*/*", "*/*/*"))
  return any(name.suffix.lower() in folder.SUFFIXES for name in names)


def class_count(stored: Stored, given: int) -> int:
  """How many classes a source has. Those without names must be numbered from 0 to `given` - 1, without gaps if 0."""
  if stored.classes:
    return len(stored.classes)
  high = stored.labels[-1]
  if given and high >= given:
    raise ConfigError(
      f"model.classes={given} is too small for {stored.said}, which has the label {high}; use {high + 1}, or number "
      "the classes from 0"
    )
  if not given and high >= len(stored.labels):
    missing = next(i for i, label in enumerate(stored.labels) if i != label)
    raise ConfigError(
      f"{stored.said} has labels up to {high}, but no image with label {missing}; number the classes from 0 without "
      f"gaps, or set model.classes={high + 1}"
    )
  return high + 1


def check_agreement(stored: list[Stored], counts: list[int]) -> None:
  """Raises ConfigError unless all sources have images of one shape, and the same classes."""
  first = stored[0]
  for one in stored[1:]:
    both = f"{first.said} and {one.said}"
    if one.shape[0] != first.shape[0]:
      raise ConfigError(
        f"{both} have images of {first.shape[0]} and {one.shape[0]} pixels a side; set data.resize to give all one size"
      )
    if one.shape != first.shape:
      raise ConfigError(f"{both} mix grey and color images; convert one of them")
    if one.classes != first.classes and one.classes and first.classes:
      different = sorted(set(one.classes) ^ set(first.classes))
      how = f"{different[0]!r} is in one only" if different else "their order differs"
      raise ConfigError(f"{both} have different classes: {how}; give both the same ones")
  if len(set(counts)) > 1:
    few, many = counts.index(min(counts)), counts.index(max(counts))
    raise ConfigError(
      f"{stored[few].said} has {counts[few]} classes, but {stored[many].said} has {counts[many]}; give both the same "
      f"classes, or set model.classes={counts[many]}"
    )


def pixel_moments(stored: list[Stored]) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """The mean and the standard deviation of each channel over the training images of all sources, where white is 1."""
  count = sum(len(one.train) * one.shape[0] ** 2 for one in stored)
  sums = [sum(channel) for channel in zip(*(one.sums for one in stored), strict=True)]
  squares = [sum(channel) for channel in zip(*(one.squares for one in stored), strict=True)]
  std = (math.sqrt(q * count - s * s) / count / 255 for s, q in zip(sums, squares, strict=True))
  # A channel that is the same everywhere must not be divided by 0.
  return tuple(round(s / count / 255, 4) for s in sums), tuple(round(max(x, 1 / 255), 4) for x in std)
