"""Reads the documents of a text, in pieces of bounded size, from any position on.

A file of plain text is one document; if its end is held out, that is a second one. Each row of a table, and each line
of JSON, is a document (rows.py). Where a document is cut into pieces depends on its content and its tokenizer only
(cutting.py).
"""

import functools
from collections.abc import Generator, Iterator
from typing import BinaryIO, NamedTuple

from data.text.cutting import Cutter
from data.text.files import (
  BUFFER,
  HELD_OUT,
  TRAIN,
  VALIDATION,
  Files,
  TextFile,
  check_unchanged,
  held_out,
  opened,
  skip,
)
from data.text.rows import Fields, rows
from errors import ConfigError, first_line


class Position(NamedTuple):
  """How far a text has been read.

  Attributes:
    file: the number of the file.
    offset: bytes of this file, decompressed, that have been read; of a table, rows.
    rows: rows of this file that have been read. Blank lines count.
    before: rows of all files before this one.
    context: bytes before the offset that are the context of the next piece (cutting.py).
  """

  file: int = 0
  offset: int = 0
  rows: int = 0
  before: int = 0
  context: int = 0


class Piece(NamedTuple):
  """A part of a document.

  Attributes:
    text: UTF-8, unless the file is not.
    split: TRAIN or VALIDATION.
    last: whether the document ends here.
    position: after this piece; None in the middle of a row, where reading cannot begin.
    done: bytes on disk, of all files, that have been read so far.
    label: the class of the document, if classes are read.
    context: the text before it that is encoded with it (cutting.py).
    is_prompt: whether this is a prompt, which is never cut. The document goes on with its completion.
  """

  text: bytes
  split: int
  last: bool
  position: Position | None
  done: int
  label: int | str | None = None
  context: bytes = b""
  is_prompt: bool = False


def read(files: Files, fields: Fields, start: Position | None = None, cutter: Cutter | None = None) -> Iterator[Piece]:
  """The pieces of all documents in the files, in order, from a position on. Raises ConfigError if one is damaged.

  Without the cutter of a tokenizer, documents are cut anywhere.
  """
  position = start or Position()
  done = sum(file.size for file in files[: position.file])
  for file in files[position.file :]:
    pieces = _plain_pieces if file.kind == "plain" else _row_pieces
    try:
      count = yield from pieces(file, fields, position, done, cutter or Cutter())
    except (OSError, ValueError) as error:
      if isinstance(error, ConfigError):
        raise
      check_unchanged((file,))
      raise ConfigError(
        f"{file.path!r} in data.path cannot be read ({first_line(error)}); fetch or write it again"
      ) from error
    done += file.size
    position = Position(position.file + 1, before=position.before + count)


@functools.cache
def held_out_from(file: TextFile) -> int:
  """Where the part of a file of plain text that is for validation begins: at its last twentieth.

  If an end of a line is near before that, the part begins after it. A compressed file must be read to know its size.
  """
  size = file.size
  if file.compressed:
    with opened(file.path) as (text, _):
      size = sum(len(block) for block in iter(lambda: text.read(BUFFER), b""))
  target, found = size - size // HELD_OUT, 0
  at = target - size // 100
  with opened(file.path) as (text, _):
    skip(text, at)
    for block in _blocks(text, target - at):
      found = at + block.rfind(b"\n") + 1 if b"\n" in block else found
      at += len(block)
    while not found and (byte := text.read(1)) and byte[0] & 0b1100_0000 == 0b1000_0000:  # within a character
      target += 1
  return found or target


def _blocks(text: BinaryIO, size: int | None) -> Iterator[bytes]:
  """The next `size` bytes of a text, or all that are left."""
  while block := text.read(BUFFER if size is None else min(BUFFER, size)):
    yield block
    size = None if size is None else size - len(block)


Pieces = Generator[Piece, None, int]  # returns how many rows the file has


def _plain_pieces(file: TextFile, fields: Fields, start: Position, done: int, cutter: Cutter) -> Pieces:
  """Yields the pieces of a file that is a document, or two with the end for validation."""
  if fields.label is not None or fields.prompt is not None:
    missing = "classes" if fields.prompt is None else f"prompts, but data.prompt_field={fields.prompt!r}"
    raise ConfigError(
      f"{file.path!r} in data.path is plain text, which has no {missing}; use JSON lines (.jsonl), Parquet, or a "
      "saved Hugging Face dataset"
    )
  parts: list[tuple[int, int | None]] = [(file.split or TRAIN, None)]
  if file.split is None:
    parts = [(TRAIN, held_out_from(file)), (VALIDATION, None)]
  offset = start.offset
  with opened(file.path) as (text, raw):
    skip(text, offset - start.context)
    context = text.read(start.context)
    for split, end in parts:
      if end is not None and end <= offset:
        continue
      for part in cutter.cut(_blocks(text, None if end is None else end - offset), context):
        offset, context = offset + len(part.text), part.next_context or b""
        position = start._replace(offset=offset, context=len(context))
        last = part.next_context is None
        yield Piece(part.text, split, last, position, done + raw.tell(), context=part.context)
  return 0


def _row_pieces(file: TextFile, fields: Fields, start: Position, done: int, cutter: Cutter) -> Pieces:
  """Yields the pieces of each row."""
  count = start.rows
  for row in rows(file, fields, start.offset, start.rows):
    split = file.split
    if split is None:
      split = VALIDATION if held_out(start.before + count) else TRAIN
    count += 1
    position = start._replace(offset=row.offset, rows=count)
    if row.prompt is not None:
      yield Piece(row.prompt, split, False, None, done + row.done, is_prompt=True)
    for part in cutter.cut([row.text or b""]):
      last = part.next_context is None
      yield Piece(part.text, split, last, position if last else None, done + row.done, row.label, part.context)
    if row.text == b"" and fields.label is not None:  # only classes make an empty text useful
      yield Piece(row.text, split, True, position, done + row.done, row.label)
  return count
