"""Any image data set that TensorFlow Datasets has prepared in array_record form, without TensorFlow."""

import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from ml_collections import ConfigDict

from data.images import cifar10
from data.images.examples import Opened
from errors import ConfigError, file_name, first_line, inside

PREFIX = "tfds:"
RECORDS = 128  # records to read at a time
CLASSES = ("pythonClassName", "python_class_name", "type")  # fields of features.json, now and of old versions


def root(data: ConfigDict) -> Path:
  """The folder of TensorFlow Datasets."""
  return Path(data.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def find(path: str, data: ConfigDict, said: str) -> "Records":
  """The data set `tfds:NAME[/CONFIG][:VERSION]`, in its newest version. Downloads CIFAR-10 if it is not there."""
  at = root(data)
  name, _, version = path.removeprefix(PREFIX).partition(":")
  if name == cifar10.NAME and version in ("", cifar10.VERSION) and not cifar10.is_prepared(at):
    cifar10.prepare(at)
  there = _prepared(at)
  configs = [found for found in there if found == name or found.startswith(f"{name}/")]
  if not configs:
    raise ConfigError(
      f"{said} is not in {str(at)!r}, which holds {', '.join(there) or 'no data sets'}; prepare it there with "
      "file_format='array_record', or set data.dir or TFDS_DATA_DIR to the folder that holds it"
    )
  if len(configs) > 1 and name not in configs:
    raise ConfigError(f"{said} has several configs; use one of {', '.join(PREFIX + found for found in configs)}")
  name = name if name in configs else configs[0]
  versions = sorted(there[name], key=lambda v: [int(part) for part in v.split(".")])
  if version and version not in versions:
    raise ConfigError(f"{said} is not in {str(at)!r} in this version; use {', '.join(versions)} or none")
  return Records(at / name / (version or versions[-1]), said)


def _prepared(at: Path) -> dict[str, list[str]]:
  """The names of all data sets in a folder, with their versions."""
  found: dict[str, list[str]] = {}
  for file in sorted([*at.glob("*/*/dataset_info.json"), *at.glob("*/*/*/dataset_info.json")]):
    if re.fullmatch(r"\d+\.\d+\.\d+", file.parent.name):
      found.setdefault(file.parent.parent.relative_to(at).as_posix(), []).append(file.parent.name)
  return found


@dataclasses.dataclass(frozen=True)
class Records:
  """A prepared data set: a folder of records."""

  folder: Path
  said: str

  def key(self) -> Any:
    files = sorted(file for file in self.folder.iterdir() if not file.name.startswith("."))
    stats = [(file.name, file.stat()) for file in files]
    return (str(self.folder.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])

  def open(self) -> Opened:
    import tensorflow_datasets as tfds

    form = self._file_format()
    if form != "array_record":
      raise ConfigError(
        f"{self.said} is in {str(self.folder)!r} as {form}, but not in array_record form; prepare it with "
        "file_format='array_record' in another folder, and set data.dir to that"
      )
    self._check_classes()
    try:
      builder = tfds.builder_from_directory(str(self.folder))
      features, splits = builder.info.features, list(builder.info.splits)
      files = [str(file) for split in builder.info.splits.values() for file in split.filepaths]
    except Exception as error:  # of many types
      self.refuse(error)
    for file in files:
      name = file_name(f"dataset_info.json of {self.said}", os.path.relpath(file, self.folder))
      inside(self.said, self.folder, self.folder / name)
    names = list(features) if isinstance(features, tfds.features.FeaturesDict) else []
    image, label = (features[name] if name in names else None for name in ("image", "label"))
    is_image = isinstance(image, tfds.features.Image) and len(image.shape) == 3 and image.np_dtype == np.uint8
    if image is None or not is_image or not isinstance(label, tfds.features.ClassLabel):
      raise ConfigError(
        f"{self.said} needs the features 'image' (an Image of uint8) and 'label' (a ClassLabel), but has "
        f"{', '.join(names) or 'others'}; use another data set"
      )
    validation = next((split for split in ("validation", "test") if split in splits), None)
    if "train" not in splits:
      raise ConfigError(f"{self.said} has no split 'train', only {', '.join(splits) or 'none'}; use another data set")
    skip = {"image": tfds.decode.SkipDecoding()}  # store.py decodes
    read = lambda split: Split(self, split, builder.as_data_source(split, decoders=skip))
    return Opened(
      train=read("train"),
      validation=read(validation) if validation else None,
      channels=1 if image.shape[-1] == 1 else 3,
      classes=tuple(label.names),
    )

  def _file_format(self) -> str:
    try:
      return json.loads((self.folder / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
    except ValueError as error:
      self.refuse(error)

  def _check_classes(self) -> None:
    """Raises ConfigError if features.json names classes of other modules, which reading it would import."""

    def check(pairs: list[tuple[str, Any]]) -> None:
      for key, name in pairs:
        if key in CLASSES and isinstance(name, str) and not name.startswith("tensorflow_datasets."):
          raise ConfigError(f"{self.said} has a features.json with the class {name!r}; use one of TensorFlow Datasets")

    try:
      json.loads((self.folder / "features.json").read_text(), object_pairs_hook=check)
    except (OSError, ValueError) as error:
      if isinstance(error, ConfigError):
        raise
      self.refuse(error)

  def refuse(self, error: Exception) -> NoReturn:
    """Raises the ConfigError for an error of the libraries that read the data set."""
    raise ConfigError(
      f"{self.said} cannot be read from {str(self.folder)!r} ({first_line(error)}); prepare it again"
    ) from error


@dataclasses.dataclass(frozen=True)
class Split:
  """A split of a prepared data set. `source` gives its records, with images as the content of their files."""

  records: Records
  split: str
  source: Any

  @functools.cached_property
  def labels(self) -> np.ndarray:
    starts = range(0, len(self.source), RECORDS)
    read = (self._read(start, min(start + RECORDS, len(self.source))) for start in starts)
    return np.array([record["label"] for records in read for record in records], np.int64)

  def encoded(self, start: int, stop: int) -> list[bytes]:
    return [record["image"] for record in self._read(start, stop)]

  def name(self, number: int) -> str:
    return str(number)

  def where(self, number: int) -> str:
    return f"{self.records.folder}, image {number} of {self.split}"

  def _read(self, start: int, stop: int) -> list[dict[str, Any]]:
    try:
      return self.source.__getitems__(range(start, stop))
    except Exception as error:  # of many types
      self.records.refuse(error)
