"""A folder with one subfolder for each class, or with subfolders for training and validation that are such folders."""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from data.images.decode import is_grey
from data.images.examples import TOGETHER, Form, Joined, Opened
from errors import ConfigError, inside

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")
TRAIN, VALIDATION = "train", ("validation", "val", "valid", "test")  # the first of those that exist is used
HEADERS = 256  # images whose headers are read at a time


def find(root: Path, said: str) -> Form:
  """The images in a folder."""
  names = _subfolders(root)
  splits = [name for name in VALIDATION if name in names]
  if TRAIN not in names or not _subfolders(root / TRAIN) or not (splits or len(names) == 1):
    return Folder(root, said)
  if others := set(names) - {TRAIN, *VALIDATION}:
    raise ConfigError(
      f"{said} has the subfolders {TRAIN!r} and {splits[0]!r}, but also {min(others)!r}; move that away, or set "
      f"data.path={str(root / TRAIN)!r} and data.validation_path={str(root / splits[0])!r}"
    )
  train, *validation = (Folder(Path(inside(said, root, root / name)), said) for name in (TRAIN, *splits[:1]))
  return Joined(train, *validation) if splits else train


@dataclasses.dataclass(frozen=True)
class Folder:
  """A folder with one subfolder for each class. Images may lie deeper in it. Hidden files are left out."""

  root: Path
  said: str

  def key(self) -> Any:
    digest = hashlib.sha256()
    for _, name in self._files():
      stat = os.stat(os.path.join(self.root, name))
      digest.update(b"%b\0%d\0%d\0" % (os.fsencode(name), stat.st_size, stat.st_mtime_ns))
    return (str(self.root.resolve()), tuple(_subfolders(self.root)), digest.hexdigest())

  def open(self) -> Opened:
    classes = _subfolders(self.root)
    if not classes:
      raise ConfigError(
        f"{self.said} has no subfolders in {str(self.root)!r}; put the images of each class into a subfolder that is "
        "named after the class"
      )
    names, labels, others = [], [], []
    for label, name in self._files():
      if _is_image(name):
        names.append(name)
        labels.append(label)
      else:
        others.append(name)
    counts = np.bincount(labels, minlength=len(classes)) if labels else np.zeros(len(classes))
    if not counts.all():
      empty = classes[int(counts.argmin())]
      raise ConfigError(
        f"{self.said} has no images of the class {empty!r}: {str(self.root / empty)!r} holds none of the files "
        f"*{', *'.join(SUFFIXES)}; add some or remove the folder"
      )
    more = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
    note = f"; not images: {others[0]!r}{more}" if others else ""
    files = Files(str(self.root), names, np.array(labels))
    return Opened(files, None, 1 if files.are_grey() else 3, tuple(classes), note)

  def _files(self) -> Iterator[tuple[int, str]]:
    """The number of its class and the name, relative to the root, of each file."""
    for label, name in enumerate(_subfolders(self.root)):
      for at, folders, files in os.walk(inside(self.said, self.root, self.root / name), onerror=_raise):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(f for f in files if not f.startswith(".")):
          yield label, os.path.relpath(inside(self.said, self.root, os.path.join(at, file)), self.root)


@dataclasses.dataclass(frozen=True)
class Files:
  """Image files, by their names relative to a root."""

  root: str
  names: list[str]
  labels: np.ndarray

  def encoded(self, start: int, stop: int) -> list[str]:
    return [os.path.join(self.root, name) for name in self.names[start:stop]]

  @property
  def at_a_time(self) -> int:
    return TOGETHER  # only paths

  def name(self, number: int) -> str:
    return self.names[number]

  def where(self, number: int) -> str:
    return os.path.join(self.root, self.names[number])

  def are_grey(self) -> bool:
    """Whether all images are grey. Reads headers until one is not."""
    starts = range(0, len(self.names), HEADERS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      parts = (self.encoded(start, start + HEADERS) for start in starts)
      return all(all(pool.map(is_grey, part, part)) for part in parts)


def _subfolders(folder: Path) -> list[str]:
  return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _is_image(name: str) -> bool:
  return os.path.splitext(name)[1].lower() in SUFFIXES


def _raise(error: OSError) -> NoReturn:
  raise error
