"""What the compressed batches of an Arrow file become in memory, which the batches say before they are decompressed.

Messages are flatbuffers (arrow.apache.org/docs/format/Columnar.html, and format/Message.fbs and File.fbs of Arrow). A
compressed buffer begins with its size when it is decompressed, int64.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

MAGIC, MARK = b"ARROW1", b"\xff\xff\xff\xff"
DICTIONARY, BATCH = 2, 3  # the types of messages with a body
LONGEST = 1 << 26  # bytes of a message without its body


def sizes(file: BinaryIO) -> Iterator[tuple[int, int]]:
  """Of each compressed batch, and dictionary, the bytes in memory and in the file. Raises ValueError if damaged."""
  try:
    if file.read(len(MAGIC)) == MAGIC:
      for block in _blocks(file):
        yield from _of_message(file, block)[0]
      return
    at: int | None = 0
    while at is not None:
      found, at = _of_message(file, at)
      yield from found
  except (struct.error, IndexError) as error:
    raise ValueError("a message is damaged") from error


def _of_message(file: BinaryIO, at: int) -> tuple[list[tuple[int, int]], int | None]:
  """The sizes of the batch in the message that begins at a byte, if there is one, and where the next one begins."""
  file.seek(at)
  mark = file.read(4)
  mark, start = (file.read(4), at + 8) if mark == MARK else (mark, at + 4)  # without it before 2019
  if len(mark) < 4 or not (length := struct.unpack("<i", mark)[0]):
    return [], None
  if not 0 < length <= LONGEST:
    raise ValueError("a message is damaged")
  data, body = file.read(length), start + length
  root = _Table(data, struct.unpack_from("<I", data)[0])
  kind, size = root.number(1, "B"), root.number(3, "q")
  batch = root.table(2)
  if kind == DICTIONARY and batch:
    batch = batch.table(1)
  found = []
  if kind in (DICTIONARY, BATCH) and batch and batch.table(3):
    unpacked = 0
    for offset, length in batch.structs(2, "<qq"):
      if length >= 8:
        file.seek(body + offset)
        claimed = struct.unpack("<q", file.read(8))[0]
        unpacked += length if claimed < 0 else claimed
    found = [(unpacked, size)]
  if size < 0:
    raise ValueError("a message is damaged")
  return found, body + size


def _blocks(file: BinaryIO) -> list[int]:
  """Where the dictionaries and batches of a file are, by its footer."""
  end = file.seek(0, 2) - len(MAGIC) - 4
  file.seek(end)
  length = struct.unpack("<i", file.read(4))[0]
  if not 0 < length <= min(end, LONGEST):
    raise ValueError("its footer is damaged")
  file.seek(end - length)
  data = file.read(length)
  footer = _Table(data, struct.unpack_from("<I", data)[0])
  return [block[0] for name in (2, 3) for block in footer.structs(name, "<qixxxxq")]


class _Table:
  """A table of a flatbuffer, which begins at a byte."""

  def __init__(self, data: bytes, at: int):
    self._data, self._at = data, at
    self._places = at - struct.unpack_from("<i", data, at)[0]
    if self._places < 0:
      raise ValueError("a message is damaged")

  def _place(self, name: int) -> int:
    """Where a field is; 0 if it is left out."""
    size, at = struct.unpack_from("<H", self._data, self._places)[0], 4 + 2 * name
    offset = struct.unpack_from("<H", self._data, self._places + at)[0] if at < size else 0
    return self._at + offset if offset else 0

  def _behind(self, name: int) -> int:
    """Where that is to which a field points; 0 if the field is left out."""
    place = self._place(name)
    return place + struct.unpack_from("<I", self._data, place)[0] if place else 0

  def number(self, name: int, form: str) -> int:
    place = self._place(name)
    return struct.unpack_from("<" + form, self._data, place)[0] if place else 0

  def table(self, name: int) -> "_Table | None":
    place = self._behind(name)
    return _Table(self._data, place) if place else None

  def structs(self, name: int, form: str) -> list[tuple[int, ...]]:
    """The structs in a vector."""
    if not (place := self._behind(name)):
      return []
    count, size = struct.unpack_from("<I", self._data, place)[0], struct.calcsize(form)
    return list(struct.iter_unpack(form, self._data[place + 4 :][: count * size]))
