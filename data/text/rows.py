"""Rows of text files that have rows: JSON lines, Parquet, and the Arrow files of saved Hugging Face datasets."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data.text.files import TextFile, opened, skip
from errors import ConfigError, first_line

ROWS, BYTES = 1024, 1 << 20  # how many rows, and about how many bytes, are converted at a time
MAX_CLASSES = 1 << 16  # more are not classes but, say, ids
LONGEST_NAME = 1000  # characters of the name of a class
LONGEST_LINE = 1 << 28  # bytes of a line of JSON; a small compressed file may hold one that no memory does


@dataclasses.dataclass(frozen=True)
class Fields:
  """The columns, or fields of JSON, that hold the text, its class and the prompt before it.

  `label` is None without classes, and `prompt` is None without prompts. With prompts, the text is the completion.
  """

  text: str = "text"
  label: str | None = None
  prompt: str | None = None

  def __post_init__(self) -> None:
    if self.prompt == self.text:
      raise ConfigError(
        f"data.prompt_field={self.prompt!r} and data.completion_field={self.text!r} are the same field; name two"
      )

  @property
  def options(self) -> dict[str, str]:
    """The names, by the field of the config that gives each."""
    text = "data.text_field" if self.prompt is None else "data.completion_field"
    names = {"data.prompt_field": self.prompt, text: self.text, "data.label_field": self.label}
    return {option: name for option, name in names.items() if name is not None}

  @property
  def names(self) -> list[str]:
    return list(self.options.values())


class Row(NamedTuple):
  """A row.

  Attributes:
    text: UTF-8; None for a blank line of JSON.
    label: its class; None without classes.
    offset: where the next row begins: a byte of the decompressed JSON, or the number of a row.
    done: bytes on disk that have been read so far.
    prompt: what comes before the text; None without prompts.
  """

  text: bytes | None
  label: int | str | None
  offset: int
  done: int
  prompt: bytes | None = None


def rows(file: TextFile, fields: Fields, offset: int = 0, before: int = 0) -> Iterator[Row]:
  """The rows of a file from `offset` on, with `before` rows before that.

  Raises ConfigError for a row that lacks a field or holds something else, and OSError or ValueError for a damaged file.
  """
  read = {"json": _json_rows, "parquet": _parquet_rows, "arrow": _arrow_rows}[file.kind]
  place = "line" if file.kind == "json" else "row"
  for number, (found, next_offset, done) in enumerate(read(file, fields, offset, before), before + 1):
    if found is None:
      yield Row(None, None, next_offset, done)
      continue
    where, values = f"{place} {number} of {file.path!r}", dict(zip(fields.options, found, strict=True))
    label = None if fields.label is None else _label(values["data.label_field"], fields.label, where)
    if fields.prompt is None:
      yield Row(_text(values, fields, "data.text_field", where), label, next_offset, done)
    else:
      prompt, text = (_text(values, fields, f"data.{name}_field", where) for name in ("prompt", "completion"))
      if not text:
        raise ConfigError(
          f"data.completion_field={fields.text!r} is empty in {where}, so nothing can be learned from it; write a "
          f"completion, or leave out the {place}"
        )
      yield Row(text, label, next_offset, done, prompt)


def class_names(file: TextFile, field: str) -> list[str]:
  """The names of the classes 0, 1, ..., if the `datasets` library has stored them with the table."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  if file.kind == "parquet":
    schema = pq.read_schema(file.path)
  elif file.kind == "arrow":
    with pa.OSFile(file.path) as opened_file:
      schema = _arrow_file(opened_file).schema
  else:
    return []
  try:
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stored.get("info", {}).get("features", {}).get(field, {}).get("names", [])
  except (ValueError, RecursionError, AttributeError) as error:
    raise ConfigError(
      f"{file.path!r} in data.path has metadata of the `datasets` library that cannot be read ({first_line(error)}); "
      "write the file again"
    ) from error
  return list(names.values()) if isinstance(names, dict) else names


Values = tuple[Any, ...]  # of the fields, in the order of Fields.names
Read = Iterator[tuple[Values | None, int, int]]  # values, and `offset` and `done` as in Row


def _json_rows(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  with opened(file.path) as (text, raw):
    skip(text, offset)
    names = fields.names
    for number, line in enumerate(iter(lambda: text.readline(LONGEST_LINE), b""), before + 1):
      if len(line) == LONGEST_LINE:
        raise ConfigError(
          f"line {number} of {file.path!r} in data.path is longer than {LONGEST_LINE} bytes; write a document a line"
        )
      offset += len(line)
      if line.isspace():
        yield None, offset, raw.tell()
        continue
      where = f"line {number} of {file.path!r}"
      try:
        values = json.loads(line)
      except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} in data.path is not valid JSON ({first_line(error)}); correct it") from error
      if not isinstance(values, dict):
        example = json.dumps(dict.fromkeys(names, "..."))
        raise ConfigError(f"{where} in data.path is not a JSON object; use lines such as {example}")
      if not all(name in values for name in names):
        _check_names(fields, list(values), where)
      yield tuple(values[name] for name in names), offset, raw.tell()


def _parquet_rows(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  import pyarrow.parquet as pq

  # Reads a column page by page. A group of rows may be too large for the memory.
  with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as table:
    _check_names(fields, table.schema_arrow.names, repr(file.path))
    first, total = 0, max(1, table.metadata.num_rows)
    for group in range(table.num_row_groups):
      info = table.metadata.row_group(group)
      if first + info.num_rows <= offset:
        first += info.num_rows
        continue
      count = _at_a_time(info.num_rows, info.total_byte_size)
      for batch in table.iter_batches(count, row_groups=[group], columns=fields.names, use_threads=False):
        if first + len(batch) > offset:
          for values in _values(batch.slice(offset - first), fields):
            offset += 1
            yield values, offset, file.size * offset // total
        first += len(batch)


def _arrow_rows(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  import pyarrow as pa

  with pa.OSFile(file.path) as raw:
    stream, first = _arrow_file(raw), 0
    _check_names(fields, stream.schema.names, repr(file.path))
    batches = (
      (stream.get_batch(i) for i in range(stream.num_record_batches)) if hasattr(stream, "get_batch") else stream
    )
    for batch in batches:
      count = _at_a_time(len(batch), batch.nbytes)
      for start in range(max(0, offset - first), len(batch), count):
        for values in _values(batch.slice(start, count), fields):
          offset += 1
          yield values, offset, raw.tell()
      first += len(batch)


def _arrow_file(raw: Any) -> Any:
  import pyarrow as pa

  kind = raw.read(6)
  raw.seek(0)
  return pa.ipc.open_file(raw) if kind == b"ARROW1" else pa.ipc.open_stream(raw)


def _at_a_time(rows: int, size: int) -> int:
  """How many rows to convert at a time, where `rows` rows have `size` bytes."""
  return max(1, min(ROWS, rows * BYTES // max(1, size)))


def _values(batch: Any, fields: Fields) -> Iterator[Values]:
  columns = (batch.column(batch.schema.names.index(name)) for name in fields.names)
  return zip(*(column.to_pylist() for column in columns), strict=True)


def _check_names(fields: Fields, names: Sequence[str], where: str) -> None:
  for option, name in fields.options.items():
    if name not in names:
      nearest = difflib.get_close_matches(name, names, n=1)
      hint = f"did you mean {nearest[0]!r}?" if nearest else "use one of them" if names else "use another file"
      raise ConfigError(f"{option}={name!r} is not in {where}, which has {', '.join(names) or 'no fields'}; {hint}")


def _text(values: dict[str, Any], fields: Fields, option: str, where: str) -> bytes:
  """The text in the field that `option` names. A missing value is an empty text, but not an empty prompt."""
  value, name = values[option], fields.options[option]
  if isinstance(value, str):
    return value.encode(errors="replace")  # JSON may hold half of a surrogate pair
  if isinstance(value, bytes):
    return value
  if value is None and option != "data.prompt_field":
    return b""
  raise ConfigError(f"{option}={name!r} is {repr(value)[:50]} in {where}; use a field that holds text")


def _label(value: Any, field: str, where: str) -> int | str:
  if isinstance(value, str) and len(value) <= LONGEST_NAME:
    return value
  if isinstance(value, int) and 0 <= value < MAX_CLASSES:
    return int(value)
  raise ConfigError(
    f"data.label_field={field!r} is {repr(value)[:50]} in {where}; use a field that holds names of classes, or "
    f"integers from 0 to {MAX_CLASSES - 1}"
  )
