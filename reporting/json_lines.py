"""Files of JSON lines, such as metrics.jsonl: read whole, from their end, or on from where a reader has come to."""

import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from runtime.storage.bucket import Location

TAIL, BLOCK = 1 << 16, 1 << 20  # bytes read at a time: from the end of a file, and of all of it


def objects(lines: Iterable[bytes]) -> list[dict]:
  """The JSON objects among lines, without what is damaged."""
  found = []
  for line in lines:
    with contextlib.suppress(ValueError, RecursionError):
      found.append(json.loads(line))
  return [one for one in found if isinstance(one, dict)]


def opened(path: Location) -> BinaryIO:
  """A file, open to read. One that is missing is empty, and so is a pipe or a device, which may never end."""
  if isinstance(path, Path):
    return path.open("rb") if path.is_file() else io.BytesIO()
  return io.BytesIO(path.read_bytes() if path.exists() else b"")


def lines_of(path: Location) -> list[bytes]:
  """The lines of a file; none if there is no file."""
  with opened(path) as file:
    return file.read().splitlines()


def backwards(path: Path) -> Iterator[tuple[int, bytes]]:
  """The lines of a file from the last to the first, each with its position. Reads no more than it is asked for."""
  with opened(path) as file:
    at, rest = file.seek(0, io.SEEK_END), b""
    while at:
      size = min(TAIL, at)
      at = file.seek(at - size)
      rest, *lines = (file.read(size) + rest).split(b"\n")
      position = at + len(rest) + 1 + sum(len(line) + 1 for line in lines)
      for line in reversed(lines):
        position -= len(line) + 1
        yield position, line
    yield 0, rest


def onwards(file: BinaryIO, start: int) -> Iterator[bytes]:
  """The lines of a file from a position on, many at a time. The last line is left out if it is not whole."""
  file.seek(start)
  rest = b""
  while block := file.read(BLOCK):
    if end := block.rfind(b"\n") + 1:
      yield rest + block[:end]
      rest = b""
    rest += block[end:]
  if objects([rest]):  # whole, though no end of a line follows
    yield rest
