"""How much memory a stranger's file may take, and how its JSON is read: one place for every reader.

`data.limit_mb` limits a row, a value, an array and the pixels of an image. Readers hold a few copies of it, so at the
default they stay below 1 GB. A few kB of a compressed file may ask for more than any machine has, so a reader asks for
the size before it makes room.

What describes a model or data, such as config.json or tokenizer.json, has limits of its own, far above all that are
known. They have no field.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from errors import ConfigError

MB = 1 << 20
FIELD = "data.limit_mb"
ROW = 64 * MB  # the default of the field, in bytes
RATIO = 1000  # the default of data.limit_ratio
FREE = 1 << 30  # bytes of prepared data that need no ratio
BATCH = 4  # times the limit of a row may what is decompressed together have
UNPACKED = 20  # what is larger is read if it has at most so many times the bytes in the file, as most text has
COPIES = 6  # the objects of Python that JSON becomes may take so many times the limit of a row
DESCRIPTION = 64 * MB  # bytes of a file that describes a model or data
RECORD = 16 * MB  # bytes of a run's config.json, or of another file that says what a run is
HEADER = 16 * MB  # bytes of the header of safetensors
MOST_TEXT = 1 << 16  # characters of a text in a record, such as a command
TENSORS = 1 << 19  # of a model; one of 61 layers with 384 experts each has 71,000
VOCABULARY = 1 << 24  # token ids; the largest vocabularies have 300,000
ENTRIES = 1 << 19  # of a tokenizer.json, of which each takes 800 bytes; known ones have 262,000
STRINGS = 1_400_000  # of a tokenizer.json; known ones have 1.3 million
# About how many bytes Python needs for what begins or ends with these: an object, a list, an element, half a string.
JSON_COSTS = ((b"{", 250), (b"[", 90), (b",", 40), (b'"', 28))


def megabytes(size: int) -> str:
  return f"{size / MB:.0f} MB" if size >= MB else f"{size} bytes"


def too_large(what: str, size: int | None, limit: int, unit: str = "", verb: str = "has") -> ConfigError:
  """The error for what a reader does not make room for. Its size is None if only so much is known that it is larger."""
  shown = (lambda count: f"{count:,} {unit}") if unit else megabytes
  if size is None:
    return ConfigError(f"{what} {verb} more than {shown(limit)}; make it smaller, or set {FIELD} to a larger number")
  return ConfigError(
    f"{what} {verb} {shown(size)}, more than the limit of {shown(limit)}; make it smaller, or set "
    f"{FIELD}={-(-size // MB)}"
  )


def check(what: str, size: int, limit: int, unit: str = "") -> None:
  """Raises ConfigError if what has this `size`, in bytes or in a unit, is larger than the limit."""
  if size > limit:
    raise too_large(what, size, limit, unit)


def check_json(encoded: bytes, what: str, limit: int) -> None:
  """Raises ConfigError if this JSON may become objects of Python that take more than COPIES times the limit.

  An empty object has two bytes here, and 64 or more in memory.
  """
  if len(encoded) * 250 > COPIES * limit:  # most are far too short to count
    cost = sum(each * encoded.count(mark) for mark, each in JSON_COSTS)
    if cost > COPIES * limit:
      raise too_large(what, cost // COPIES, limit, verb="has so many values that it counts as")


Hook = Callable[[Any], Any]  # called with the fields of each object of JSON
Check = Callable[[Any], bool]  # whether a value from a file is as our programs write it


class InBucket(Protocol):
  """A file of a bucket (runtime/storage/bucket.py), which is read whole."""

  def read_bytes(self) -> bytes: ...


File = str | os.PathLike[str] | InBucket


def described(path: File, hook: Hook | None = None, most: int = DESCRIPTION) -> Any:
  """The JSON in a file that describes a model, data or a run, and has at most so many bytes.

  Raises OSError and ValueError as `content` and `parsed` do.
  """
  return parsed(content(path, most), hook)


def content(path: File, most: int = DESCRIPTION) -> bytes:
  """The bytes of a file that has at most so many, if it is on this machine.

  Raises OSError if it cannot be read, and ValueError if it is too large, or a folder, pipe or device.
  """
  if not isinstance(path, str | os.PathLike):
    return path.read_bytes()
  seen = os.stat(path)
  if not stat.S_ISREG(seen.st_mode):
    raise ValueError("it is not a file")  # a pipe or a device may never end
  if seen.st_size > most:
    raise ValueError(f"it has {megabytes(seen.st_size)}, more than the limit of {megabytes(most)}")
  return Path(path).read_bytes()


def parsed(encoded: bytes, hook: Hook | None = None, most: int = DESCRIPTION) -> Any:
  """The value of such JSON, of at most so many bytes.

  Raises ValueError if it is none in UTF-8, nests too deep, or has too many values.
  """
  if any(encoded.count(mark) * each > COPIES * most for mark, each in JSON_COSTS):
    raise ValueError("it has too many values")
  try:
    return json.loads(encoded.decode("utf-8-sig"), object_pairs_hook=hook)
  except RecursionError as error:
    raise ValueError("it nests too deep") from error


def whole(low: int = 0, high: int = (1 << 31) - 1) -> Check:
  return lambda x: isinstance(x, int) and low <= x <= high


def number(x: Any) -> bool:
  """Whether a value is a number that fits into a float. A loss need not be finite."""
  return isinstance(x, float) or (isinstance(x, int) and abs(x) < 1 << 63)


def text(x: Any) -> bool:
  return isinstance(x, str) and len(x) <= MOST_TEXT


def none_or(check: Check) -> Check:
  return lambda x: x is None or check(x)


def list_of(check: Check) -> Check:
  return lambda x: isinstance(x, list) and all(map(check, x))


def dict_of(check: Check, name: Check = text) -> Check:
  return lambda x: isinstance(x, dict) and all(map(name, x)) and all(map(check, x.values()))


def is_failure(error: BaseException) -> bool:
  """Whether a library has failed: by an Exception, or by a panic in Rust, which is none, so nothing else catches it."""
  return isinstance(error, Exception) or type(error).__name__ == "PanicException"
