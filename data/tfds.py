"""Data sets that TensorFlow Datasets has prepared in array_record form, without TensorFlow.

Here is what images (data/images/tfds.py) and texts (data/text/rows/array_record.py) share: where `tfds:NAME` is, and
which classes its description may name. The form: a folder NAME[/CONFIG]/VERSION with
`dataset_info.json` (the splits), `features.json` (how a record is encoded) and files such as
`NAME-train.array_record-00000-of-00001`.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

import limits
from errors import ConfigError, first_line, inside, shown

PREFIX = "tfds:"
NAMES_FILE = "names_file"  # an argument of ClassLabel: any file, whose lines become names of classes
CLASSES = ("pythonClassName", "python_class_name", "type")  # fields of features.json, now and of old versions


def root(data: ConfigDict) -> Path:
  """The folder of TensorFlow Datasets."""
  return Path(data.dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def find(path: str, data: ConfigDict, said: str) -> Path:
  """The folder of the data set `tfds:NAME[/CONFIG][:VERSION]`, in its newest version. `said` names it in errors."""
  at = root(data)
  name, _, version = path.removeprefix(PREFIX).partition(":")
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
  return at / name / (version or versions[-1])


def _prepared(at: Path) -> dict[str, list[str]]:
  """The names of all data sets in a folder, with their versions."""
  found: dict[str, list[str]] = {}
  for file in sorted([*at.glob("*/*/dataset_info.json"), *at.glob("*/*/*/dataset_info.json")]):
    if re.fullmatch(r"\d+\.\d+\.\d+", file.parent.name):
      found.setdefault(file.parent.parent.relative_to(at).as_posix(), []).append(file.parent.name)
  return found


def names_images(path: str, data: ConfigDict) -> bool:
  """Whether the data set `tfds:NAME` has images; also if it is not there, as CIFAR-10 before its download."""
  try:
    return b"image_feature.Image" in limits.content(find(path, data, path) / "features.json")
  except (ConfigError, OSError, ValueError):
    return True


def check_classes(folder: Path, said: str) -> None:
  """Raises ConfigError if features.json names what reading it would import or read: other modules, or other files.

  The library takes texts in it for JSON, too, in which there may be classes again.
  """

  def check(pairs: list[tuple[str, Any]]) -> None:
    for key, value in pairs:
      if key in CLASSES and isinstance(value, str) and not value.startswith("tensorflow_datasets."):
        raise ConfigError(f"{said} has a features.json with the class {value!r}; use one of TensorFlow Datasets")
      if key == NAMES_FILE or os.path.isabs(key) or ".." in key.split("/"):
        raise ConfigError(f"{said} has a features.json with {shown(key)}, which names another file; prepare it again")
      if isinstance(value, str) and "{" in value:
        try:
          json.loads(value, object_pairs_hook=check)
        except RecursionError as error:
          raise ValueError("it nests too deep") from error
        except ValueError as error:
          if isinstance(error, ConfigError):
            raise

  try:
    limits.described(folder / "features.json", check)
  except (OSError, ValueError) as error:
    if isinstance(error, ConfigError):
      raise
    refuse(folder, said, error)
  for file in folder.glob("*.txt"):  # names of classes
    inside(said, folder, file)


def refuse(folder: Path, said: str, error: Exception) -> NoReturn:
  """Raises the ConfigError for an error of the libraries that read the data set."""
  raise ConfigError(f"{said} cannot be read from {str(folder)!r} ({first_line(error)}); prepare it again") from error
