"""MDS, the shards of MosaicML's `streaming` (0.13). An offset is the number of a sample.

A shard (streaming/base/format/mds), all numbers little endian:

- uint32: the number of samples, N; then N + 1 of them: where in the shard each sample begins, and the last ends.
- JSON with the names, encodings and sizes of the columns, up to the first sample.
- Of each sample a uint32 for each column whose size varies (it has none in the JSON), then the values of all columns.

A shard may be compressed as a whole. A column of `bytes` is UTF-8 text. Nothing is ever unpickled.
"""

import json
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from data.opening import TOO_EARLY, opened, skip
from data.text.files import TextFile
from data.text.rows.fields import Fields, Read, Values, columns_of
from errors import ConfigError
from limits import check, check_json

Decode = Callable[[bytes], Any]


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on."""
  with opened(file.path, file.compression) as (text, raw):
    count = int.from_bytes(_exactly(text, 4), "little")
    limit = fields.limit
    _check(file, "the list of samples", 4 * (count + 1), limit)
    starts = np.frombuffer(_exactly(text, 4 * (count + 1)), "<u4")
    if starts[0] < 4 * (count + 2) or (np.diff(starts.astype(np.int64)) < 0).any():
      raise ValueError("its header has samples that overlap")
    _check(file, "the header", int(starts[0]) - 4 * (count + 2), limit)
    names, columns = _columns(_exactly(text, int(starts[0]) - 4 * (count + 2)))
    own = columns_of(fields, names, repr(file.path))
    wanted = [(names.index(name), option) for option, name in own.items()]
    decoders = [_decoder(file, f"{option}={own[option]!r}", columns[column][0]) for column, option in wanted]
    skip(text, int(starts[min(offset, count)] - starts[0]))
    for number in range(offset, count):
      if (size := int(starts[number + 1] - starts[number])) > limit:
        _check(file, f"sample {number + 1}", size, limit)
      sample = _exactly(text, size)
      places = _places(sample, [size for _, size in columns])
      found: Values = {}
      for (column, option), decode in zip(wanted, decoders, strict=True):
        if columns[column][0] == "json":
          check_json(sample, f"sample {number + 1} of {file.path!r} in data.path", limit)
        try:
          found[option] = decode(sample[slice(*places[column])])
        except (LookupError, TypeError, RecursionError) as error:
          raise ValueError(f"sample {number + 1} is damaged") from error
        if columns[column][0] == "bytes":
          _check_text(found[option], f"{option}={own[option]!r}", f"sample {number + 1} of {file.path!r}")
      yield found, number + 1, raw.tell()
    if text.read(1):
      raise ValueError("it goes on after its last sample")


def _check(file: TextFile, what: str, size: int, limit: int) -> None:
  """Raises ConfigError if a part of the file is too large, and OSError if it is larger than the whole file."""
  if size > file.size and not file.compression:
    raise OSError(TOO_EARLY)
  check(f"{what} of {file.path!r} in data.path", size, limit)


def _exactly(text: BinaryIO, count: int) -> bytes:
  if len(found := text.read(count)) < count:
    raise OSError(TOO_EARLY)
  return found


def _columns(header: bytes) -> tuple[list[str], list[tuple[str, int | None]]]:
  """The names of the columns, and their encodings and sizes."""
  try:
    columns = json.loads(header)
    names, encodings, sizes = (columns[f"column_{key}"] for key in ("names", "encodings", "sizes"))
    return names, [(str(encoding), size) for _, encoding, size in zip(names, encodings, sizes, strict=True)]
  except (LookupError, TypeError, RecursionError) as error:
    raise ValueError("its header does not name its columns") from error


def _places(sample: bytes, sizes: list[int | None]) -> list[tuple[int, int]]:
  """Where the value of each column begins and ends."""
  varying = sum(not size for size in sizes)
  lengths, at, places = iter(np.frombuffer(sample, "<u4", varying).tolist()), 4 * varying, []
  for size in sizes:
    length = size or next(lengths)
    places.append((at, at + length))
    at += length
  if at != len(sample):
    raise ValueError("it has a sample whose values do not fill it")
  return places


def _decoder(file: TextFile, said: str, encoding: str) -> Any:
  if decode := _decoder_of(encoding):
    return decode
  raise ConfigError(
    f"{said} has the encoding {encoding!r} in {file.path!r}, which is not read; use a column of 'str', "
    "'json' or 'ndarray:int32'"
  )


def _check_text(value: bytes, said: str, where: str) -> None:
  """Raises ConfigError if bytes are not UTF-8 text. Some programs store token ids as bytes."""
  try:
    if "\0" not in value.decode():
      return
  except UnicodeDecodeError:
    pass
  raise ConfigError(
    f"{said} has bytes that are not UTF-8 text in {where}; if they are token ids, write the column as 'ndarray:int32'"
  )


def _decoder_of(encoding: str) -> Decode | None:
  """What decodes the values of a column; None for an encoding that holds neither text nor numbers."""
  name, _, options = encoding.partition(":")
  if name == "ndarray":
    return _array_decoder(options)
  if encoding in SCALARS:
    dtype = SCALARS[encoding]
    return lambda value: np.frombuffer(value, dtype, 1)[0].item()
  return OTHERS.get(encoding)


SCALARS = {"int": "<i8"} | {
  f"{name}{8 * size}": f"<{letter}{size}"
  for name, letter, sizes in (("uint", "u", (1, 2, 4, 8)), ("int", "i", (1, 2, 4, 8)), ("float", "f", (2, 4, 8)))
  for size in sizes
}
OTHERS: dict[str, Decode] = {
  "str": bytes.decode, "bytes": bytes, "json": json.loads, "str_int": int, "str_float": float,
}  # fmt: skip
# How an ndarray that says its own type names it: the bits, plus 1 for signed numbers and 2 for floating point.
DTYPES = {
  8: "u1",
  9: "i1",
  16: "<u2",
  17: "<i2",
  18: "<f2",
  32: "<u4",
  33: "<i4",
  34: "<f4",
  64: "<u8",
  65: "<i8",
  66: "<f8",
}


def _array_decoder(options: str) -> Decode:
  """Decodes arrays: `ndarray`, `ndarray:int32`, `ndarray:int32:2048` or `ndarray:int32:4,512`.

  Without a type, a byte says it; without a shape, a byte has the number of dimensions and the size of the numbers that
  then give the shape.
  """
  dtype, _, shape = options.partition(":")
  given = [int(size) for size in shape.split(",")] if shape else None

  def decode(value: bytes) -> np.ndarray:
    at = 0 if dtype else 1
    kind = np.dtype(SCALARS[dtype] if dtype else DTYPES[value[0]])
    if not (sizes := given):
      dimensions, width = value[at] >> 2, 1 << (value[at] & 3)
      sizes = np.frombuffer(value, f"<u{width}", dimensions, at + 1).tolist()
      at += 1 + dimensions * width
    return np.frombuffer(value, kind, -1, at).reshape(sizes)

  return decode
