"""JSON that is not a row a line: an array of objects, or objects one after another, each over any number of lines.

pandas (`to_json(orient="records")`) and the data sets of many instruction-tuning projects are such arrays; `jq` writes
objects one after another. RFC 8259 is the grammar. A file is never in memory as a whole: a scanner finds where an
object ends by its strings and brackets, and `json` reads this object.

An offset is a byte of the decompressed text, just after an object.
"""

import re
from typing import BinaryIO

from data.opening import BUFFER, opened, skip
from data.text.files import TextFile
from data.text.rows.fields import Fields, Read
from data.text.rows.json_lines import row_in
from errors import ConfigError
from limits import too_large

SPACE, BYTE_ORDER = b" \t\r\n", b"\xef\xbb\xbf"
TOKEN = re.compile(rb'[{}\[\]]|"[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)  # a bracket, or a string and whether it ends


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on, with `before` rows before that."""
  with opened(file.path, file.compression) as (text, raw):
    here = _Scanner(text)
    is_array = here.begins_array()
    here.go_to(offset)
    number, first = before + 1, before == 0
    while mark := here.next():
      where = f"element {number} of {file.path!r}"
      if is_array and mark == b"]":
        here.at += 1
        if here.next():
          raise ConfigError(
            f"{file.path!r} in data.path goes on after the end of its JSON array, after element {number - 1}; remove "
            "that, or write the file again"
          )
        return
      if is_array and not first:
        if mark != b",":
          raise ConfigError(f"{where} in data.path has no comma before it; correct it, or write the file again")
        here.at += 1
        mark = here.next()
      if mark != b"{":
        found = "is missing" if mark in (b"", b"]") else "is not a JSON object"
        raise ConfigError(f'{where} in data.path {found}; use an array of objects such as {{"{fields.text}": "..."}}')
      if (encoded := here.take(fields.limit)) is None:
        if len(here.data) - here.at > fields.limit:
          raise too_large(f"{where} in data.path", None, fields.limit)
        raise ConfigError(f"{where} in data.path is not complete; fetch or write the file again")
      yield row_in(encoded, fields, where), here.offset, raw.tell()
      number, first = number + 1, False
    if is_array:
      raise ConfigError(
        f"{file.path!r} in data.path is not complete: its JSON array has no end after element {number - 1}; fetch or "
        "write it again"
      )


class _Scanner:
  """Goes through a text. `data` is a part of it, of which all before `at` has been used."""

  def __init__(self, text: BinaryIO):
    self._text, self._before = text, 0  # bytes before `data`
    self.data, self.at = b"", 0

  @property
  def offset(self) -> int:
    return self._before + self.at

  def _more(self) -> bool:
    """Reads on, and drops what has been used. A long object is read in ever larger steps."""
    self._before, self.data, self.at = self.offset, self.data[self.at :], 0
    block = self._text.read(max(BUFFER, len(self.data)))
    self.data += block
    return bool(block)

  def begins_array(self) -> bool:
    """Whether the text is an array. Goes to its first element."""
    while len(self.data) < len(BYTE_ORDER) and self._more():
      pass
    self.at = len(BYTE_ORDER) if self.data.startswith(BYTE_ORDER) else 0
    is_array = self.next() == b"["
    self.at += is_array
    return is_array

  def go_to(self, offset: int) -> None:
    """Goes on to a byte of the text; stays where it is for one that it has passed."""
    while self.offset < offset:
      if offset - self._before <= len(self.data):
        self.at = offset - self._before
      else:
        skip(self._text, offset - self._before - len(self.data))
        self._before, self.data, self.at = offset, b"", 0

  def next(self) -> bytes:
    """The next byte that is not a space, without using it; b"" at the end."""
    while True:
      rest = len(self.data[self.at : self.at + 64].lstrip(SPACE))
      if rest:
        self.at = min(self.at + 64, len(self.data)) - rest
        return self.data[self.at : self.at + 1]
      self.at = min(self.at + 64, len(self.data))
      if self.at == len(self.data) and not self._more():
        return b""

  def take(self, longest: int) -> bytes | None:
    """The object that begins here. None if it does not end, or is longer than that."""
    done = depth = 0  # bytes of the object that have been scanned, and brackets that are open
    while True:
      for token in TOKEN.finditer(self.data, self.at + done):
        byte = self.data[token.start()]
        if byte == 0x22:  # a quote
          if not token[1]:
            done = token.start() - self.at
            break
          continue
        depth += 1 if byte in b"{[" else -1
        if not depth:
          start, self.at = self.at, token.end()
          return self.data[start : self.at] if self.at - start <= longest else None
        done = token.end() - self.at
      if len(self.data) - self.at > longest or not self._more():
        return None
