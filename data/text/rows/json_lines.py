"""JSON lines (jsonlines.org): UTF-8, a JSON object a line. Blank lines are rows without values.

An offset is a byte of the decompressed text, so reading goes on at the beginning of a line.
"""

import json
from typing import BinaryIO

from data.opening import BUFFER, opened, skip
from data.text.files import TextFile
from data.text.rows.fields import TOOLS, Fields, Read, Values, check_names
from errors import ConfigError, first_line
from limits import check_json, too_large


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on, with `before` rows before that."""
  with opened(file.path, file.compression) as (text, raw):
    skip(text, offset)
    longest = fields.limit + 1
    for number, line in enumerate(iter(lambda: text.readline(longest), b""), before + 1):
      if len(line) == longest:
        wrong = fields.bad(too_large(f"line {number} of {file.path!r} in data.path", None, fields.limit))
        offset += len(line) + _rest(text)
        yield wrong, offset, raw.tell()
        continue
      offset += len(line)
      if line.isspace():
        yield None, offset, raw.tell()
        continue
      yield row_in(line, fields, f"line {number} of {file.path!r}"), offset, raw.tell()


def _rest(text: BinaryIO) -> int:
  """Goes on to the end of the line. Returns how many bytes that are."""
  count = 0
  while part := text.readline(BUFFER):
    count += len(part)
    if part.endswith(b"\n"):
      break
  return count


def row_in(encoded: bytes, fields: Fields, where: str) -> Values | ConfigError:
  """As `values_in`, but returns the error for a bad row if such are skipped."""
  try:
    return values_in(encoded, fields, where)
  except ConfigError as error:
    return fields.bad(error)


def values_in(encoded: bytes, fields: Fields, where: str) -> Values:
  """The values in the JSON object in these bytes. Raises ConfigError if it is none, or lacks a field."""
  check_json(encoded, where, fields.limit)
  try:
    values = json.loads(encoded)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{where} in data.path is not valid JSON ({first_line(error)}); correct it") from error
  if not isinstance(values, dict):
    example = json.dumps(dict.fromkeys(fields.among(()).names, "..."))
    raise ConfigError(f"{where} in data.path is not a JSON object; use lines such as {example}")
  own = fields.among(values)
  for name in own.names:
    if name not in values:
      check_names(own, list(values), where)
  found = {option: values[name] for option, name in own.options.items()}
  return found | {TOOLS: values[TOOLS]} if own.in_spans and TOOLS in values else found
