"""Reads the documents of a text, in pieces of bounded size, from any position on.

A file of plain text is one document; if its end is held out, that is a second one. Each row of a table, and each line
of JSON, is a document (rows.py). Where a document is cut into pieces depends on its content only.
"""

import functools
import re
from collections.abc import Generator, Iterable, Iterator
from typing import BinaryIO, NamedTuple

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

PIECE = 1 << 14  # bytes; a longer document is cut into pieces of one to two times this size
# Where a text may be cut, the best first. In bytes, \S is also any byte of a character that is not ASCII.
BEFORE_SPACE = re.compile(rb"[!-~](?= )")
AFTER_LINE = re.compile(rb"\S\n(?=\S)")
BEFORE_PUNCTUATION = re.compile(rb"[0-9A-Za-z](?=[!-&(-/:-@\[-`{-~])")  # but no apostrophe


class Position(NamedTuple):
  """How far a text has been read.

  Attributes:
    file: the number of the file.
    offset: bytes of this file, decompressed, that have been read; of a table, rows.
    rows: rows of this file that have been read. Blank lines count.
    before: rows of all files before this one.
  """

  file: int = 0
  offset: int = 0
  rows: int = 0
  before: int = 0


class Piece(NamedTuple):
  """A part of a document.

  Attributes:
    text: UTF-8, unless the file is not.
    split: TRAIN or VALIDATION.
    last: whether the document ends here.
    position: after this piece; None in the middle of a row, where reading cannot begin.
    done: bytes on disk, of all files, that have been read so far.
    label: the class of the document, if classes are read.
    is_prompt: whether this is a prompt, which is never cut. The document goes on with its completion.
  """

  text: bytes
  split: int
  last: bool
  position: Position | None
  done: int
  label: int | str | None = None
  is_prompt: bool = False


def read(files: Files, fields: Fields, start: Position | None = None) -> Iterator[Piece]:
  """The pieces of all documents in the files, in order, from a position on. Raises ConfigError if one is damaged."""
  position = start or Position()
  done = sum(file.size for file in files[: position.file])
  for file in files[position.file :]:
    pieces = _plain_pieces if file.kind == "plain" else _row_pieces
    try:
      count = yield from pieces(file, fields, position, done)
    except (OSError, ValueError) as error:
      if isinstance(error, ConfigError):
        raise
      check_unchanged((file,))
      raise ConfigError(
        f"{file.path!r} in data.path cannot be read ({first_line(error)}); fetch or write it again"
      ) from error
    done += file.size
    position = Position(position.file + 1, before=position.before + count)


def cut(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
  """Cuts a document that comes in blocks into pieces. Yields each, and whether it is the last."""
  text, at = b"", 0
  for block in blocks:
    text, at = text[at:] + block, 0
    while len(text) - at > 2 * PIECE + 4:  # so the blocks do not affect the result
      end = _border(text, at)
      yield text[at:end], False
      at = end
  if at < len(text):
    yield text[at:], True


def _border(text: bytes, start: int) -> int:
  """Where the piece that begins at `start` ends.

  Tokenizers split a text into words first, and tokenize each by itself. A word of theirs may begin with a space, end
  with ends of lines, or contain an apostrophe. None goes across the three kinds of borders above, so a cut there does
  not change the tokens. A text that has none of them for long is cut anywhere between two characters.
  """
  first, limit = start + PIECE, start + 2 * PIECE
  for border in (BEFORE_SPACE, AFTER_LINE, BEFORE_PUNCTUATION):
    for found in border.finditer(text, first, limit):
      end = found.end()
      if border is not AFTER_LINE or not (_is_space(text[end - 5 : end - 1], -1) or _is_space(text[end : end + 4], 0)):
        return end
  return limit - next((back for back in range(4) if not _continues(text[limit - back])), 0)


def _is_space(nearby: bytes, which: int) -> bool:
  """Whether the first, or the last, character among these bytes is whitespace."""
  return nearby.decode(errors="ignore")[which:][:1].isspace()


def _continues(byte: int) -> bool:
  """Whether a byte of UTF-8 is within a character, not at its beginning."""
  return byte & 0b1100_0000 == 0b1000_0000


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
    while not found and (byte := text.read(1)) and _continues(byte[0]):
      target += 1
  return found or target


def _blocks(text: BinaryIO, size: int | None) -> Iterator[bytes]:
  """The next `size` bytes of a text, or all that are left."""
  while block := text.read(BUFFER if size is None else min(BUFFER, size)):
    yield block
    size = None if size is None else size - len(block)


def _plain_pieces(file: TextFile, fields: Fields, start: Position, done: int) -> Generator[Piece, None, int]:
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
    skip(text, offset)
    for split, end in parts:
      for piece, last in cut(_blocks(text, None if end is None else max(0, end - offset))):
        offset += len(piece)
        yield Piece(piece, split, last, start._replace(offset=offset), done + raw.tell())
  return 0


def _row_pieces(file: TextFile, fields: Fields, start: Position, done: int) -> Generator[Piece, None, int]:
  """Yields the pieces of each row. Returns how many rows the file has."""
  count = start.rows
  for row in rows(file, fields, start.offset, start.rows):
    split = file.split
    if split is None:
      split = VALIDATION if held_out(start.before + count) else TRAIN
    count += 1
    position = start._replace(offset=row.offset, rows=count)
    if row.prompt is not None:
      yield Piece(row.prompt, split, False, None, done + row.done, is_prompt=True)
    if row.text and len(row.text) > PIECE:
      for piece, last in cut([row.text]):
        yield Piece(piece, split, last, position if last else None, done + row.done, row.label)
    elif row.text or (row.text is not None and fields.label is not None):  # only classes make an empty text useful
      yield Piece(row.text, split, True, position, done + row.done, row.label)
  return count
