"""The form of meta.json in prepared folders: the one place that checks what another user's cache says of its data.

Whoever has prepared a folder wrote its files, and the hashes beside it. So types, sizes and paths are checked here, and
what comes after may rely on them.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import limits
from errors import ConfigError, first_line, shown
from limits import Check, dict_of, list_of, none_or, text, whole

Form = dict[str, Check]
SPLITS = {"train", "validation"}
COUNT = whole(0, 1 << 62)
TOKENS = ("|u1", "<u2", "<u4")  # the types of prepared tokens
WIDEST = 8  # bytes of a number in a file of tokens


def of_splits(check: Check) -> Check:
  return lambda x: isinstance(x, dict) and x.keys() == SPLITS and all(map(check, x.values()))


def digest(x: Any) -> bool:
  return isinstance(x, str) and bool(re.fullmatch("[0-9a-f]{64}", x))


def _image(x: Any) -> bool:
  return list_of(whole(1, limits.VOCABULARY))(x) and len(x) == 3


SKIPPED: Form = {"skipped": none_or(whole(1, 1 << 62)), "first_skipped": none_or(list_of(text))}
TEXT: Form = SKIPPED | {
  "documents": of_splits(COUNT), "tokens": of_splits(COUNT), "counted_tokens": of_splits(COUNT),
  "counted_bytes": of_splits(COUNT), "files": COUNT, "bytes": COUNT, "dtype": lambda x: x in TOKENS,
  "largest_id": whole(), "fingerprint": digest, "tokenized_by": none_or(text), "characters": none_or(COUNT),
  "lost": none_or(COUNT), "unknown": none_or(COUNT), "not_utf8": none_or(dict_of(COUNT)),
}  # fmt: skip
LABELLED: Form = TEXT | {"classes": whole(1), "distinct": whole(1), "labels": list_of(text)}
ROWS: Form = SKIPPED | {"largest_id": COUNT, "fingerprint": digest, "documents": digest}
IMAGES: Form = {
  "shape": _image, "labels": list_of(whole()), "classes": list_of(text), "sums": list_of(COUNT),
  "squares": list_of(COUNT), "fingerprint": digest, "note": text,
}  # fmt: skip


def scanned(paths: Iterable[Path]) -> Form:
  """The form of a pass over these files of tokens. It says where tokens are, and may name no other file."""
  sizes = {str(path.absolute()): path.stat().st_size for path in paths}

  def part(x: Any) -> bool:
    if not (isinstance(x, list) and len(x) == 4 and isinstance(x[0], str) and x[0] in sizes and isinstance(x[1], str)):
      return False
    kind = re.fullmatch(f"[<>|][iu]([1-{WIDEST}])", x[1])
    return kind is not None and COUNT(x[2]) and COUNT(x[3]) and x[3] + x[2] * int(kind[1]) <= sizes[x[0]]

  return {
    "tokens": of_splits(lambda x: list_of(part)(x) and bool(x)), "largest_id": COUNT, "largest_later": COUNT,
    "fingerprint": digest, "documents": lambda x: x == "" or digest(x),
  }  # fmt: skip


def meta(folder: Path, form: Form) -> dict[str, Any]:
  """What a prepared folder says of itself, without what is None. Raises ConfigError if it has another form."""
  found = value(folder / "meta.json")
  if not isinstance(found, dict):
    raise damaged(folder, f"meta.json={shown(found)}")
  for name, check in form.items():
    if not check(found.get(name)):
      raise damaged(folder, f"{name}={shown(found.get(name))}")
  return {name: found[name] for name in form if found.get(name) is not None}


def value(file: Path) -> Any:
  """The JSON in a file of a prepared folder. Raises ConfigError if it is none."""
  try:
    return limits.described(file)
  except (OSError, ValueError) as error:
    raise damaged(file.parent, f"{file.name!r}, which cannot be read ({first_line(error)})") from error


def pairs(folder: Path) -> np.ndarray:
  """How often each pair of bytes occurs, int64 [256, 256], mapped from pairs.npy."""
  try:
    found = np.load(folder / "pairs.npy", mmap_mode="r")
  except (OSError, ValueError, EOFError) as error:
    raise damaged(folder, "'pairs.npy', which cannot be read") from error
  if (found.shape, found.dtype) != ((256, 256), np.int64):
    raise damaged(folder, f"{found.dtype} {list(found.shape)} in 'pairs.npy'")
  return found


def damaged(folder: Path, what: str) -> ConfigError:
  return ConfigError(
    f"data.cache_dir has {str(folder)!r} with {what}, which no preparation has written; remove that folder, and it is "
    "prepared again, or use another data.cache_dir"
  )
