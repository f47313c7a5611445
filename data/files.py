"""Arrays in files, read by position.

Small files are mapped into memory, which is the fastest. But the pages of a mapped file that were read count as memory
of the process. So the files of a process are mapped only up to MAPPED bytes in all. The others are read by system
calls, and stay in the system's cache of files as long as that has room.
"""

import dataclasses
import functools
import io
import mmap
import os
import resource
import threading
import weakref
from pathlib import Path

import numpy as np

from errors import ConfigError

MAPPED = 192 << 20  # bytes of all mapped files; enough for CIFAR-10


class _Room:
  """Counts the bytes of mapped files."""

  def __init__(self) -> None:
    self._lock, self._used = threading.Lock(), 0

  def take(self, size: int) -> bool:
    """Whether there is room for so many more bytes; if so, they are counted."""
    with self._lock:
      fits = self._used + size <= MAPPED
      self._used += size if fits else 0
    return fits

  def give_back(self, size: int) -> None:
    with self._lock:
      self._used -= size


_room = _Room()


@dataclasses.dataclass(frozen=True)
class ArrayFile:
  """`count` numbers of type `dtype` in a file, from byte `offset` on. Several threads may read at the same time."""

  path: Path
  dtype: np.dtype
  count: int
  offset: int = 0

  def __len__(self) -> int:
    return self.count

  def read(self, starts: np.ndarray, length: int) -> np.ndarray:
    """A copy of the `length` numbers from each of the positions `starts` [N] on, as an array [N, length]."""
    if not len(starts) or not length:
      return np.empty((len(starts), length), self.dtype)
    file, numbers = self._opened
    size_now = file.size() if isinstance(file, mmap.mmap) else file.seek(0, io.SEEK_END)
    if size_now < self.offset + self.count * self.dtype.itemsize:  # the system kills a process that reads a map there
      raise ConfigError(
        f"{str(self.path)!r} has become shorter while it was read; leave the data as it is during a run"
      )
    if numbers is not None:
      shape, strides = (self.count - length + 1, length), 2 * numbers.strides
      return np.lib.stride_tricks.as_strided(numbers, shape, strides, writeable=False)[starts]
    size, places = length * self.dtype.itemsize, self.offset + starts * self.dtype.itemsize
    assert isinstance(file, io.FileIO)
    pread, descriptor = os.pread, file.fileno()
    rows = b"".join([pread(descriptor, size, place) for place in places.tolist()])
    return np.frombuffer(rows, self.dtype).reshape(len(starts), length)

  def slice(self, start: int, stop: int) -> np.ndarray:
    """A copy of the numbers from `start` up to `stop`."""
    return self.read(np.array([start]), stop - start)[0]

  @functools.cached_property
  def _opened(self) -> tuple[io.FileIO | mmap.mmap, np.ndarray | None]:
    """The open file; or the mapped one, and its numbers."""
    file, size = io.FileIO(self.path), self.count * self.dtype.itemsize
    if not size or not _room.take(size):
      return file, None
    weakref.finalize(self, _room.give_back, size)
    with file:
      mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapped, np.frombuffer(mapped, self.dtype, self.count, self.offset)


def array_file(path: Path, dtype: np.dtype | type | str, offset: int = 0) -> ArrayFile:
  """The numbers from byte `offset` to the end of a file."""
  kind = np.dtype(dtype)
  return ArrayFile(path, kind, (path.stat().st_size - offset) // kind.itemsize, offset)


@dataclasses.dataclass(frozen=True)
class Joined:
  """The numbers of several files in a row, of one type, read as if they were one. There is at least one file."""

  files: tuple[ArrayFile, ...]

  def __post_init__(self) -> None:
    """Lets the process open all files at the same time; many systems allow 1,024 until it asks for more."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(self.files) + 512
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
      resource.setrlimit(
        resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
      )

  @property
  def dtype(self) -> np.dtype:
    return self.files[0].dtype

  def __len__(self) -> int:
    return int(self._stops[-1])

  def read(self, starts: np.ndarray, length: int) -> np.ndarray:
    """As `ArrayFile.read`."""
    found = np.empty((len(starts), length), self.dtype)
    first = np.searchsorted(self._stops, starts, side="right")
    last = np.searchsorted(self._stops, starts + max(0, length - 1), side="right")
    for number in np.unique(first[first == last]).tolist():
      rows = (first == number) & (last == number)
      found[rows] = self.files[number].read(starts[rows] - self._start(number), length)
    for row in np.flatnonzero(first != last).tolist():  # across a border of files
      found[row] = self.slice(int(starts[row]), int(starts[row]) + length)
    return found

  def slice(self, start: int, stop: int) -> np.ndarray:
    """As `ArrayFile.slice`."""
    parts = [np.empty(0, self.dtype)]
    for number in range(int(np.searchsorted(self._stops, start, side="right")), len(self.files)):
      before, file = self._start(number), self.files[number]
      if before >= stop:
        break
      parts.append(file.slice(max(0, start - before), min(stop - before, len(file))))
    return np.concatenate(parts)

  def _start(self, number: int) -> int:
    return int(self._stops[number]) - len(self.files[number])

  @functools.cached_property
  def _stops(self) -> np.ndarray:
    """The position just after each file."""
    return np.cumsum([len(file) for file in self.files])


Numbers = ArrayFile | Joined
