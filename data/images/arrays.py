"""A NumPy file `.npz` with the arrays `image` and `label`. The images are read in parts, compressed or not."""

import contextlib
import dataclasses
import functools
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

import limits
from data.images.examples import TOGETHER_BYTES, Opened
from errors import ConfigError, first_line

NEEDED = "needs the arrays 'image' (uint8 [N, S, S], [N, S, S, 1] or [N, S, S, 3]) and 'label' (integers [N])"


@dataclasses.dataclass(frozen=True)
class Arrays:
  """An `.npz` file. Its classes are numbers and have no names."""

  path: Path
  said: str
  limit: int = limits.ROW

  def key(self) -> Any:
    stat = self.path.stat()
    return (str(self.path.resolve()), stat.st_size, stat.st_mtime_ns)

  def open(self) -> Opened:
    with self.readable(), zipfile.ZipFile(self.path) as archive:
      names = sorted(name.removesuffix(".npy") for name in archive.namelist())
    if not {"image", "label"} <= set(names):
      raise ConfigError(f"{self.said} {NEEDED}, but holds {', '.join(map(repr, names)) or 'none'}; rename them")
    with self.readable(), zipfile.ZipFile(self.path) as archive:
      with archive.open("label.npy") as file:
        of_labels, _, kind = _header(file)
      with archive.open("image.npy") as file:
        shape, fortran, dtype = _header(file)
        begin = file.tell()
    if dtype.kind == "f":
      raise ConfigError(
        f"{self.said} has images of type {dtype}; multiply them by 255 if white is 1, and convert them to uint8"
      )
    if dtype != np.uint8 or len(shape) not in (3, 4) or shape[3:] not in ((), (1,), (3,)):
      raise ConfigError(f"{self.said} {NEEDED}, but 'image' is {dtype}{list(shape)}; convert it")
    if kind.kind not in "iu" or of_labels != shape[:1]:
      raise ConfigError(
        f"{self.said} {NEEDED}, but 'label' is {kind}{list(of_labels)} and 'image' {dtype}{list(shape)}; convert it"
      )
    if fortran and shape[0] > 1:
      raise ConfigError(f"{self.said} has 'image' in Fortran order; save np.ascontiguousarray(image) instead")
    limits.check(f"'label' of {self.said}", 8 * shape[0], self.limit)
    limits.check(f"an image of {self.said}", math.prod(shape[1:]), self.limit)
    with self.readable(), zipfile.ZipFile(self.path) as archive, archive.open("label.npy") as file:
      labels = np.lib.format.read_array(file, allow_pickle=False)
    return Opened(Stacked(self, labels.astype(np.int64), shape, begin), None, 3 if shape[3:] == (3,) else 1)

  @contextlib.contextmanager
  def readable(self) -> Iterator[None]:
    """Raises ConfigError if the block fails to read the file."""
    try:
      yield
    except Exception as error:  # of many types, from the archive, its compression and the arrays
      raise ConfigError(
        f"{self.said} cannot be read as an .npz file ({first_line(error)}); save it again with np.savez"
      ) from error


@dataclasses.dataclass(frozen=True)
class Stacked:
  """The images of an `.npz` file, whose pixels begin at byte `begin` of their array's file."""

  arrays: Arrays
  labels: np.ndarray
  shape: tuple[int, ...]
  begin: int

  def encoded(self, start: int, stop: int) -> list[np.ndarray]:
    shape = self.shape[1:] if self.shape[3:] == (3,) else self.shape[1:3]  # Pillow's of one channel has no third
    size = math.prod(shape)
    with self.arrays.readable():
      self._file.seek(self.begin + start * size)
      pixels = np.frombuffer(self._file.read((stop - start) * size), np.uint8)
      return list(pixels.reshape(-1, *shape))

  @property
  def at_a_time(self) -> int:
    return max(1, TOGETHER_BYTES // max(1, math.prod(self.shape[1:])))

  def name(self, number: int) -> str:
    return str(number)

  def where(self, number: int) -> str:
    return f"{self.arrays.path}, image {number}"

  @functools.cached_property
  def _file(self) -> IO[bytes]:
    return zipfile.ZipFile(self.arrays.path).open("image.npy")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
  """Reads the header of an array: its shape, whether it is in Fortran order, and its dtype."""
  if np.lib.format.read_magic(file) == (1, 0):
    return np.lib.format.read_array_header_1_0(file)
  return np.lib.format.read_array_header_2_0(file)
