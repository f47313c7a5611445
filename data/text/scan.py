"""One pass over token files of other programs: the largest id, a fingerprint and the ends of the documents.

What the pass finds is kept in the cache. The tokens are not copied; training reads them where they are.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.cache import prepared
from data.files import ArrayFile, array_file
from data.text.megatron import Index, read_index
from errors import ConfigError

FORMAT = 1  # version of what is kept; increase it when that changes
HELD_OUT = 20  # without a file for validation, 1 in so many tokens, at the end, are for validation
BLOCK = 1 << 20  # tokens read at a time


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """A file of token ids, and Megatron-LM's index of it. nanoGPT's files have none."""

  bin: Path
  index: Path | None = None


@dataclasses.dataclass(frozen=True)
class TokenFiles:
  """The file to train on and the file to validate on. Without the latter, the end of the former is for validation."""

  train: TokenFile
  validation: TokenFile | None = None


@dataclasses.dataclass(frozen=True)
class Scan:
  """What a pass has found.

  Attributes:
    tokens: of the splits train and validation, in place.
    ends: of each split, the position just after each document, int64; {} if unknown.
    largest_id: of both splits.
    fingerprint: a hash of the tokens and of their split.
    documents: a hash of the ends; "" if unknown.
  """

  tokens: dict[str, ArrayFile]
  ends: dict[str, ArrayFile]
  largest_id: int
  fingerprint: str
  documents: str


def scan(files: TokenFiles, cache_dir: str, end: int | None = None) -> Scan:
  """Passes over the files once, or reads from the cache what an earlier pass has found.

  `end` is the id that ends a document in files without an index, if known. Raises ConfigError if the files are damaged,
  or change meanwhile.
  """
  stamps = _stamps(files)
  folder = prepared(cache_dir, "tokens", (FORMAT, stamps, end), lambda to: _write(to, files, stamps, end))
  meta = json.loads((folder / "meta.json").read_text())
  tokens = {
    split: ArrayFile(Path(path), np.dtype(dtype), count, offset)
    for split, (path, dtype, count, offset) in meta["tokens"].items()
  }
  ends = {split: array_file(folder / f"{split}.ends", "<i8") for split in tokens} if meta["documents"] else {}
  return Scan(tokens, ends, meta["largest_id"], meta["fingerprint"], meta["documents"])


Stamps = list[tuple[str, int, int]]  # path, size and time of change of each file


def _stamps(files: TokenFiles) -> Stamps:
  both = [files.train, files.validation] if files.validation else [files.train]
  paths = [path.absolute() for file in both for path in (file.bin, file.index) if path]
  return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) if p.exists() else (str(p), 0, 0) for p in paths]


def _write(folder: Path, files: TokenFiles, stamps: Stamps, end: int | None) -> None:
  """Makes the pass, and writes what it finds to `folder`."""
  splits = _splits(files)
  known = end is not None or all(index for _, index in splits.values())
  documents = hashlib.sha256()
  size = sum(len(tokens) * tokens.dtype.itemsize for tokens, _ in splits.values())
  with tqdm(total=size, desc=f"reading {files.train.bin.name}", unit="B", unit_scale=True, disable=None) as bar:
    seen = _Seen(bar)
    for split, (tokens, index) in splits.items():
      seen.content.update(f"{split} {tokens.dtype.str} {len(tokens)} ".encode())
      documents.update(f"{split} ".encode())
      blocks, last = seen.blocks(tokens), 0
      with (folder / f"{split}.ends").open("wb") as out:
        for ends in _index_ends(tokens, index) if index else _token_ends(blocks, end):
          documents.update(ends.data)
          out.write(ends.data)
          last = int(ends[-1]) if len(ends) else last
        if last < len(tokens):  # the last document is cut off
          ends = np.array([len(tokens)], "<i8")
          documents.update(ends.data)
          out.write(ends.data)
      for _ in blocks:  # with an index, no token has been read yet
        pass
  for before, now in zip(stamps, _stamps(files), strict=True):
    if before != now:
      raise ConfigError(f"data.path={before[0]!r} has changed while it was read; run again when it is complete")
  meta = {
    "tokens": {s: (str(t.path.absolute()), t.dtype.str, t.count, t.offset) for s, (t, _) in splits.items()},
    "largest_id": seen.largest,
    "fingerprint": seen.content.hexdigest(),
    "documents": documents.hexdigest() if known else "",
  }
  (folder / "meta.json").write_text(json.dumps(meta))


@dataclasses.dataclass
class _Seen:
  """What the pass has seen of the tokens."""

  bar: tqdm
  content: Any = dataclasses.field(default_factory=hashlib.sha256)
  largest: int = 0

  def blocks(self, tokens: ArrayFile) -> Iterator[tuple[int, np.ndarray]]:
    """Reads all tokens, in blocks with their positions. Raises ConfigError for a negative id."""
    for first in range(0, len(tokens), BLOCK):
      block = tokens.slice(first, min(first + BLOCK, len(tokens)))
      if block.min() < 0:
        raise ConfigError(
          f"data.path={str(tokens.path)!r} holds token id {block.min()}; write it again with a type that holds all ids"
        )
      self.content.update(block.data)
      self.largest = max(self.largest, int(block.max()))
      self.bar.update(block.nbytes)
      yield first, block


def _token_ends(blocks: Iterator[tuple[int, np.ndarray]], end: int | None) -> Iterator[np.ndarray]:
  """The positions after each token `end`."""
  for first, block in blocks:
    yield np.flatnonzero(block == end) + first + 1 if end is not None else np.zeros(0, np.int64)


def _index_ends(tokens: ArrayFile, index: Index) -> Iterator[np.ndarray]:
  """The ends of the documents within a split, counted from its start."""
  start = tokens.offset // tokens.dtype.itemsize
  for ends in index.ends():
    yield ends[(ends > start) & (ends <= start + len(tokens))] - start


def _splits(files: TokenFiles) -> dict[str, tuple[ArrayFile, Index | None]]:
  """The tokens of each split, and the index of their file."""
  train, index = _open(files.train)
  if files.validation:
    return {"train": (train, index), "validation": _open(files.validation)}
  cut = _cut(len(train), index)
  validation = dataclasses.replace(train, count=len(train) - cut, offset=cut * train.dtype.itemsize)
  return {"train": (dataclasses.replace(train, count=cut), index), "validation": (validation, index)}


def _open(file: TokenFile) -> tuple[ArrayFile, Index | None]:
  if file.index:
    index = read_index(file.index, file.bin)
    return array_file(file.bin, index.dtype), index
  if file.bin.stat().st_size % 2:
    raise ConfigError(
      f"data.path={str(file.bin)!r} has an odd number of bytes, {file.bin.stat().st_size}, so it does not hold uint16 "
      "ids; copy it again, or add the .idx if it is from Megatron-LM"
    )
  ids = array_file(file.bin, "<u2")
  _check_width(ids)
  return ids, None


def _check_width(ids: ArrayFile) -> None:
  """Raises ConfigError for ids of 4 or 8 bytes. Read as uint16, every second one is then 0 or very small."""
  lower, upper = ids.slice(0, min(len(ids), BLOCK) // 2 * 2).reshape(-1, 2).T
  if len(upper) < 32:
    return
  if upper.max() == 0 < lower.max() or (upper.max() < 16 and lower.max() >= 1024):
    raise ConfigError(
      f"data.path={str(ids.path)!r} seems to hold ids of 4 bytes or more, but a .bin without .idx must hold uint16; "
      "write uint16, or an .idx as Megatron-LM does if ids are above 65535"
    )


def _cut(tokens: int, index: Index | None) -> int:
  """Where validation begins. With an index at the end of a document, unless there is only one document."""
  cut = tokens - tokens // HELD_OUT
  if not index:
    return cut
  ends = (ends[(ends > 0) & (ends < tokens)] for ends in index.ends())
  nearest = [int(some[np.abs(some - cut).argmin()]) for some in ends if len(some)]
  return min(nearest, key=lambda end: abs(end - cut), default=cut)
