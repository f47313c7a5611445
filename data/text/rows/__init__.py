"""Rows of files that have rows: what READERS reads, and what a row may hold.

A reader is a function in a file of its own, which says where reading can go on: json_lines.py, json_values.py,
delimited.py (CSV and TSV), parquet.py, arrow.py, mds.py (MosaicML) and array_record.py (TensorFlow Datasets). fields.py
has what they share.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from data.text.chat import Chat, Dialogue, read_messages
from data.text.files import TextFile
from data.text.rows import array_record, arrow, delimited, json_lines, json_values, mds, parquet
from data.text.rows.fields import TOOLS, Fields, Read, Values
from data.text.spans import Document, pair
from errors import ConfigError, first_line, shown
from limits import check_json, list_of

__all__ = ["READERS", "Fields", "Row", "class_names", "rows"]

READERS: dict[str, Callable[[TextFile, Fields, int, int], Read]] = {
  "json": json_lines.read, "json_values": json_values.read, "csv": delimited.read, "tsv": delimited.read,
  "parquet": parquet.read, "arrow": arrow.read, "mds": mds.read, "array_record": array_record.read,
}  # fmt: skip
PLACES = {"json": "line", "json_values": "element", "mds": "sample", "array_record": "record"}  # otherwise row

MAX_CLASSES = 1 << 16  # more are not classes but, say, ids
LONGEST_NAME = 1000  # characters of the name of a class
LARGEST_ID = (1 << 31) - 1  # of a token: batches are int32


class Row(NamedTuple):
  """A row.

  Attributes:
    text: UTF-8; None for a blank line of JSON, for a row of token ids, and where there is a document in spans.
    label: its class; None without classes.
    offset: where the next row begins: a byte of the decompressed text, or the number of a row.
    done: bytes on disk that have been read so far.
    document: with prompts or dialogues: the text in spans.
    ids: token ids, a document by themselves, integers [N]; None for a row of text.
    wrong: what is wrong with a bad row, which is skipped.
  """

  text: bytes | None
  label: int | str | None
  offset: int
  done: int
  document: Document | None = None
  ids: np.ndarray | None = None
  wrong: str | None = None


def rows(file: TextFile, fields: Fields, offset: int = 0, before: int = 0, chat: Chat | None = None) -> Iterator[Row]:
  """The rows of a file from `offset` on, with `before` rows before that. `chat` writes dialogues.

  Raises ConfigError for a row that lacks a field or holds something else, unless such are skipped, and OSError or
  ValueError for a damaged file.
  """
  place, is_text = PLACES.get(file.kind, "row"), fields.label is None and not fields.in_spans
  for number, (values, next_offset, done) in enumerate(READERS[file.kind](file, fields, offset, before), before + 1):
    if values is None:
      yield Row(None, None, next_offset, done)
      continue
    if isinstance(values, ConfigError):
      yield Row(None, None, next_offset, done, wrong=str(values))
      continue
    if is_text and isinstance(text := values["data.text_field"], str):  # most rows, so without detours
      yield Row(text.encode(errors="replace"), None, next_offset, done)
      continue
    where = f"{place} {number} of {file.path!r}"
    try:
      row = _row(values, fields, (next_offset, done), where, place, chat)
    except ConfigError as error:
      row = Row(None, None, next_offset, done, wrong=str(fields.bad(error)))
    yield row


def _row(values: Values, fields: Fields, at: tuple[int, int], where: str, place: str, chat: Chat | None) -> Row:
  """The row with these values. `at` has its `offset` and `done`."""
  if fields.label is None and not fields.in_spans:
    text = values["data.text_field"]
    if isinstance(text, list | np.ndarray):
      return Row(None, None, *at, ids=_ids(text, fields, where))
  label = None if fields.label is None else _label(values["data.label_field"], fields.label, where)
  if fields.in_spans:
    return Row(None, label, *at, _document(values, fields, where, place, chat))
  return Row(_text(values, fields, "data.text_field", where), label, *at)


def _document(values: Values, fields: Fields, where: str, place: str, chat: Chat | None) -> Document:
  """The document of a row with prompts or messages."""
  names = ("data.prompt_field", "data.completion_field")
  if "data.messages_field" in values:
    given = [read_messages(values["data.messages_field"], f"data.messages_field={fields.messages!r}", where)]
  elif all(_holds_messages(values[name]) for name in names):
    given = [read_messages(values[name], f"{name}={fields.options[name]!r}", where) for name in names]
  else:
    prompt, text = (_text(values, fields, name, where) for name in names)
    if not text:
      raise ConfigError(
        f"data.completion_field={fields.text!r} is empty in {where}, so nothing can be learned from it; write a "
        f"completion, or leave out the {place}"
      )
    return pair(prompt, text)
  assert chat
  first, tools = len(given[0]) if len(given) > 1 else 0, values.get(TOOLS) or None
  if isinstance(tools, str):  # some data sets keep them as JSON
    try:
      check_json(tools.encode(errors="replace"), where, fields.limit)
      tools = json.loads(tools) or None
    except (ValueError, RecursionError) as error:
      if isinstance(error, ConfigError):
        raise
      raise ConfigError(f"{TOOLS} is not valid JSON in {where} ({first_line(error)}); correct it") from error
  return chat.document(Dialogue([message for some in given for message in some], first, tools), where)


def _holds_messages(value: Any) -> bool:
  """Whether it is a list, but not one of token ids."""
  return isinstance(value, list) and not (value and _are_integers(value))


def class_names(file: TextFile, field: str) -> list[str]:
  """The names of the classes 0, 1, ..., if they are stored with the rows."""
  if file.kind == "array_record":
    return array_record.class_names(file, field)
  if file.kind not in ("parquet", "arrow"):
    return []
  schema = (parquet if file.kind == "parquet" else arrow).schema(file)
  try:
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stored.get("info", {}).get("features", {}).get(field, {}).get("names", [])
    names = list(names.values()) if isinstance(names, dict) else names
    if not list_of(lambda name: isinstance(name, str) and len(name) <= LONGEST_NAME)(names) or len(names) > MAX_CLASSES:
      raise ValueError(f"{field!r} has the names {shown(names)}")
  except (ValueError, RecursionError, AttributeError) as error:
    raise ConfigError(
      f"{file.path!r} in data.path has metadata of the `datasets` library that cannot be read ({first_line(error)}); "
      "write the file again"
    ) from error
  return names


def _text(values: dict[str, Any], fields: Fields, option: str, where: str) -> bytes:
  """The text in the field that `option` names. A missing value is an empty text, but not an empty prompt."""
  value, name = values[option], fields.options[option]
  if isinstance(value, str):
    return value.encode(errors="replace")  # JSON may hold half of a surrogate pair
  if isinstance(value, bytes):
    return value
  if value is None and option != "data.prompt_field":
    return b""
  if isinstance(value, list | np.ndarray) and _are_integers(value):
    why = "data.label_field" if fields.prompt is None else "data.prompt_field"
    raise ConfigError(
      f"{option}={name!r} holds token ids in {where}, but {why}={fields.options[why]!r} needs text; use a field that "
      "holds text"
    )
  raise ConfigError(f"{option}={name!r} is {repr(value)[:50]} in {where}; use a field that holds text, or token ids")


def _are_integers(value: list[Any] | np.ndarray) -> bool:
  try:
    array = np.asarray(value)
  except ValueError:  # lists of different lengths
    return False
  return array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)


def _ids(value: list[Any] | np.ndarray, fields: Fields, where: str) -> np.ndarray:
  """The token ids in a row."""
  if not _are_integers(value):
    shown = repr(value if isinstance(value, list) else value.tolist())[:50]
    raise ConfigError(
      f"data.text_field={fields.text!r} is {shown} in {where}; use a field that holds text, or token ids"
    )
  ids = np.asarray(value)
  if ids.size and not 0 <= ids.min() <= ids.max() <= LARGEST_ID:
    wrong = ids.min() if ids.min() < 0 else ids.max()
    raise ConfigError(
      f"data.text_field={fields.text!r} holds token id {wrong} in {where}; write it again with ids from 0 up to the "
      "size of the vocabulary"
    )
  return ids.astype("<u4")


def _label(value: Any, field: str, where: str) -> int | str:
  if isinstance(value, str) and len(value) <= LONGEST_NAME:
    return value
  if isinstance(value, int) and 0 <= value < MAX_CLASSES:
    return int(value)
  raise ConfigError(
    f"data.label_field={field!r} is {repr(value)[:50]} in {where}; use a field that holds names of classes, or "
    f"integers from 0 to {MAX_CLASSES - 1}"
  )
