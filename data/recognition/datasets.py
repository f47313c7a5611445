"""Folders that say themselves what is in them: which files belong to a data set, and to which split.

- `Dataset.save_to_disk` of Hugging Face's `datasets`: state.json names the files; beside them may be files of a cache.
- A DatasetDict of them: dataset_dict.json names the folders, each a split.
- MDS of mosaicml-streaming: index.json names the shards.
- litdata: index.json describes chunk-*.bin, which are not read.
- TensorFlow Datasets in array_record form: NAME-SPLIT.array_record-00000-of-00001.
- The cache of Hugging Face's `datasets`: dataset_info.json, and files that it keeps besides.
- The hub of Hugging Face: README.md may name the files of each split.

Other folders say nothing, but programs leave files in them that are no data (leftovers.py).
"""

import collections
import dataclasses
import os
import re
from typing import Any

from data.recognition import places
from data.recognition.kinds import KINDS, ROWS, TEXT
from data.recognition.leftovers import LEFT, OF_A_CACHE, leftovers
from data.recognition.survey import DESCRIPTIONS, Found, Survey
from errors import ConfigError, file_name
from limits import described

README = "README.md"
NO_MEMBER = "not a file of the data set beside it"
# How TensorFlow Datasets and the cache of Hugging Face's `datasets` call the folders of versions.
VERSION = re.compile(r"(?P<data>(?:.*/)?)\d+\.\d+\.\d+(?:/[^/]+)?")
TFDS = re.compile(r".+?-(?P<split>[^-]+)\.(?P<form>array_record|tfrecord)-\d+-of-\d+")


@dataclasses.dataclass(frozen=True)
class Place:
  """What a folder says about one of its files.

  Attributes:
    kind: what it is, where its content does not say so; "" otherwise.
    split: the name of the split that has it; None if nothing says so.
    why: the reason not to read it; "" if there is none.
  """

  kind: str = ""
  split: str | None = None
  why: str = ""


def places_of(found: Survey) -> dict[str, Place]:
  """What the folders say about their files, by the files' paths from the root; without files that none speaks of.

  Raises ConfigError for a description that cannot be read, or that names files which are not there.
  """
  described = {file.folder for file in found.files if file.relative.endswith(".json") and file.name in DESCRIPTIONS}
  folders: dict[str, dict[str, Found]] = collections.defaultdict(dict)
  for file in found.files if described else ():  # there may be millions
    if file.folder in described:
      folders[file.folder][file.name] = file
  said: dict[str, Place] = {}
  for folder, files in folders.items():
    place = os.path.join(found.root, folder)
    if {"dataset_info.json", "state.json"} <= files.keys():
      said |= _saved(place, folder, files)
    elif {"dataset_info.json", "features.json"} <= files.keys():
      said |= _tfds(folder, files)
    elif "index.json" in files:
      said |= _indexed(place, folder, files)
    elif "dataset_info.json" in files:
      said |= {_join(folder, name): Place(why=NO_MEMBER) for name in files if OF_A_CACHE.fullmatch(name)}
  _refuse_versions(found, folders)
  said |= _splits_of_dicts(found, folders, said)
  if not found.is_file and not said and (readme := next((f for f in found.files if f.relative == README), None)):
    said |= _on_the_hub(found, readme)
  left = {} if found.is_file else leftovers(found)
  return {name: Place(why=LEFT) if one == LEFT else Place(one) for name, one in left.items()} | said


def _saved(place: str, folder: str, files: dict[str, Found]) -> dict[str, Place]:
  where = f"state.json of data.path={place!r}"
  entries = _field(where, os.path.join(place, "state.json"), "_data_files", list, "save the dataset again")
  names = [file_name(where, entry.get("filename") if isinstance(entry, dict) else None) for entry in entries]
  return _members(where, folder, files, names, "arrow")


def _tfds(folder: str, files: dict[str, Found]) -> dict[str, Place]:
  said = {}
  for name in files:
    matched = TFDS.fullmatch(name)
    form = matched["form"] if matched else ""
    said[_join(folder, name)] = Place(form, matched["split"]) if matched else Place(why=NO_MEMBER)
  return said


def _indexed(place: str, folder: str, files: dict[str, Found]) -> dict[str, Place]:
  path = os.path.join(place, "index.json")
  where = f"index.json of data.path={place!r}"
  index = _json(path)
  if isinstance(index, dict) and {"chunks", "config"} <= index.keys():
    return {_join(folder, name): Place("litdata") for name in files if name.endswith(".bin")}
  shards = index.get("shards") if isinstance(index, dict) else None
  if (
    not isinstance(shards, list)
    or not shards
    or not all(isinstance(shard, dict) and "format" in shard for shard in shards)
  ):
    return {}
  names = []
  for shard in shards:
    if shard["format"] != "mds":
      raise ConfigError(
        f"{where} lists shards of mosaicml-streaming in the form {shard['format']!r}, of which only 'mds' is read; "
        "write them again with MDSWriter"
      )
    choices = [shard[key]["basename"] for key in ("raw_data", "zip_data") if isinstance(shard.get(key), dict)]
    if all(
      isinstance(name, str) and "/" in name for name in choices
    ):  # merged from the folders below, which have their own
      return {}
    names.append(next((name for name in choices if file_name(where, name) in files), choices[0]))
  return _members(where, folder, files, names, "mds")


def _members(where: str, folder: str, files: dict[str, Found], names: list[str], kind: str) -> dict[str, Place]:
  """The files with these names as those of a data set, and all others of the folder as not."""
  if lacking := next((name for name in names if name not in files), None):
    raise ConfigError(f"{where} names the file {lacking!r}, which is not there; fetch or write the data again")
  members = set(names)
  return {_join(folder, name): Place(kind) if name in members else Place(why=NO_MEMBER) for name in files}


def _refuse_versions(found: Survey, folders: dict[str, dict[str, Found]]) -> None:
  """Raises ConfigError for several versions of a data set, which hold the same rows."""
  versions: dict[str, list[str]] = {}
  for folder, files in folders.items():
    if "dataset_info.json" in files and "state.json" not in files and (matched := VERSION.fullmatch(folder)):
      versions.setdefault(matched["data"], []).append(folder)
  if several := next((some for some in versions.values() if len(some) > 1), None):
    raise ConfigError(
      f"{found.said} holds several versions of a data set, {several[0]!r} and {several[1]!r}; name the folder of one"
    )


def _splits_of_dicts(found: Survey, folders: Any, said: dict[str, Place]) -> dict[str, Place]:
  """The files of saved DatasetDicts, each with the name of its split."""
  with_splits: dict[str, Place] = {}
  for folder, files in folders.items():
    if "dataset_dict.json" not in files:
      continue
    place = os.path.join(found.root, folder)
    where = f"dataset_dict.json of data.path={place!r}"
    path = os.path.join(place, "dataset_dict.json")
    splits = _field(where, path, "splits", list, "save the dataset again")
    if not any(isinstance(split, str) and places.split_of(split) == places.TRAIN for split in splits):
      raise ConfigError(
        f"data.path={place!r} has no split 'train', only {', '.join(map(str, splits))}; use the folder of one"
      )
    for split in splits:
      below = _join(folder, file_name(where, split)) + "/"
      for relative, one in said.items():
        if relative.startswith(below) and one.kind:
          with_splits[relative] = dataclasses.replace(one, split=split)
  return with_splits


def _on_the_hub(found: Survey, readme: Found) -> dict[str, Place]:
  """What the README.md says about the rows; without rows, about the text."""
  forms = {file.relative: KINDS[file.kind].form for file in found.files if file is not readme}
  form = ROWS if ROWS in forms.values() else TEXT
  names = [name for name, own in forms.items() if own == form]
  card = places.card(readme.path, found.said, names) if names else None
  if not card:
    return {}
  other = Place(why=f"not in the config {card.config!r} of README.md")
  chosen = {name: card.split(name) for name in names}
  beside = {README: other} if form == TEXT else {}
  return beside | {name: Place(split=split) if split else other for name, split in chosen.items()}


def _join(folder: str, name: str) -> str:
  return f"{folder}/{name}" if folder else name


def _field(where: str, path: str, name: str, kind: type, fix: str) -> Any:
  """A field of a JSON file."""
  content = _json(path)
  value = content.get(name) if isinstance(content, dict) else None
  if not isinstance(value, kind):
    raise ConfigError(f"{where} has no {kind.__name__} {name!r}; {fix}")
  return value


def _json(path: str) -> Any:
  try:
    return described(path)
  except (OSError, ValueError):
    return None
