"""A folder in a host's memory: files of pieces, each complete or not there, with a checksum for each piece.

A portion is what one process keeps of a save, and is one file. It has the pieces' bytes, then an index as JSON, then a
footer. A file has the ending `.part` until it is complete. All processes of a host read all files there, and each
writes into a folder of its own.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from checkpointing.memory.pieces import Bounds, Piece

FOOTER = struct.Struct("<QI8s")  # the index's length and checksum, and MAGIC
MAGIC = b"meshwrt1"
ALIGNED = 64  # pieces begin at multiples of so many bytes
PART = ".part"
RUN = "run"  # in the folder of a host: the name of its run
CHUNK = 8 << 20  # bytes that are read or sent at a time


class Damaged(ValueError):
  """A file, or a piece in it, is not what was written."""


class Save(NamedTuple):
  """One save: all parts of the state after a step. `attempt` tells it from the save of the same step by an earlier job.

  Attributes:
    processes: how many have saved, each its own portion.
  """

  step: int
  attempt: str
  processes: int


class Portion(NamedTuple):
  """What one process has saved in a save."""

  of: Save
  owner: int

  @property
  def file(self) -> str:
    return f"{self.of.step}-{self.of.attempt}-{self.owner}-of-{self.of.processes}"


class Entry(NamedTuple):
  """Where a piece is in the file of its portion."""

  piece: Piece
  offset: int
  checksum: int


class Index(NamedTuple):
  """What a file holds, and the record of its checkpoint (checkpointing/record.py)."""

  entries: list[Entry]
  record: dict[str, Any]


def portion_of(file: str) -> Portion | None:
  """The portion that a file holds by its name; None if it is not a complete file of ours."""
  if not (found := re.fullmatch(r"(\d+)-([0-9a-f]+)-(\d+)-of-(\d+)", file)):
    return None
  step, attempt, owner, processes = found.groups()
  return Portion(Save(int(step), attempt, int(processes)), int(owner))


def layout(pieces: Sequence[Piece]) -> tuple[list[int], int]:
  """The offsets of pieces in a file, and the bytes of all."""
  offsets, end = [], 0
  for piece in pieces:
    offsets.append(end)
    end += -(-piece.bytes // ALIGNED) * ALIGNED
  return offsets, end


def make_private(folder: Path) -> None:
  """Makes a folder that only this user can read. Raises PermissionError if another user has made it before."""
  folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  found = folder.lstat()
  if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
    raise PermissionError(errno.EPERM, f"{folder} belongs to another user")
  folder.chmod(0o700)


class Growing:
  """A file that is being written. It has the ending `.part` until `finish`. A full memory raises OSError."""

  def __init__(self, path: Path, size: int):
    self.path, self.size = path, size
    part = path.with_name(path.name + PART)
    self.file = part.open("r+b" if part.exists() else "w+b", buffering=0)
    self.file.truncate(size)

  def put(self, offset: int, piece: np.ndarray) -> None:
    """Writes a piece."""
    self.write(offset, np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)

  def write(self, offset: int, data: bytes | memoryview) -> None:
    done, rest = 0, memoryview(data)
    while done < len(rest):
      done += os.pwrite(self.file.fileno(), rest[done:], offset + done)

  def checksum(self, offset: int, count: int) -> int:
    """That of some bytes, read a part at a time."""
    found, end = 0, offset + count
    while offset < end:
      if not (data := os.pread(self.file.fileno(), min(CHUNK, end - offset), offset)):
        raise Damaged("it is torn")
      found, offset = zlib.crc32(data, found), offset + len(data)
    return found

  def finish(self, tail: bytes = b"") -> None:
    """Adds the last bytes, and gives the file its name."""
    self.write(self.size, tail)
    self.file.close()
    Path(self.file.name).replace(self.path)

  def drop(self) -> None:
    self.file.close()
    Path(self.file.name).unlink(missing_ok=True)


def tail(entries: Sequence[Entry], record: dict[str, Any]) -> bytes:
  """The index and the footer of a file."""
  index = json.dumps({"entries": entries, "record": record}).encode()
  return index + FOOTER.pack(len(index), zlib.crc32(index), MAGIC)


class Store:
  """The files of this process, and those of others on its host.

  Args:
    host: the folder of this host. Only this user can read the one around it.
    process: the number of this process.
    run: names the run that this memory belongs to.
  """

  def __init__(self, host: Path, process: int, run: str = ""):
    self.host, self.own, self.run = host, host / str(process), run
    self._make()

  def _make(self) -> None:
    make_private(self.host.parent)
    self.own.mkdir(parents=True, exist_ok=True)
    (self.host / RUN).write_text(self.run)

  def portions(self) -> list[Portion]:
    """The portions that this host has, each once. Damaged files may be among them."""
    return sorted({portion for path in self._files() if (portion := portion_of(path.name))})

  def paths(self, portion: Portion) -> list[Path]:
    """The files of a portion: its owner's and a neighbour's, if both are on this host."""
    return [path for path in self._files() if path.name == portion.file]

  def create(self, portion: Portion, size: int) -> Growing:
    if not self.own.is_dir():  # somebody has tidied up
      self._make()
    return Growing(self.own / portion.file, size)

  def index(self, portion: Portion) -> tuple[Path, Index]:
    """A file of a portion whose index is whole, and this index. Raises Damaged if there is none."""
    why = "it is gone"
    for path in self.paths(portion):
      try:
        return path, read_index(path)
      except (OSError, Damaged) as error:
        why = str(error)
    raise Damaged(why)

  def read(self, portion: Portion, entry: Entry) -> bytes:
    """The bytes of a piece, checked. Raises Damaged if no file of the portion has them."""
    for path in self.paths(portion):
      with contextlib.suppress(OSError), path.open("rb") as file:
        if (found := _bytes(file, entry)) is not None:
          return found
    raise Damaged(f"{entry.piece.name} is not what was saved")

  def prune(self, keep: Collection[Save], others: Collection[int], following: Portion | None = None) -> None:
    """Removes this process's files but those of the saves to keep, finished or not. And those that nobody else removes.

    The file that this process will write next, `following`, gets the memory of one that goes, which is faster than new
    memory.

    Args:
      others: the other processes on this host, which remove their own files.
    """
    theirs = {str(process) for process in others}
    for path in self._files():
      portion = portion_of(path.name.removesuffix(PART))
      if path.parent.name in theirs or (portion and portion.of in keep):
        continue
      with contextlib.suppress(FileNotFoundError):  # another process removes those of nobody, too
        if portion and following and path.parent == self.own and portion.owner == following.owner:
          path.replace(self.own / (following.file + PART))
        else:
          path.unlink()

  def clear(self) -> None:
    """Removes the folder of this host."""
    shutil.rmtree(self.host, ignore_errors=True)
    with contextlib.suppress(OSError):
      self.host.parent.rmdir()  # unless other hosts are simulated there

  @property
  def bytes(self) -> int:
    """What this process's files need."""
    return sum(path.stat().st_size for path in self._files() if path.parent == self.own)

  def _files(self) -> Iterator[Path]:
    yield from sorted(self.host.glob("*/*"))


def read_index(path: Path) -> Index:
  """The index of a file. Raises Damaged if it is not whole."""
  return parsed(*index_of(path))


def index_of(path: Path) -> tuple[bytes, int]:
  """The bytes of a file's index, unchecked, and their checksum. Raises Damaged if the file is torn."""
  with path.open("rb") as file:
    size = file.seek(0, os.SEEK_END)
    if size < FOOTER.size:
      raise Damaged("it is torn")
    file.seek(size - FOOTER.size)
    length, checksum, magic = FOOTER.unpack(file.read(FOOTER.size))
    if magic != MAGIC or length > size - FOOTER.size:
      raise Damaged("it is torn")
    file.seek(size - FOOTER.size - length)
    return file.read(length), checksum


def parsed(index: bytes, checksum: int) -> Index:
  """An index that was read or received. Raises Damaged if it is not what was written."""
  if zlib.crc32(index) != checksum:
    raise Damaged("its index is not what was written")
  try:
    found = json.loads(index)
    entries = [
      Entry(Piece(name, _bounds(bounds), dtype), offset, crc) for (name, bounds, dtype), offset, crc in found["entries"]
    ]
    return Index(entries, found["record"])
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise Damaged("its index is not what is written") from error


def _bounds(found: list[list[int]]) -> Bounds:
  return tuple((start, stop) for start, stop in found)


def check(path: Path) -> None:
  """Raises Damaged unless a file holds what its index says."""
  with path.open("rb") as file:
    for entry in read_index(path).entries:
      if _bytes(file, entry) is None:
        raise Damaged(f"{entry.piece.name} is not what was sent")


def _bytes(file: IO[bytes], entry: Entry) -> bytes | None:
  """The bytes of a piece; None if they are not what was written."""
  file.seek(entry.offset)
  found = file.read(entry.piece.bytes)
  return found if len(found) == entry.piece.bytes and zlib.crc32(found) == entry.checksum else None
