"""Arrow's files and streams (arrow.apache.org/docs/format/Columnar.html), as `Dataset.save_to_disk` writes them.

An offset is the number of a row.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import limits
from data.text.chat import without_gaps
from data.text.files import TextFile
from data.text.rows.fields import Fields, Read, columns_of
from data.text.rows.unpacked import sizes

ROWS, BYTES = 1024, 1 << 20  # how many rows, and about how many bytes, are converted at a time
WHOLE = 4  # times as many bytes may a batch of so few rows have


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on."""
  import pyarrow as pa

  with open(file.path, "rb") as plain:
    for size, packed in sizes(plain):
      most = max(limits.BATCH * fields.limit, limits.UNPACKED * packed)
      limits.check(f"a batch of {file.path!r} in data.path, decompressed,", size, most)
  with pa.OSFile(file.path) as raw:
    stream, first = _opened(raw), 0
    columns = columns_of(fields, stream.schema.names, repr(file.path))
    batches = (
      (stream.get_batch(i) for i in range(stream.num_record_batches)) if hasattr(stream, "get_batch") else stream
    )
    for batch in batches:
      if first + len(batch) > offset:
        batch.select([batch.schema.names.index(name) for name in columns.values()]).validate(full=True)
        for values in values_of(batch.slice(max(0, offset - first)), columns, fields, file, offset):
          offset += 1
          yield values, offset, raw.tell()
      first += len(batch)


def schema(file: TextFile) -> Any:
  """The schema of the file."""
  import pyarrow as pa

  with pa.OSFile(file.path) as raw:
    return _opened(raw).schema


def _opened(raw: Any) -> Any:
  import pyarrow as pa

  kind = raw.read(6)
  raw.seek(0)
  return pa.ipc.open_file(raw) if kind == b"ARROW1" else pa.ipc.open_stream(raw)


def at_a_time(rows: int, size: int) -> int:
  """How many rows to convert at a time, where `rows` rows have `size` bytes."""
  return max(1, min(ROWS, rows * BYTES // max(1, size)))


def values_of(batch: Any, columns: dict[str, str], fields: Fields, file: TextFile, before: int) -> Iterator[Any]:
  """The values of these columns in the rows of a batch, with lists of integers as arrays.

  `before` rows are before the batch in the file. Raises ConfigError for a row that is too large; if such are skipped,
  yields it instead.
  """
  own = batch.select([batch.schema.names.index(name) for name in columns.values()])
  fits = own.nbytes <= WHOLE * BYTES and len(own) <= ROWS
  count = min([len(own) if fits else at_a_time(len(own), own.nbytes), *map(_most, own.columns)])
  for start in range(0, len(own), max(1, count)):
    some = own.slice(start, count)
    if count == 1:
      size = max(sum(map(_size, some.columns)), sum(map(_cost, some.columns)) // limits.COPIES)
      if size > fields.limit:
        wrong = limits.too_large(f"row {before + start + 1} of {file.path!r} in data.path", size, fields.limit)
        yield fields.bad(wrong)
        continue
    lists = [_converted(column) for column in some.columns]
    for values in zip(*lists, strict=True):
      yield {option: without_gaps(value) for option, value in zip(columns, values, strict=True)}


def _most(column: Any) -> int:
  """How many rows of a column may be converted at a time, where the bytes of the column do not say it.

  Rows may share a value, or hold lists of what takes no bytes.
  """
  import pyarrow as pa
  import pyarrow.compute as pc

  of, kind = pa.types, column.type
  if _is_text(kind) or of.is_integer(kind):  # as most
    return ROWS
  if of.is_dictionary(kind) and _is_text(kind.value_type):
    return max(1, BYTES // max(1, pc.max(pc.binary_length(column.dictionary)).as_py() or 1))
  if _is_view(kind) or of.is_dictionary(kind) or of.is_run_end_encoded(kind):
    return max(1, min(ROWS, WHOLE * BYTES // max(1, column.nbytes)))
  return max(1, min(ROWS, len(column) * WHOLE * BYTES // max(1, _cost(column))))


def _size(column: Any) -> int:
  """The bytes of the one row of a column."""
  import pyarrow as pa

  of, kind = pa.types, column.type
  if of.is_dictionary(kind):
    return column.dictionary_decode().nbytes
  if _is_view(kind):
    return len(column[0].as_buffer() or b"") if not of.is_list_view(kind) and column[0].is_valid else 0
  return 0 if of.is_run_end_encoded(kind) else column.nbytes


def _cost(column: Any) -> int:
  """About how many bytes the values of a column need as objects of Python, without their text; see `_converted`."""
  import pyarrow as pa

  of, kind = pa.types, column.type
  if of.is_map(kind):
    offsets = column.offsets
    return 90 * len(column) + 200 * (offsets[-1].as_py() - offsets[0].as_py())
  if of.is_fixed_size_list(kind) or of.is_list(kind) or of.is_large_list(kind) or of.is_list_view(kind):
    inner = column.flatten()
    of_numbers = of.is_integer(inner.type) and not inner.null_count
    return 90 * len(column) + (8 * len(inner) if of_numbers else _cost(inner))
  if of.is_struct(kind):
    return 250 * len(column) + sum(_cost(column.field(i)) for i in range(kind.num_fields))
  return (60 if _is_text(kind) else 40) * len(column)


def _is_text(kind: Any) -> bool:
  import pyarrow as pa

  return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_view(kind: Any) -> bool:
  """Whether several rows of this type may have the same bytes."""
  import pyarrow as pa

  return pa.types.is_string_view(kind) or pa.types.is_binary_view(kind) or pa.types.is_list_view(kind)


def _converted(column: Any) -> Sequence[Any]:
  import pyarrow as pa
  import pyarrow.compute as pc

  of, kind = pa.types, column.type
  is_list = of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind)
  if not is_list or not of.is_integer(kind.value_type) or (values := column.flatten()).null_count:
    return column.to_pylist()
  lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
  ids, ends = values.to_numpy(), np.cumsum(lengths).tolist()
  starts = [0, *ends[:-1]]
  valid = column.is_valid().to_pylist()
  return [ids[start:end] if there else None for start, end, there in zip(starts, ends, valid, strict=False)]
