"""Opens a file as a stream of its text: plain, or decompressed in bounded memory.

- gzip: by pyarrow, which is the fastest.
- zstd: by `zstandard`, with windows up to 2 GiB, as `zstd --long=31` writes.
- xz and bz2: by the standard library.

A file may hold several streams (frames of zstd, members of gzip) one after another; all are read. A file that is cut
off anywhere raises OSError, even if what was decompressed so far looks whole.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from errors import ConfigError

BUFFER = 1 << 20  # bytes read at a time
INPUT = 1 << 17  # compressed bytes read at a time
WINDOW = 1 << 31  # bytes that zstd may look back, at most: as much as its own program allows
TOO_EARLY = "it ends too early"
MAGIC = 0xFD2FB528  # begins a frame of zstd; frames to skip begin with other numbers


@contextlib.contextmanager
def opened(path: str, compression: str = "") -> Iterator[tuple[BinaryIO, Any]]:
  """The text in a file, decompressed, and the file on disk, of which `tell` says how much has been read.

  Raises OSError in mid-text if a compressed file is truncated or damaged.
  """
  if compression == "gzip":
    import pyarrow as pa

    with pa.OSFile(path) as raw, pa.CompressedInputStream(raw, "gzip") as stream:
      yield io.BufferedReader(stream, BUFFER), raw
    return
  with open(path, "rb", buffering=0) as raw:
    source = decompressed(raw, path, compression) if compression else raw
    with io.BufferedReader(source, BUFFER) as text:
      yield text, raw


def decompressed(raw: io.FileIO, path: str, compression: str) -> Any:
  """The text in a compressed file, which is open at its beginning, as a raw stream."""
  if compression == "gzip":
    return gzip.GzipFile(fileobj=raw)
  if compression == "zstd":
    return _Decompressed(_zstd(path, raw))
  if compression == "xz":
    return _Decompressed(_streams(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padded=True))
  return _Decompressed(_streams(raw, bz2.BZ2Decompressor, padded=False))


def skip(text: BinaryIO, count: int) -> None:
  """Goes on by `count` bytes. Raises OSError if there are not so many."""
  if text.seekable():
    text.seek(count, io.SEEK_CUR)
    return
  while count:
    if not (block := text.read(min(count, BUFFER))):
      raise OSError(TOO_EARLY)
    count -= len(block)


class _Decompressed(io.RawIOBase):
  """A file that is read by a function, which fills a buffer and returns how many bytes it has put there."""

  def __init__(self, fill: Callable[[memoryview], int]):
    self._fill = fill

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    return self._fill(memoryview(buffer).cast("B"))


def _zstd(path: str, raw: io.FileIO) -> Callable[[memoryview], int]:
  import zstandard

  by = zstandard.ZstdDecompressor(max_window_size=WINDOW)
  stream = by.stream_reader(raw, read_size=INPUT, read_across_frames=True)

  def fill(buffer: memoryview) -> int:
    try:
      if count := stream.readinto(buffer):
        return count
    except zstandard.ZstdError as error:
      if "memory" not in str(error):
        raise OSError(str(error)) from error
      raise ConfigError(
        f"{path!r} in data.path is compressed with a window of more than {WINDOW >> 30} GiB, or more than this machine "
        f"has memory for; decompress it first with `zstd -d --long=31 {shlex.quote(path)}`"
      ) from error
    _check_last_frame(path)  # the reader ends without a word where the file does
    return 0

  return fill


def _check_last_frame(path: str) -> None:
  """Raises OSError unless a file that zstandard has read ends where a frame does.

  Goes from block to block by their sizes (RFC 8878, section 3.1), which is quick. The reader has checked the blocks.
  """
  with open(path, "rb", buffering=1 << 12) as file:

    def number(length: int) -> int:
      if len(found := file.read(length)) < length:
        raise OSError(TOO_EARLY)
      return int.from_bytes(found, "little")

    size = os.fstat(file.fileno()).st_size
    while file.tell() < size:
      if number(4) != MAGIC:
        file.seek(number(4), io.SEEK_CUR)  # a frame to skip
        continue
      flags = number(1)
      single = flags >> 5 & 1
      file.seek((1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6], io.SEEK_CUR)
      last = 0
      while not last:
        block = number(3)
        last, kind, length = block & 1, block >> 1 & 3, block >> 3
        file.seek(1 if kind == 1 else length, io.SEEK_CUR)  # 1: one byte, repeated
      file.seek(4 * (flags >> 2 & 1), io.SEEK_CUR)  # the checksum
    if file.tell() > size:
      raise OSError(TOO_EARLY)


def _streams(raw: io.FileIO, new: Callable[[], Any], padded: bool) -> Callable[[memoryview], int]:
  """Decompresses streams one after another. With `padded`, zeros may follow a stream, as the format of xz allows."""
  by, data = None, b""

  def fill(buffer: memoryview) -> int:
    nonlocal by, data
    while True:
      if by is None or by.eof:
        data = by.unused_data if by else b""
        if padded:
          while not (data := data.lstrip(b"\0")) and (more := raw.read(INPUT)):
            data = more
        if not (data := data or raw.read(INPUT) or b""):
          return 0
        by = new()
      elif by.needs_input and not data and not (data := raw.read(INPUT) or b""):
        raise OSError(TOO_EARLY)
      try:
        found = by.decompress(data, len(buffer))
      except lzma.LZMAError as error:
        raise OSError(str(error)) from error
      data = b""
      if found:
        buffer[: len(found)] = found
        return len(found)

  return fill
