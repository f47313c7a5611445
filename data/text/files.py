"""Which files a text consists of, and which part of each is for validation. data/recognition/ says what is in them."""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from data.recognition import TEXT, Verdict, Verdicts, places, validating
from data.recognition.content import plain_name
from data.recognition.verdicts import order
from errors import ConfigError

HELD_OUT = 20  # 1 in 20 files, or rows, is for validation; with few files of plain text 1 in 20 bytes of each
TRAIN, VALIDATION = 0, 1
NAMED = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}  # kinds, by suffix
SPLITS = {places.TRAIN: TRAIN, places.VALIDATION: VALIDATION, None: None}


@dataclasses.dataclass(frozen=True, slots=True)  # there may be millions
class TextFile:
  """A file of a text, as it was when it was found.

  Attributes:
    path: where it is.
    root: the folder that contains all files of the text.
    size, changed: bytes on disk, and the time of the last change in ns.
    split: TRAIN or VALIDATION for the whole file; None to hold out a part of it.
    kind: what is in it, such as `plain`, `json`, `parquet` or `arrow`.
    compression: `gzip`, `zstd`, `xz`, `bz2`, or "" if it is plain.
  """

  path: str
  root: str
  size: int
  changed: int
  split: int | None = None
  kind: str = "plain"
  compression: str = ""

  @property
  def name(self) -> str:
    """Relative to the root, without the suffix of a compression."""
    return _name(self.path, self.root)


Files = tuple[TextFile, ...]


def library(held_out: Verdicts | None = None) -> Files:
  """The files of the Python standard library. If some are `held_out`, those are validated on, and no others."""
  files = []
  for path in _standard_library():
    stat = os.stat(path)
    files.append(_File(path, stat.st_size, stat.st_mtime_ns))
  return _with_splits(files, held_out)


def files_of(verdicts: Iterable[Verdict], form: str, held_out: Verdicts | None = None) -> Files:
  """The files that are read, in this form and with these splits, in the order in which they are read.

  If some are `held_out`, those are validated on, and no others.
  """
  return _with_splits(_files(verdicts, form), held_out)


class _File(NamedTuple):
  """A file whose split is not final. There may be millions, and a tuple is made quickly."""

  path: str
  size: int
  changed: int
  split: int | None = None
  kind: str = "plain"
  compression: str = ""


def _files(verdicts: Iterable[Verdict], form: str) -> list[_File]:
  return [
    _File(
      file.path, file.size, file.changed, SPLITS[one.split], "plain" if form == TEXT else file.kind, file.compression
    )
    for one in verdicts
    if not one.why and (file := one.file)
  ]


def _with_splits(files: list[_File], held_out: Verdicts | None) -> Files:
  """The files in order. They are trained on, but for those of a validation split, or for all that is `held_out`."""
  if held_out:
    chosen = _files(validating(held_out), held_out.form)
    taken = {file.path for file in chosen}
    files = [file._replace(split=TRAIN) for file in files if file.split != VALIDATION and file.path not in taken]
    files = _ordered(files) + _ordered(chosen)
  else:
    files = _ordered(files)
  root = os.path.commonpath({os.path.dirname(file.path) for file in files})
  chosen_splits = _some_held_out(files, root)
  return tuple(
    TextFile(path, root, size, changed, chosen_splits.get(path, split), kind, compression)
    for path, size, changed, split, kind, compression in files
  )


def _ordered(files: list[_File]) -> list[_File]:
  return sorted(files, key=lambda file: order(file.path))


def _some_held_out(files: list[_File], root: str) -> dict[str, int]:
  """The splits of files of plain text that have none, if there are enough: one in HELD_OUT is to validate on."""
  whole = [file.path for file in files if file.split is None and file.kind == "plain"]
  if len(whole) < HELD_OUT:
    return {}
  # Chosen by relative name, so that moving the folder does not change the choice.
  by_hash = sorted(whole, key=lambda path: hashlib.sha256(_name(path, root).encode(errors="surrogateescape")).digest())
  return dict.fromkeys(whole, TRAIN) | dict.fromkeys(by_hash[: len(whole) // HELD_OUT], VALIDATION)


def stamps(files: Files) -> list[tuple[Any, ...]]:
  """What identifies the content of files without reading them. The kind is left out where the name says it."""
  return [
    (os.path.abspath(file.path), file.name, file.size, file.changed, file.split)
    + (() if file.kind == NAMED.get(os.path.splitext(file.name)[1], "plain") else (file.kind,))
    for file in files
  ]


def check_unchanged(files: Files) -> None:
  """Raises ConfigError if a file is not as it was when it was found."""
  for file in files:
    stat = os.stat(file.path) if os.path.exists(file.path) else None
    if not stat or (stat.st_size, stat.st_mtime_ns) != (file.size, file.changed):
      raise ConfigError(f"{file.path!r} in data.path changed while it was read; run again when it changes no more")


def held_out(row: int) -> bool:
  """Whether a row of a table, or a line of JSON, is for validation. Rows are numbered over all files of a text."""
  return int.from_bytes(hashlib.sha256(b"%d" % row).digest()[:8], "big") % HELD_OUT == 0


def _standard_library() -> Iterator[str]:
  """The Python files, without the tests. Many systems package these separately; without them, all have the same."""
  skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
  for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
    folders[:] = set(folders) - skipped
    yield from (os.path.join(folder, file) for file in files if file.endswith(".py"))


def _name(file: str, root: str) -> str:
  return plain_name(file.removeprefix(root).lstrip("/"))
