"""Which files a text consists of, what is in them, and which part of each is for validation.

A file's name says what is in it: plain text, JSON lines, Parquet or Arrow. Plain text and JSON lines may be compressed.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from errors import ConfigError, file_name, inside

KINDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}  # all others are plain text
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
HELD_OUT = 20  # 1 in 20 files, or rows, is for validation; with few files of plain text 1 in 20 bytes of each
BUFFER = 1 << 20  # bytes read at a time
TRAIN, VALIDATION = 0, 1
DICTIONARY = "dataset_dict.json"  # in the folder of a saved DatasetDict


@dataclasses.dataclass(frozen=True, slots=True)  # there may be millions
class TextFile:
  """A file of a text, as it was when it was found.

  Attributes:
    path: where it is.
    root: the folder that contains all files of the text.
    size, changed: bytes on disk, and the time of the last change in ns.
    split: TRAIN or VALIDATION for the whole file; None to hold out a part of it.
  """

  path: str
  root: str
  size: int
  changed: int
  split: int | None = None

  @property
  def name(self) -> str:
    """Relative to the root, without the suffix of a compression."""
    return _name(self.path, self.root)

  @property
  def kind(self) -> str:
    """`plain`, `json`, `parquet` or `arrow`."""
    return kind_of(self.path)

  @property
  def compressed(self) -> bool:
    return self.path != plain_name(self.path)


Files = tuple[TextFile, ...]


def plain_name(name: str) -> str:
  """The name of a file without the suffix of its compression."""
  stem, suffix = os.path.splitext(name)
  return stem if suffix in COMPRESSIONS else name


def kind_of(name: str) -> str:
  """What is in a file with this name: `plain`, `json`, `parquet` or `arrow`."""
  return KINDS.get(os.path.splitext(plain_name(name))[1], "plain")


def find(path: str, validation_path: str = "") -> Files:
  """The files of a text, each with its split, in the order in which they are read.

  `path` is a file, a folder, several of these separated by commas, or empty for the standard library. In a folder,
  hidden files and files that are not text (with a zero byte in the first 8 KiB) are skipped.

  Raises ConfigError for a path that does not exist or holds no text.
  """
  found = _search(path, "data.path")
  if validation_path:
    held_out = _search(validation_path, "data.validation_path")
    own = [file for file in held_out if held_out[file] == VALIDATION]  # the validation split of a saved dataset
    found = {file: TRAIN for file, split in found.items() if split != VALIDATION}
    found |= dict.fromkeys(own or held_out, VALIDATION)
  root = _root(found)
  whole = [file for file, split in found.items() if split is None and kind_of(file) == "plain"]
  if len(whole) >= HELD_OUT:  # enough files to hold out whole ones
    # Chosen by relative name, so that moving the folder does not change the choice.
    by_hash = sorted(whole, key=lambda file: hashlib.sha256(_name(file, root).encode()).digest())
    found |= dict.fromkeys(whole, TRAIN) | dict.fromkeys(by_hash[: len(whole) // HELD_OUT], VALIDATION)
  files = []
  for file, split in found.items():
    stat = os.stat(file)
    files.append(TextFile(file, root, stat.st_size, stat.st_mtime_ns, split))
  return tuple(files)


def stamps(files: Files) -> list[tuple[str, str, int, int, int | None]]:
  """What identifies the content of files without reading them."""
  return [(os.path.abspath(file.path), file.name, file.size, file.changed, file.split) for file in files]


def check_unchanged(files: Files) -> None:
  """Raises ConfigError if a file is not as it was when it was found."""
  for file in files:
    stat = os.stat(file.path) if os.path.exists(file.path) else None
    if not stat or (stat.st_size, stat.st_mtime_ns) != (file.size, file.changed):
      raise ConfigError(f"{file.path!r} in data.path changed while it was read; run again when it changes no more")


def held_out(row: int) -> bool:
  """Whether a row of a table, or a line of JSON, is for validation. Rows are numbered over all files of a text."""
  return int.from_bytes(hashlib.sha256(b"%d" % row).digest()[:8], "big") % HELD_OUT == 0


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, Any]]:
  """The text in a file, decompressed, and the file on disk, of which `tell` says how much has been read.

  Raises OSError in mid-text if a compressed file is truncated or damaged.
  """
  if not (compression := COMPRESSIONS.get(os.path.splitext(path)[1])):
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw, BUFFER) as text:
      yield text, raw
    return
  import pyarrow as pa

  with pa.OSFile(path) as raw, pa.CompressedInputStream(raw, compression) as stream:
    yield io.BufferedReader(stream, BUFFER), raw


def skip(text: BinaryIO, count: int) -> None:
  """Goes on by `count` bytes. Raises OSError if there are not so many."""
  if text.seekable():
    text.seek(count, io.SEEK_CUR)
    return
  while count:
    if not (block := text.read(min(count, BUFFER))):
      raise OSError("it ends too early")
    count -= len(block)


Found = dict[str, int | None]  # files, and their splits if they are in a saved dataset


def _search(path: str, field: str) -> Found:
  """The files at `path`, in order."""
  if not path:
    return dict.fromkeys(sorted(_standard_library(), key=_order))
  found: Found = {}
  for name in filter(None, map(str.strip, path.split(","))):
    place = os.path.abspath(os.path.expanduser(name))
    if not os.path.exists(place):
      raise ConfigError(f"{field}={name!r} does not exist; use a text file, a folder, or several separated by commas")
    if os.path.isfile(place) and not _is_text(place):
      raise ConfigError(
        f"{field}={name!r} is not text (it holds zero bytes); use UTF-8 text, plain or as .gz or .zst, or for images a "
        "preset such as --config=configs/fsdp.py:images"
      )
    files = _files_in(place, f"{field}={name!r}") if os.path.isdir(place) else {place: None}
    if twice := next(iter(files.keys() & found.keys()), None):
      raise ConfigError(f"{field}={path!r} holds {twice!r} twice; name it once, or give it a weight in a mixture")
    found |= files
  if not any(os.path.getsize(file) for file in found):
    raise ConfigError(f"{field}={path!r} holds no text; use a file or folder with text")
  return {file: found[file] for file in sorted(found, key=_order)}


def _order(file: str) -> str:
  """Sorts files by folder, and a compressed file as if it were not."""
  return plain_name(file).replace("/", "\0")


def _standard_library() -> Iterator[str]:
  """The Python files, without the tests. Many systems package these separately; without them, all have the same."""
  skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
  for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
    folders[:] = set(folders) - skipped
    yield from (os.path.join(folder, file) for file in files if file.endswith(".py"))


def _files_in(root: str, said: str) -> Found:
  """The files below a folder that hold text. `said` names it in errors."""
  found: Found = {}
  for folder, folders, names in os.walk(root):
    folders[:] = [name for name in folders if not name.startswith(".")]
    files = [os.path.join(folder, name) for name in names if not name.startswith(".") and name != DICTIONARY]
    if {"dataset_info.json", "state.json"} <= set(names):  # Dataset.save_to_disk of Hugging Face's `datasets` wrote it
      saved = _saved_in(folder)
      found |= dict.fromkeys(saved) if folder == root else _with_split(folder, saved)
    else:
      found |= dict.fromkeys(file for file in files if os.path.isfile(file) and _is_text(file))
  return {inside(said, root, file): split for file, split in found.items()}


def _saved_in(folder: str) -> list[str]:
  """The files that the state.json of a saved dataset names."""
  where = f"state.json of data.path={folder!r}"
  files = _json(where, os.path.join(folder, "state.json"), "_data_files")
  names = [file.get("filename") if isinstance(file, dict) else None for file in files]
  return [os.path.join(folder, file_name(where, name)) for name in names]


def _json(where: str, file: str, field: str) -> list[Any]:
  """The list in this field of a JSON file."""
  try:
    with open(file, encoding="utf-8") as opened_file:
      found = json.load(opened_file)[field]
  except (ValueError, KeyError, TypeError):
    found = None
  if not isinstance(found, list):
    raise ConfigError(f"{where} has no list {field!r}; save the dataset again")
  return found


def _with_split(folder: str, files: list[str]) -> Found:
  """The files of a saved dataset, which may be one split of a saved DatasetDict. {} for a split that is not used."""
  parent, name = os.path.split(folder)
  if not os.path.exists(os.path.join(parent, DICTIONARY)):
    return dict.fromkeys(files)
  splits = _json(f"{DICTIONARY} of data.path={parent!r}", os.path.join(parent, DICTIONARY), "splits")
  if "train" not in splits:
    raise ConfigError(f"data.path={parent!r} has no split 'train', only {', '.join(splits)}; use the folder of one")
  held_out = next((split for split in ("validation", "test") if split in splits), None)
  if name == "train":
    return dict.fromkeys(files, TRAIN if held_out else None)
  return dict.fromkeys(files, VALIDATION) if name == held_out else {}


def _is_text(file: str) -> bool:
  if kind_of(file) in ("parquet", "arrow"):
    return True
  try:
    with opened(file) as (text, _):
      return b"\0" not in text.read(8192)
  except OSError:
    return True  # reading it reports what is wrong


def _name(file: str, root: str) -> str:
  return plain_name(file.removeprefix(root).lstrip("/"))


def _root(files: Iterable[str]) -> str:
  """The folder that contains all files."""
  return os.path.commonpath({os.path.dirname(file) for file in files})
