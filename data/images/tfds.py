"""Any image data set that TensorFlow Datasets has prepared in array_record form, without TensorFlow."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from ml_collections import ConfigDict

import limits
from data import records, tfds
from data.images import cifar10
from data.images.examples import TOGETHER, Opened
from errors import ConfigError, file_name, inside


def find(path: str, config: ConfigDict, said: str) -> "Records":
  """The data set `tfds:NAME[/CONFIG][:VERSION]`, in its newest version. Downloads CIFAR-10 if it is not there."""
  at = tfds.root(config)
  name, _, version = path.removeprefix(tfds.PREFIX).partition(":")
  if name == cifar10.NAME and version in ("", cifar10.VERSION) and not cifar10.is_prepared(at):
    cifar10.prepare(at)
  return Records(tfds.find(path, config, said), said, config.limit_mb << 20)


@dataclasses.dataclass(frozen=True)
class Records:
  """A prepared data set: a folder of records."""

  folder: Path
  said: str
  limit: int = limits.ROW

  def key(self) -> Any:
    files = sorted(file for file in self.folder.iterdir() if not file.name.startswith("."))
    stats = [(file.name, file.stat()) for file in files]
    return (str(self.folder.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])

  def open(self) -> Opened:
    from tensorflow_datasets import builder_from_directory, decode, features

    form = self._file_format()
    if form != "array_record":
      raise ConfigError(
        f"{self.said} is in {str(self.folder)!r} as {form}, but not in array_record form; prepare it with "
        "file_format='array_record' in another folder, and set data.dir to that"
      )
    tfds.check_classes(self.folder, self.said)
    try:
      builder = builder_from_directory(str(self.folder))
      found, splits = builder.info.features, list(builder.info.splits)
      files = [str(file) for split in builder.info.splits.values() for file in split.filepaths]
    except Exception as error:  # of many types
      self.refuse(error)
    for file in files:
      name = file_name(f"dataset_info.json of {self.said}", os.path.relpath(file, self.folder))
      inside(self.said, self.folder, self.folder / name)
    most = min([TOGETHER, *(records.together(file, self.limit) for file in files if os.path.exists(file))])
    names = list(found) if isinstance(found, features.FeaturesDict) else []
    image, label = (found[name] if name in names else None for name in ("image", "label"))
    is_image = isinstance(image, features.Image) and len(image.shape) == 3 and image.np_dtype == np.uint8
    if image is None or not is_image or not isinstance(label, features.ClassLabel):
      raise ConfigError(
        f"{self.said} needs the features 'image' (an Image of uint8) and 'label' (a ClassLabel), but has "
        f"{', '.join(names) or 'others'}; use another data set"
      )
    validation = next((split for split in ("validation", "test") if split in splits), None)
    if "train" not in splits:
      raise ConfigError(f"{self.said} has no split 'train', only {', '.join(splits) or 'none'}; use another data set")
    skip = {"image": decode.SkipDecoding()}  # store.py decodes
    read = lambda split: Split(self, split, builder.as_data_source(split, decoders=skip), most)
    return Opened(
      train=read("train"),
      validation=read(validation) if validation else None,
      channels=1 if image.shape[-1] == 1 else 3,
      classes=tuple(label.names),
    )

  def _file_format(self) -> str:
    try:
      found = limits.described(self.folder / "dataset_info.json")
      return str(found.get("fileFormat", "tfrecord"))
    except (ValueError, AttributeError) as error:
      self.refuse(error)

  def refuse(self, error: Exception) -> NoReturn:
    """Raises the ConfigError for an error of the libraries that read the data set."""
    tfds.refuse(self.folder, self.said, error)


@dataclasses.dataclass(frozen=True)
class Split:
  """A split of a prepared data set. `source` gives its records, with images as the content of their files."""

  records: Records
  split: str
  source: Any
  at_a_time: int = TOGETHER

  @functools.cached_property
  def labels(self) -> np.ndarray:
    starts = range(0, len(self.source), self.at_a_time)
    read = (self._read(start, min(start + self.at_a_time, len(self.source))) for start in starts)
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
