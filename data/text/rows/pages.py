"""What the pages of a column of Parquet become in memory, which only the headers of the pages say.

The library makes room for a page by its header, in Thrift's compact protocol (apache/thrift,
doc/specs/thrift-compact-protocol.md; apache/parquet-format, parquet.thrift). Where the pages begin is in the footer. It
is read here, too: the library makes a thousand bytes of an entry of four, and ends the process for some damaged ones.
"""

import dataclasses
from typing import Any, BinaryIO, NamedTuple

import limits

COLUMNS = 1 << 18  # of a schema and in all groups of rows; the library needs 1 to 2 kB for each
HEAD = 1 << 12  # bytes in which a header is looked for; with long statistics it has more
LONGEST = 1 << 24  # bytes of a header
DICTIONARY, DELTAS = 2, 7  # the type of a page; the encoding in which each value may repeat the one before it
# Types of fields in Thrift; smaller ones are integers.
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
DEEPEST = 16  # structs within structs


@dataclasses.dataclass
class Pages:
  """The pages of a column in a group of rows.

  Attributes:
    largest, packed: bytes of the page that is the largest, and what it has in the file.
    repeated: bytes of the largest page whose values may stand for many rows.
    values: how many values the pages say they have.
    size: bytes of all pages.
  """

  largest: int = 0
  packed: int = 0
  repeated: int = 0
  values: int = 0
  size: int = 0


class Chunk(NamedTuple):
  """Where the pages of a column in a group of rows are, as its metadata says. 0: there is no dictionary."""

  data_page_offset: int
  dictionary_page_offset: int
  total_compressed_size: int


class Group(NamedTuple):
  """A group of rows."""

  num_rows: int
  total_byte_size: int
  columns: list[Chunk]


# What is read of a footer, by the numbers of its fields: the elements of its schema are counted alone.
FOOTER: dict[int, Any] = {2: [{}], 4: [{1: [{3: {7: 0, 9: 0, 11: 0}}], 2: 0, 3: 0}]}


def groups_of(file: BinaryIO) -> list[Group]:
  """The groups of rows, by the footer of a file. Raises ValueError or OSError if it is damaged or too large."""
  end = file.seek(0, 2) - 8
  file.seek(max(0, end))
  length = int.from_bytes(file.read(4), "little")
  if not 0 < length <= min(end, limits.DESCRIPTION):
    raise ValueError(f"its footer has {limits.megabytes(length)}")
  file.seek(end - length)
  data = file.read(length)
  try:
    footer, _ = _chosen(data, 0, STRUCT, FOOTER, [COLUMNS])
    return [
      Group(group[3], group[2], [Chunk(one[3][9], one[3].get(11, 0), one[3][7]) for one in group[1]])
      for group in footer[4]
    ]
  except (IndexError, KeyError, RecursionError) as error:
    raise ValueError("its footer is damaged") from error


def _chosen(data: bytes, at: int, kind: int, wanted: Any, room: list[int], depth: int = 0) -> tuple[Any, int]:
  """The wanted part of a value that begins at a byte, and where it ends. Makes nothing of the rest, which may be much.

  `room`: how many elements the lists of structs may still have.
  """
  if kind == STRUCT and isinstance(wanted, dict):
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
      number, inner, at = _field(data, at, number)
      if number in wanted:
        fields[number], at = _chosen(data, at, inner, wanted[number], room, depth + 1)
      else:
        at = _after(data, at, inner, depth)
    return fields, at + 1
  if kind == LIST and isinstance(wanted, list):
    count, inner, at = _list(data, at)
    if count and inner != STRUCT:
      raise ValueError("its footer is damaged")
    found = []
    for _ in range(count):
      one, at = _chosen(data, at, inner, wanted[0], room, depth + 1)
      found.append(one)
      room[0] -= 1
      if room[0] < 0:
        raise ValueError(f"its footer has more than {COLUMNS:,} columns and groups of rows")
    return found, at
  if wanted == 0 and BYTE < kind < DOUBLE:
    return _integer(data, at)
  raise ValueError("its footer is damaged")


def pages_of(file: BinaryIO, column: Any) -> Pages:
  """The pages of a column, whose metadata in its group is `column`. Raises ValueError or OSError for damaged ones."""
  starts = [column.data_page_offset, *([column.dictionary_page_offset] if column.dictionary_page_offset else [])]
  at, found = min(starts), Pages()
  end = at + column.total_compressed_size
  while at < end:
    header, length = _header(file, at)
    size, packed, kind = header.get(2, 0), header.get(3, 0), header.get(1, 0)
    if not isinstance(size, int) or not isinstance(packed, int) or size < 0 or packed < 0:
      raise ValueError("the header of a page is damaged")
    own: dict[int, Any] = next((header[name] for name in (5, 7, 8) if isinstance(header.get(name), dict)), {})
    values, encoding = own.get(1, 0), own.get(4 if 8 in header else 2, 0)
    if not isinstance(values, int):
      raise ValueError("the header of a page is damaged")
    if size > found.largest:
      found.largest, found.packed = size, packed
    if kind == DICTIONARY or encoding == DELTAS:
      found.repeated = max(found.repeated, size if kind == DICTIONARY else 2 * size)  # the library copies deltas
    found.values += 0 if kind == DICTIONARY else values
    found.size += size
    at += length + packed
  return found


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
  """The fields of the header that begins at a byte of the file, and its length."""
  size = HEAD
  while True:
    file.seek(at)
    data = file.read(size)
    try:
      return _struct(data, 0, 0)
    except IndexError as error:
      if len(data) < size or size > LONGEST:
        raise ValueError("the header of a page is damaged") from error
      size *= 16


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
  """The fields of a struct by number, and where it ends. Raises IndexError if it does not end in the data."""
  if depth > DEEPEST:
    raise ValueError("the header of a page is damaged")
  fields: dict[int, Any] = {}
  number = 0
  while data[at]:
    number, kind, at = _field(data, at, number)
    fields[number], at = _value(data, at, kind, depth)
  return fields, at + 1


def _field(data: bytes, at: int, number: int) -> tuple[int, int, int]:
  """The number of the field that begins at a byte, its type, and where its value begins.

  `number`: that of the field before it; 0 for the first.
  """
  mark = data[at]
  if mark >> 4:
    return number + (mark >> 4), mark & 15, at + 1
  number, at = _integer(data, at + 1)
  return number, mark & 15, at


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
  if kind in (TRUE, FALSE):
    return kind == TRUE, at
  if kind == BYTE:
    return data[at], at + 1
  if kind < DOUBLE:
    return _integer(data, at)
  if kind == DOUBLE:
    return None, at + 8
  if kind == BINARY:
    length, at = _varint(data, at)
    return None, at + length
  if kind == STRUCT:
    return _struct(data, at, depth + 1)
  raise ValueError("the header of a page is damaged")  # no header of a page has lists


def _varint(data: bytes, at: int) -> tuple[int, int]:
  number = shift = 0
  while True:
    byte = data[at]
    number |= (byte & 127) << shift
    at, shift = at + 1, shift + 7
    if byte < 128:
      return number, at
    if shift > 63:
      raise ValueError("the header of a page is damaged")


def _integer(data: bytes, at: int) -> tuple[int, int]:
  number, at = _varint(data, at)
  return number >> 1 ^ -(number & 1), at


def _after(data: bytes, at: int, kind: int, depth: int) -> int:
  """Where a value of a type ends that begins there."""
  if kind in (TRUE, FALSE):
    return at
  if kind == BYTE:
    return at + 1
  if kind < DOUBLE:
    while data[at] > 127:
      at += 1
    return at + 1
  if kind == DOUBLE:
    return at + 8
  if kind == BINARY:
    length, at = _varint(data, at)
    return at + length
  if depth > DEEPEST:
    raise ValueError("its footer is damaged")
  if kind == STRUCT:
    while mark := data[at]:
      at = at + 1 if mark >> 4 else _integer(data, at + 1)[1]
      at = _after(data, at, mark & 15, depth + 1)
    return at + 1
  if kind in (LIST, SET):
    count, inner, at = _list(data, at)
    for _ in range(count):
      at = at + 1 if inner in (TRUE, FALSE) else _after(data, at, inner, depth + 1)
    return at
  raise ValueError("its footer is damaged")  # it has no maps


def _list(data: bytes, at: int) -> tuple[int, int, int]:
  """How many elements a list has, their type, and where they begin."""
  count, inner = data[at] >> 4, data[at] & 15
  at += 1
  if count == 15:
    count, at = _varint(data, at)
  if count > len(data) - at:  # an element has a byte or more
    raise ValueError("its footer is damaged")
  return count, inner, at
