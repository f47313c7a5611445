"""All files at a path, and what is in each. A file is opened once; what was found is kept until the file changes."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.recognition.content import Content, look
from data.recognition.kinds import KINDS
from errors import ConfigError, expanded, inside
from runtime.storage import owners

VERSION = 2  # of what is kept; increase it when `look` finds other kinds
FOLDER = "recognised"  # in data.cache_dir
# Files that describe a data set. They are read where they matter (datasets.py), and are not looked at here.
DESCRIPTIONS = frozenset({
  "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "features.json", "index.json",
})  # fmt: skip


class Found(NamedTuple):  # there may be millions, and a tuple is made quickly
  """A file.

  Attributes:
    path: where it is, absolute.
    relative: the same from the folder that the user named; the file's name if that is a file.
    size, changed: bytes on disk, and the time of the last change in ns.
    kind, compression: what is in it (content.py).
  """

  path: str
  relative: str
  size: int
  changed: int
  kind: str
  compression: str = ""

  @property
  def folder(self) -> str:
    return self.relative.rpartition("/")[0]

  @property
  def name(self) -> str:
    return self.relative.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Survey:
  """What is at a path.

  Attributes:
    said: the field of the config and its value, for errors.
    root: the folder, or that of the file.
    files: in the order of their paths.
    hidden: names of hidden files and folders, which are left out.
    links: files that are symbolic links to others below the root, and where those are, as paths from there.
    is_file: whether the path is a file.
  """

  said: str
  root: str
  files: tuple[Found, ...]
  hidden: tuple[str, ...] = ()
  links: dict[str, str] = dataclasses.field(default_factory=dict)
  is_file: bool = False


def surveyed(path: str, said: str, cache_dir: str = "") -> Survey:
  """Looks at the file at an absolute path, or at all files below it. With a `cache_dir` it opens only new files.

  Raises ConfigError if a file cannot be read, or a symbolic link leads out of the folder.
  """
  is_file = not os.path.isdir(path)
  root = os.path.dirname(path) if is_file else path
  kept = _kept(cache_dir, path)
  files, hidden, links, known = list[Found](), list[str](), dict[str, str](), dict[str, Known]()
  try:
    for relative, stat in [(os.path.basename(path), os.stat(path))] if is_file else _walk(path, said, hidden, links):
      if stat is None:
        path_there = os.path.join(root, relative)
        kind = "folder_link" if os.path.isdir(path_there) else "broken_link"
        files.append(Found(path_there, relative, 0, 0, kind))
        continue
      size, changed = stat.st_size, stat.st_mtime_ns
      known[relative] = found = _content(root, relative, size, changed, kept)
      files.append(Found(f"{root}/{relative}", relative, *found))
  except OSError as error:
    raise ConfigError(
      f"{said} cannot be read: {error.filename!r} ({error.strerror}); make that readable, or take it out of the data"
    ) from error
  if known != kept:
    _keep(cache_dir, path, known)
  return Survey(said, root, tuple(files), tuple(hidden), links, is_file)


Known = tuple[int, int, str, str]  # size, time of change, kind and compression of a file


def _content(root: str, relative: str, size: int, changed: int, kept: dict[str, Known]) -> Known:
  before = kept.get(relative)
  if before and before[:2] == (size, changed):
    return before
  if relative.rpartition("/")[2] in DESCRIPTIONS:
    return (size, changed, *Content("metadata"))
  return (size, changed, *look(f"{root}/{relative}", size))


def _walk(
  root: str, said: str, hidden: list[str], links: dict[str, str]
) -> Iterator[tuple[str, os.stat_result | None]]:
  """The files below a folder, with their paths from there. Adds to the `hidden` ones, and to the `links`.

  Yields None for a link to a folder, which is not followed, and for one to a missing file.
  """
  folders = [""]
  while folders:
    folder = folders.pop()
    with os.scandir(os.path.join(root, folder)) as entries:
      for entry in entries:
        relative = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name.startswith("."):
          hidden.append(relative)
        elif entry.is_file(follow_symlinks=False):  # as most
          yield relative, entry.stat()
        elif entry.is_symlink():
          target = os.path.relpath(os.path.realpath(inside(said, root, entry.path)), os.path.realpath(root))
          if not target.startswith("../"):
            links[relative] = target
          yield relative, os.stat(entry.path) if os.path.isfile(entry.path) else None
        elif entry.is_dir():
          folders.append(relative)


def _file(cache_dir: str, path: str) -> Path:
  """Where it is kept. Raises OSError if this user has no folder to write to."""
  try:
    root = owners.place(expanded(cache_dir, "data.cache_dir"), "data.cache_dir").write
  except ConfigError:
    root = None
  if root is None:
    raise FileNotFoundError
  return root / FOLDER / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.json"


def _kept(cache_dir: str, path: str) -> dict[str, Known]:
  """What an earlier survey of this path has found."""
  if not cache_dir:
    return {}
  try:
    kept = json.loads(_file(cache_dir, path).read_text())
    if kept["version"] != [VERSION, path] or not set(kept["kinds"]) <= KINDS.keys():
      return {}
    columns = [kept[name] for name in ("sizes", "changed", "kinds", "compressions")]
    return dict(zip(kept["files"], zip(*columns, strict=True), strict=True))
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return {}  # it only saves time


def _keep(cache_dir: str, path: str, known: dict[str, Known]) -> None:
  if not cache_dir:
    return
  names = ("sizes", "changed", "kinds", "compressions")
  columns = dict(zip(names, zip(*known.values(), strict=True), strict=True)) if known else dict.fromkeys(names, ())
  with contextlib.suppress(OSError):  # the survey is right without it
    file = _file(cache_dir, path)
    unfinished = file.with_name(f".{file.name}-{os.getpid()}")
    file.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished.write_text(json.dumps({"version": [VERSION, path], "files": list(known), **columns}))
    unfinished.replace(file)
