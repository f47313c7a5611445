"""Reads the documents of a text, in pieces of bounded size, from any position on.

A file of plain text is one document; if its end is held out, that is a second one. Each row of a table, and each line
of JSON, is a document (rows.py). Where a document is cut into pieces depends on its content and its tokenizer only
(cutting.py).
"""

import functools
from collections.abc import Generator, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from data.opening import BUFFER, opened, skip
from data.text.chat import Chat
from data.text.cutting import Cutter
from data.text.files import HELD_OUT, TRAIN, VALIDATION, Files, TextFile, check_unchanged, held_out
from data.text.rows import Fields, rows
from data.text.spans import Document
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
    ids: the token ids of a document that comes as such, which is never cut; `text` is then b"".
    document: with prompts or dialogues, the whole document in spans. It is never cut.
    file: the number of its file.
    wrong: what is wrong with a bad row, which is skipped; the piece is then empty.
  """

  text: bytes
  split: int
  last: bool
  position: Position | None
  done: int
  label: int | str | None = None
  context: bytes = b""
  ids: np.ndarray | None = None
  document: Document | None = None
  file: int = 0
  wrong: str | None = None


def read(
  files: Files,
  fields: Fields,
  start: Position | None = None,
  cutter: Cutter | None = None,
  chat: Chat | None = None,
) -> Iterator[Piece]:
  """The pieces of all documents in the files, in order, from a position on. Raises ConfigError if one is damaged.

  Without the cutter of a tokenizer, documents are cut anywhere. Dialogues need its chat template.
  """
  position = start or Position()
  done = sum(file.size for file in files[: position.file])
  for file in files[position.file :]:
    cut = cutter or Cutter()
    try:
      if file.kind == "plain":
        count = yield from _plain_pieces(file, fields, position, done, cut)
      else:
        count = yield from _row_pieces(file, fields, position, done, cut, chat)
    except Exception as error:
      of_file = isinstance(error, OSError | ValueError | MemoryError) or type(error).__module__.startswith("pyarrow")
      if isinstance(error, ConfigError) or not of_file:
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
  if file.compression:
    with opened(file.path, file.compression) as (text, _):
      size = sum(len(block) for block in iter(lambda: text.read(BUFFER), b""))
  target, found = size - size // HELD_OUT, 0
  at = target - size // 100
  with opened(file.path, file.compression) as (text, _):
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
  if fields.label is not None or fields.in_spans:
    given = ", ".join(f"{option}={name!r}" for option, name in fields.options.items())
    missing = (
      f"such fields, but {given}" if fields.messages else f"prompts, but {given}" if fields.prompt else "classes"
    )
    raise ConfigError(
      f"{file.path!r} in data.path is plain text, which has no {missing}; use JSON lines (.jsonl), Parquet, or a "
      "saved Hugging Face dataset"
    )
  parts: list[tuple[int, int | None]] = [(file.split or TRAIN, None)]
  if file.split is None:
    parts = [(TRAIN, held_out_from(file)), (VALIDATION, None)]
  offset = start.offset
  with opened(file.path, file.compression) as (text, raw):
    skip(text, offset - start.context)
    context = text.read(start.context)
    for split, end in parts:
      if end is not None and end <= offset:
        continue
      for part in cutter.cut(_blocks(text, None if end is None else end - offset), context):
        offset, context = offset + len(part.text), part.next_context or b""
        position = start._replace(offset=offset, context=len(context))
        last = part.next_context is None
        yield Piece(part.text, split, last, position, done + raw.tell(), context=part.context, file=start.file)
  return 0


def _row_pieces(
  file: TextFile, fields: Fields, start: Position, done: int, cutter: Cutter, chat: Chat | None
) -> Pieces:
  """Yields the pieces of each row."""
  count = start.rows
  for row in rows(file, fields, start.offset, start.rows, chat):
    split = file.split
    if split is None:
      split = VALIDATION if held_out(start.before + count) else TRAIN
    count += 1
    position = start._replace(offset=row.offset, rows=count)
    if row.wrong is not None:
      yield Piece(b"", split, True, position, done + row.done, file=start.file, wrong=row.wrong)
      continue
    if row.ids is not None:
      if len(row.ids):
        yield Piece(b"", split, True, position, done + row.done, ids=row.ids)
      continue
    if row.document is not None:
      text, own = row.document.text, row.document
      yield Piece(text, split, True, position, done + row.done, row.label, document=own, file=start.file)
      continue
    for part in cutter.cut([row.text or b""]):
      last = part.next_context is None
      after = position if last else None
      yield Piece(part.text, split, last, after, done + row.done, row.label, part.context, file=start.file)
    if row.text == b"" and fields.label is not None:  # only classes make an empty text useful
      yield Piece(row.text, split, True, position, done + row.done, row.label)
  return count
