"""What the records of an array_record file become in memory, which its chunks say before they are decompressed.

The file is one of Riegeli (google/riegeli, doc/riegeli_records_file_format.md): chunks in a row, with a block header of
24 bytes at each 64 KiB, which may be amid a chunk. A chunk begins with a header, all numbers little endian uint64: a
hash, the size of its data, another hash, its type and how many records it has, and the size of these.
"""

import collections
import os
import struct
from typing import BinaryIO

import limits

BLOCK, BLOCK_HEADER = 1 << 16, 24
ROOM = BLOCK - BLOCK_HEADER  # bytes of a block without its header
CHUNK = struct.Struct("<8xQ8xB7sQ")
RECORDS = ord("r")  # the type of chunks with records; others have none
AT_A_TIME = 2  # times the limit of a row may what is read together have; a few copies of it are held


def together(path: str, limit: int) -> int:
  """How many records may be read together, so that all chunks with any of them have at most AT_A_TIME times the limit.

  The library decompresses chunks whole. Raises ConfigError if one is too large for a limit of a row, and OSError if the
  file cannot be read.
  """
  most, at, number = limit, 0, 0
  window, bytes_, count_ = collections.deque[tuple[int, int]](), 0, 0  # the last chunks: bytes and records of each
  with open(path, "rb") as file:
    end = os.fstat(file.fileno()).st_size
    while len(header := _read(file, at, CHUNK.size)) == CHUNK.size:
      packed, kind, encoded, size = CHUNK.unpack(header)
      count, number = int.from_bytes(encoded, "little"), number + 1
      at = min(end, _behind(at, CHUNK.size + packed, count))
      if kind != RECORDS:
        continue
      limits.check(f"chunk {number} of {path!r}, decompressed,", size, limits.BATCH * limit)
      limits.check(f"chunk {number} of {path!r}", count, limit, "records")
      window.append((size, count))
      bytes_, count_ = bytes_ + size, count_ + count
      while bytes_ > AT_A_TIME * limit:
        first_size, first_count = window.popleft()
        bytes_, count_ = bytes_ - first_size, count_ - first_count
        # So many records in a row never have one of the first chunk and one of the last.
        most = min(most, max(1, count_ - count + 1 if window else 1))
  return most


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
