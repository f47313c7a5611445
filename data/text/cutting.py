"""Cuts a document into pieces of bounded size, so that its tokens are those of the whole document.

Each piece comes with the text before it, its context. The tokens of a piece are those of context and piece together,
without those of the context alone. So what a tokenizer puts before a text, such as a space, is put before documents
only.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from errors import ConfigError

PIECE = 1 << 14  # bytes; a longer document is cut into pieces of one to two times this size, if it has good places
LONGEST = 64  # times longer is a piece, at most
WIDE = 2  # times longer are the pieces that a tokenizer gets, so that it compares fewer cuts
CONTEXT = 64  # bytes on both sides of a cut that are compared, at least
TRIES = 32  # places that are tried, of each kind
# Where a text may be cut, the best first, and what is then on both sides. Most tokenizers split a text into words, and
# tokenize each by itself. A word may begin with a space, end with ends of lines, or contain an apostrophe, but contains
# no such border. In bytes, \S is also any byte of a character that is not ASCII.
BORDERS = tuple(
  (re.compile(border), re.compile(both))
  for border, both in (
    (rb"[!-~](?= )", rb"[!-~] "),
    (rb"\S\n(?=\S)", rb"\n\S"),
    (rb"[0-9A-Za-z](?=[!-&(-/:-@\[-`{-~])", rb"[0-9A-Za-z][!-&(-/:-@\[-`{-~]"),
  )
)
SPACES = str.maketrans({"▁": " ", "Ġ": " ", "Ċ": "\n"})  # how tokenizers write them
Encode = Callable[[list[bytes]], list[np.ndarray]]


class Part(NamedTuple):
  """A piece of a document.

  Attributes:
    text: of the piece.
    context: the text before it that is encoded with it; b"" at the beginning of the document.
    next_context: that of the next piece; None if this is the last.
  """

  text: bytes
  context: bytes
  next_context: bytes | None


@dataclasses.dataclass(frozen=True)
class Cutter:
  """Cuts documents for one tokenizer.

  Attributes:
    encode: that of the tokenizer; None where any cut will do, as for tokens that are bytes.
    borders: the places that no token goes across.
    nearby: bytes on both sides of a cut that are compared; no token is longer.
    from_left: whether tokens depend on what follows only as far as `nearby`. So words may be cut, too.
    wide: pieces have one to two times so many times PIECE.
  """

  encode: Encode | None = None
  borders: tuple[re.Pattern[bytes], ...] = tuple(border for border, _ in BORDERS)
  nearby: int = 0
  from_left: bool = True
  wide: int = 1

  def cut(self, blocks: Iterable[bytes], context: bytes = b"") -> Iterator[Part]:
    """Cuts a document, or the rest of one after `context`, that comes in blocks. Their size does not matter.

    Raises ConfigError where it finds no place for a cut that does not change the tokens.
    """
    text, at, size = b"", 0, self.wide * PIECE
    for block in blocks:
      text, at = text[at:] + block, 0
      while len(text) - at > 2 * size + self.nearby:  # so the blocks do not affect the result
        if (found := self._border(text, at, size, context)) is None:
          size *= 2
          if size > LONGEST * PIECE:
            raise _no_border(text[at : at + size])
          continue
        end, next_context = found
        yield Part(text[at:end], context, next_context)
        at, context, size = end, next_context, self.wide * PIECE
    if at < len(text):
      yield Part(text[at:], context, None)

  def _border(self, text: bytes, start: int, size: int, context: bytes) -> tuple[int, bytes] | None:
    """Where the piece that begins at `start` ends, and the context of the next one. None if it must be longer."""
    first, limit = start + size, start + 2 * size
    for border in self.borders:
      for found in itertools.islice(border.finditer(text, first, limit), TRIES):
        before = text[max(start, found.end() - self.nearby) : found.end()]
        if self._is_invisible(before, text, found.end()):
          return found.end(), before
    # Within a word, all that is before matters: threes of digits are counted from the first.
    for end in range(limit, max(first, limit - TRIES), -1) if self.from_left else ():
      piece = text[start:end]
      if limit - end < 3 and text[end] & 0b1100_0000 == 0b1000_0000:  # within a character of UTF-8
        continue
      if self._is_invisible(context + piece, text, end) and self._is_invisible(piece, text, end):
        return end, piece if self.encode else b""
    return None

  def _is_invisible(self, before: bytes, text: bytes, end: int) -> bool:
    """Whether the tokens of `before`, which ends at `end` of a text, are the same with what follows."""
    if self.encode is None:
      return True
    alone, both = self.encode([before, before + text[end : end + self.nearby]])
    return np.array_equal(alone, both[: len(alone)])


def _no_border(text: bytes) -> ConfigError:
  return ConfigError(
    f"data.path has a text that data.tokenizer cannot take in pieces: after {text[:16].decode(errors='replace')!r}, it "
    f"has no border of words in {len(text)} bytes; add spaces or ends of lines there, or remove it"
  )


def cutter_of(encode: Encode, vocabulary: Iterable[str], from_left: bool) -> Cutter:
  """The cutter for a tokenizer with this vocabulary, as it is written in a tokenizer.json."""
  words = "\t".join(vocabulary).translate(SPACES).encode()
  borders = tuple(border for border, both in BORDERS if not both.search(words))
  return Cutter(encode, borders, max(CONTEXT, *map(len, words.split(b"\t"))), from_left, WIDE)
