"""CSV and TSV: a header with the names of the columns, then a row of cells each (RFC 4180), read by Python's `csv`.

Cells may be in quotes and hold ends of lines. The cells of a `.tsv` are separated by tabs; those of a `.csv` by commas,
semicolons, tabs or bars, as its header shows. An offset is a byte of the decompressed text, just after a row; reading
that goes on there reads the header first.
"""

import csv
import itertools
from collections.abc import Iterator
from typing import Any, BinaryIO

from data.opening import BUFFER, opened, skip
from data.text.files import TextFile
from data.text.rows.fields import Fields, Read, Values, columns_of
from errors import ConfigError, first_line
from limits import FIELD, MB, megabytes

DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}
SHARE = 4  # of the limit of a row: `csv` keeps 4 bytes a character, and a longer row is a quote that does not end
BYTE_ORDER = b"\xef\xbb\xbf"


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on, with `before` rows before that."""
  csv.field_size_limit(
    max(csv.field_size_limit(), fields.limit // SHARE)
  )  # of all of Python; by default 131,072 characters
  with opened(file.path, file.compression) as (text, raw):
    lines = _Lines(text, fields.limit // SHARE)
    header, delimiter = _header(file, lines, fields)
    if not header:
      return
    columns = columns_of(fields, header, f"the header of {file.path!r}")
    for option, name in columns.items():
      if header.count(name) > 1:
        raise ConfigError(f"{option}={name!r} names {header.count(name)} columns of {file.path!r}; rename one of them")
    places = {option: header.index(name) for option, name in columns.items()}
    if offset > lines.offset:
      skip(text, offset - lines.offset)
      lines.offset = offset
    number, cells = before + 1, csv.reader(lines, delimiter=delimiter, strict=True)
    while (row := _next(file, cells, lines, number)) is not None:
      if not row:  # a blank line
        continue
      if len(row) != len(header):
        wrong = ConfigError(
          f"{_where(file, lines, number)} has {len(row)} cells, but the header has {len(header)}; put a cell that "
          f"holds {delimiter!r}, a quote or an end of a line in quotes, and double the quotes in it"
        )
        yield fields.bad(wrong), lines.offset, raw.tell()
        number += 1
        continue
      values: Values = {option: row[place] for option, place in places.items()}
      if fields.label is not None:
        values["data.label_field"] = _number(values["data.label_field"])
      yield values, lines.offset, raw.tell()
      number += 1


class _TooLong(csv.Error):
  """A row has more bytes than it may have. The message says what to do."""


class _Lines:
  """The lines of a text for `csv.reader`, which asks for those of one row only.

  Attributes:
    offset: the byte after the last line.
    start: the byte at which the present row begins.
  """

  def __init__(self, text: BinaryIO, longest: int):
    self._text, self._longest, self.offset, self.start = text, longest, 0, 0

  def __iter__(self) -> Iterator[str]:
    return self

  def __next__(self) -> str:
    line = self._text.readline(self._longest)
    self.offset += len(line)
    if self.offset - self.start >= self._longest:
      raise _TooLong(
        f"has more than {megabytes(self._longest)}, the limit with {FIELD}={self._longest * SHARE // MB}; close the "
        f"quotes that are open there, or set {FIELD} to a larger number"
      )
    if not line:
      raise StopIteration
    return (line if self.start else line.removeprefix(BYTE_ORDER)).decode()


def _header(file: TextFile, lines: _Lines, fields: Fields) -> tuple[list[str], str]:
  """The names of the columns, and what separates the cells. [] for a file without text."""
  first = _next(file, lines, lines, 0)
  if first is None:
    return [], ""
  found = {
    delimiter: _next(file, csv.reader([first], delimiter=delimiter), lines, 0) or []
    for delimiter in DELIMITERS[file.kind]
  }
  has_all = [delimiter for delimiter, names in found.items() if set(fields.among(names).names) <= set(names)]
  delimiter = has_all[0] if has_all else max(found, key=lambda key: len(found[key]))
  cells = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
  return _next(file, cells, lines, 0) or [], delimiter


def _next(file: TextFile, cells: Iterator[Any], lines: _Lines, number: int) -> Any:
  """The next row, or line. None at the end."""
  lines.start = lines.offset
  try:
    return next(cells, None)
  except UnicodeDecodeError as error:
    raise ConfigError(
      f"{_where(file, lines, number)} is not UTF-8 ({first_line(error)}); convert the file, as with `iconv -f "
      "WINDOWS-1252 -t UTF-8`"
    ) from error
  except _TooLong as error:
    raise ConfigError(f"{_where(file, lines, number)} {error}") from error
  except csv.Error as error:
    raise ConfigError(
      f"{_where(file, lines, number)} cannot be read ({first_line(error)}); close the quotes that are open there, and "
      "double the quotes within quotes"
    ) from error


def _where(file: TextFile, lines: _Lines, number: int) -> str:
  """Where a row is, for errors. Counts the lines before it, which is not worth doing for every row."""
  line, left = 1, lines.start
  with opened(file.path, file.compression) as (text, _):
    while left and (block := text.read(min(left, BUFFER))):
      line, left = line + block.count(b"\n"), left - len(block)
  return f"{f'row {number}' if number else 'the header'} of {file.path!r} in data.path, in line {line},"


def _number(cell: str) -> int | str:
  """The class in a cell: a number if it is written as one."""
  return int(cell) if cell.isascii() and cell.isdigit() and (cell == "0" or cell[0] != "0") else cell
