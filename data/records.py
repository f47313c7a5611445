"""What the records of an array_record file become in memory, which its chunks say before they are decompressed.

The file is one of Riegeli (google/riegeli, doc/riegeli_records_file_format.md): chunks in a row, with a block header of
24 bytes at each 64 KiB, which may be amid a chunk. A chunk begins with a header, all numbers little endian uint64: a
hash, the size of its data, another hash, its type and how many records it has, and the size of these.
"""

import os
import struct
from typing import BinaryIO

import limits

BLOCK, BLOCK_HEADER = 1 << 16, 24
ROOM = BLOCK - BLOCK_HEADER  # bytes of a block without its header
CHUNK = struct.Struct("<8xQ8xB7sQ")
RECORDS = ord("r")  # the type of chunks with records; others have none
AT_A_TIME = 2  # times the limit of a row may records that are read together have; a few copies of them are held


def largest(path: str, limit: int) -> int:
  """The bytes of the largest chunk, decompressed; 0 if there is none. The library holds a chunk whole.

  Raises ConfigError if one is too large for a limit of a row, and OSError if the file cannot be read.
  """
  found = at = number = 0
  with open(path, "rb") as file:
    end = os.fstat(file.fileno()).st_size
    while len(header := _read(file, at, CHUNK.size)) == CHUNK.size:
      packed, kind, count, size = CHUNK.unpack(header)
      number += 1
      at = min(end, _behind(at, CHUNK.size + packed, int.from_bytes(count, "little")))
      if kind != RECORDS:
        continue
      limits.check(f"chunk {number} of {path!r}, decompressed,", size, limits.BATCH * limit)
      limits.check(f"chunk {number} of {path!r}", int.from_bytes(count, "little"), limit, "records")
      found = max(found, size)
  return found


def at_a_time(usual: int, largest: int, limit: int) -> int:
  """How many records to read at a time: as many as usual, unless they might together be too large."""
  return max(1, min(usual, AT_A_TIME * limit // largest)) if largest else usual


def _behind(at: int, size: int, count: int) -> int:
  """Where the next chunk begins, after one of this size. It takes at least a byte of the file for each record."""
  block, offset = divmod(at, ROOM)
  block, offset = divmod(block * BLOCK + (offset and BLOCK_HEADER + offset) + count, BLOCK)
  return max(at + size, block * ROOM + (offset and max(1, offset - BLOCK_HEADER)))


def _read(file: BinaryIO, at: int, count: int) -> bytes:
  """Bytes from a position that does not count the headers of blocks; fewer at the end."""
  parts = b""
  while len(parts) < count:
    block, offset = divmod(at + len(parts), ROOM)
    file.seek(block * BLOCK + BLOCK_HEADER + offset)
    if not (found := file.read(min(count - len(parts), ROOM - offset))):
      break
    parts += found
  return parts
