"""Parquet (parquet.apache.org/docs/file-format). An offset is the number of a row."""

import functools
from typing import Any, BinaryIO

import limits
from data.text.files import TextFile
from data.text.rows.arrow import at_a_time, values_of
from data.text.rows.fields import Fields, Read, columns_of
from data.text.rows.pages import Group, groups_of, pages_of

PAGE = 2  # times the limit of a row may a page have: some programs write pages of 100 MB
VALUES = 16  # and lists may have so many values a byte of the file


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on."""
  import pyarrow.parquet as pq

  groups = _groups(file)
  # Reads a column page by page. A group of rows may be too large for the memory.
  with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as table, open(file.path, "rb") as raw:
    columns = columns_of(fields, table.schema_arrow.names, repr(file.path))
    paths = [table.schema.column(i).path for i in range(len(table.schema))]
    first, total = 0, max(1, table.metadata.num_rows)
    for group, info in enumerate(groups):
      if first + info.num_rows <= offset:
        first += info.num_rows
        continue
      if len(info.columns) != len(paths):
        raise ValueError(f"group {group + 1} of rows has {len(info.columns)} columns instead of {len(paths)}")
      own = [(path, i) for i, path in enumerate(paths) if any(f"{path}.".startswith(f"{n}.") for n in columns.values())]
      most = _check(raw, info, own, f"group {group + 1} of rows of {file.path!r}", file.size, fields)
      count = min(at_a_time(info.num_rows, info.total_byte_size), most)
      for batch in table.iter_batches(count, row_groups=[group], columns=[*columns.values()], use_threads=False):
        if first + len(batch) > offset:
          for values in values_of(batch.slice(offset - first), columns, fields, file, offset):
            offset += 1
            yield values, offset, file.size * offset // total
        first += len(batch)


def _check(raw: BinaryIO, info: Group, columns: list[tuple[str, int]], where: str, size: int, fields: Fields) -> int:
  """How many rows of a group may be read together. Raises ConfigError if a page, or lists, are too large.

  `columns` are the paths in the schema of those that are read, and their numbers.
  """
  most = info.num_rows or 1
  for path, number in columns:
    pages, said = pages_of(raw, info.columns[number]), f"a page of the column {path!r} in {where}"
    limits.check(said, pages.largest, max(PAGE * fields.limit, limits.UNPACKED * pages.packed))
    if "." in path:  # a list of one row may have them all
      limits.check(f"the column {path!r} in {where}", pages.values, max(fields.limit, VALUES * size), "values")
    if pages.repeated:
      most = min(most, max(1, limits.BATCH * fields.limit // pages.repeated))
  return most


@functools.lru_cache(maxsize=1)
def _groups(file: TextFile) -> list[Group]:
  with open(file.path, "rb") as raw:
    return groups_of(raw)


def schema(file: TextFile) -> Any:
  """The schema of the file."""
  import pyarrow.parquet as pq

  _groups(file)  # first, because the library needs much memory for some footers
  return pq.read_schema(file.path)
