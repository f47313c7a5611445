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

from data import described
from data.cache import prepared
from data.files import ArrayFile, Joined, Numbers, array_file
from data.text import headers
from data.text.megatron import Index, read_index
from errors import ConfigError, visible

FORMAT = 2  # version of what is kept; increase it when that changes
HELD_OUT = 20  # without a file for validation, 1 in so many tokens, at the end, are for validation
BLOCK = 1 << 20  # tokens read at a time
HEADER = 1024  # bytes at the beginning of a file that may be a header


@dataclasses.dataclass(frozen=True)
class TokenFile:
  """A file of token ids.

  Attributes:
    bin: the file.
    index: Megatron-LM's index of it; None for the other kinds.
    kind: `ids` without a header, `llmc`, `npy` or `megatron` (recognition/kinds.py).
  """

  bin: Path
  index: Path | None = None
  kind: str = "ids"


@dataclasses.dataclass(frozen=True)
class TokenFiles:
  """The files to train on and those to validate on. Without the latter, the end of the former is for validation."""

  train: tuple[TokenFile, ...]
  validation: tuple[TokenFile, ...] = ()

  @property
  def all(self) -> tuple[TokenFile, ...]:
    return self.train + self.validation


@dataclasses.dataclass(frozen=True)
class Scan:
  """What a pass has found.

  Attributes:
    tokens: of the splits train and validation, in place.
    ends: of each split, the position just after each document, int64; {} if unknown.
    largest_id: of both splits.
    largest_later: the same without the first HEADER bytes of files that have no header we know.
    fingerprint: a hash of the tokens and of their split.
    documents: a hash of the ends; "" if unknown.
  """

  tokens: dict[str, Numbers]
  ends: dict[str, ArrayFile]
  largest_id: int
  largest_later: int
  fingerprint: str
  documents: str


def scan(files: TokenFiles, cache_dir: str, end: int | None = None, vocab_size: int = 0) -> Scan:
  """Passes over the files once, or reads from the cache what an earlier pass has found.

  `end` is the id that ends a document in files without an index, if known. Ids without a header are uint16, unless
  `vocab_size` says that there are more than those can number: then they are uint32. Raises ConfigError if the files are
  damaged, or change meanwhile.
  """
  stamps, width = _stamps(files), np.dtype("<u4" if vocab_size > 1 << 16 else "<u2")
  key = (FORMAT, stamps, end, width.str)
  folder = prepared(cache_dir, "tokens", key, lambda to: _write(to, files, stamps, end, width))
  meta = described.meta(folder, described.scanned(file.bin for file in files.all))
  tokens = {
    split: _joined([ArrayFile(Path(path), np.dtype(dtype), count, offset) for path, dtype, count, offset in parts])
    for split, parts in meta["tokens"].items()
  }
  ends = {split: array_file(folder / f"{split}.ends", "<i8") for split in tokens} if meta["documents"] else {}
  return Scan(tokens, ends, meta["largest_id"], meta["largest_later"], meta["fingerprint"], meta["documents"])


def _joined(files: list[ArrayFile]) -> Numbers:
  return files[0] if len(files) == 1 else Joined(tuple(files))


Stamps = list[tuple[str, int, int]]  # path, size and time of change of each file


def _stamps(files: TokenFiles) -> Stamps:
  paths = [path.absolute() for file in files.all for path in (file.bin, file.index) if path]
  return list(map(_stamp, paths))


def _stamp(path: Path) -> tuple[str, int, int]:
  try:
    seen = path.stat()
  except (FileNotFoundError, NotADirectoryError):
    return str(path), 0, 0
  return str(path), seen.st_size, seen.st_mtime_ns


def _write(folder: Path, files: TokenFiles, stamps: Stamps, end: int | None, width: np.dtype) -> None:
  """Makes the pass, and writes what it finds to `folder`."""
  splits = _splits(files, width)
  parts = [part for split in splits.values() for part in split]
  known = end is not None or all(part.index for part in parts)
  documents = hashlib.sha256()
  size = sum(len(part.tokens) * part.tokens.dtype.itemsize for part in parts)
  with tqdm(
    total=size, desc=visible(f"reading {files.train[0].bin.name}"), unit="B", unit_scale=True, disable=None
  ) as bar:
    seen = _Seen(bar)
    for split, own in splits.items():
      total = sum(len(part.tokens) for part in own)
      seen.content.update(f"{split} {own[0].tokens.dtype.str} {total} ".encode())
      documents.update(f"{split} ".encode())
      last = 0  # the end of the last document so far, in the tokens of the split
      with (folder / f"{split}.ends").open("wb") as out:
        for ends in _ends(own, seen, end):
          documents.update(ends.data)
          out.write(ends.data)
          last = int(ends[-1]) if len(ends) else last
        if last < total:  # the last document is cut off
          ends = np.array([total], "<i8")
          documents.update(ends.data)
          out.write(ends.data)
  for before, now in zip(stamps, _stamps(files), strict=True):
    if before != now:
      raise ConfigError(f"data.path={before[0]!r} has changed while it was read; run again when it is complete")
  arrays = {split: [part.tokens for part in own] for split, own in splits.items()}
  meta = {
    "tokens": {
      split: [(str(t.path.absolute()), t.dtype.str, t.count, t.offset) for t in own] for split, own in arrays.items()
    },
    "largest_id": seen.largest,
    "largest_later": seen.largest_later,
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
  largest_later: int = 0

  def blocks(self, part: "_Part") -> Iterator[tuple[int, np.ndarray]]:
    """Reads all tokens, in blocks with their positions. Raises ConfigError for a negative id."""
    tokens, head = part.tokens, HEADER // part.tokens.dtype.itemsize if part.may_have_header else 0
    head = head if len(tokens) > 4 * head else 0  # of little, nothing can be said
    for first in range(0, len(tokens), BLOCK):
      block = tokens.slice(first, min(first + BLOCK, len(tokens)))
      if block.min() < 0:
        raise ConfigError(
          f"data.path={str(tokens.path)!r} holds token id {block.min()}; write it again with a type that holds all ids"
        )
      self.content.update(block.data)
      self.largest = max(self.largest, int(block.max()))
      self.largest_later = max(self.largest_later, int(block[max(0, head - first) :].max(initial=0)))
      self.bar.update(block.nbytes)
      yield first, block


@dataclasses.dataclass(frozen=True)
class _Part:
  """Some tokens of a file that are in one split.

  Attributes:
    tokens: in place.
    index: of the whole file.
    may_have_header: whether they begin the file, and nothing says that it has no header.
  """

  tokens: ArrayFile
  index: Index | None = None
  may_have_header: bool = False


def _ends(parts: list[_Part], seen: _Seen, end: int | None) -> Iterator[np.ndarray]:
  """The ends of the documents in the tokens of a split, int64. Reads all tokens."""
  before = 0
  for part in parts:
    blocks = seen.blocks(part)
    for ends in _index_ends(part.tokens, part.index) if part.index else _token_ends(blocks, end):
      yield np.asarray(ends + before, "<i8")
    for _ in blocks:  # with an index, no token has been read yet
      pass
    before += len(part.tokens)


def _token_ends(blocks: Iterator[tuple[int, np.ndarray]], end: int | None) -> Iterator[np.ndarray]:
  """The positions after each token `end`."""
  for first, block in blocks:
    yield np.flatnonzero(block == end) + first + 1 if end is not None else np.zeros(0, np.int64)


def _index_ends(tokens: ArrayFile, index: Index) -> Iterator[np.ndarray]:
  """The ends of the documents within a part, counted from its start."""
  start = tokens.offset // tokens.dtype.itemsize
  for ends in index.ends():
    yield ends[(ends > start) & (ends <= start + len(tokens))] - start


def _splits(files: TokenFiles, width: np.dtype) -> dict[str, list[_Part]]:
  """The parts of each split. Raises ConfigError unless all ids of a split have one type."""
  splits = {"train": [_open(file, width) for file in files.train]}
  if files.validation:
    splits["validation"] = [_open(file, width) for file in files.validation]
  headers.refuse([part.tokens for own in splits.values() for part in own if part.may_have_header])
  if not files.validation:
    splits = _cut_in_two(splits["train"])
  for own in splits.values():
    for part in own:
      if part.tokens.dtype != own[0].tokens.dtype:
        raise ConfigError(
          f"data.path has ids of type {own[0].tokens.dtype.name} in {str(own[0].tokens.path)!r} and "
          f"{part.tokens.dtype.name} in {str(part.tokens.path)!r}; write all with one type"
        )
  return splits


def _cut_in_two(parts: list[_Part]) -> dict[str, list[_Part]]:
  """The parts before the last twentieth of all tokens, and the others. A file may be cut into two parts."""
  cut = _cut(parts)
  splits: dict[str, list[_Part]] = {"train": [], "validation": []}
  before = 0
  for part in parts:
    tokens, size = part.tokens, part.tokens.dtype.itemsize
    here = min(max(cut - before, 0), len(tokens))
    if here or not before:
      splits["train"].append(dataclasses.replace(part, tokens=dataclasses.replace(tokens, count=here)))
    if here < len(tokens) or part is parts[-1]:
      rest = dataclasses.replace(tokens, count=len(tokens) - here, offset=tokens.offset + here * size)
      has_header = part.may_have_header and not here
      splits["validation"].append(dataclasses.replace(part, tokens=rest, may_have_header=has_header))
    before += len(tokens)
  return splits


def _cut(parts: list[_Part]) -> int:
  """Where validation begins. With an index at the end of a document, unless there is only one document."""
  total = sum(len(part.tokens) for part in parts)
  cut, before, nearest = total - total // HELD_OUT, 0, list[int]()
  for part in parts:
    for ends in part.index.ends() if part.index else ():
      inner = ends[(ends + before > 0) & (ends + before < total)] + before
      nearest += [int(inner[np.abs(inner - cut).argmin()])] if len(inner) else []
    before += len(part.tokens)
  return min(nearest, key=lambda end: abs(end - cut), default=cut)


def _open(file: TokenFile, width: np.dtype) -> _Part:
  if file.index:
    index = read_index(file.index, file.bin)
    return _Part(array_file(file.bin, index.dtype), index)
  if file.kind in headers.KINDS:
    return _Part(headers.KINDS[file.kind](file.bin))
  size = file.bin.stat().st_size
  if size % width.itemsize:
    odd = "an odd number of bytes, " if width.itemsize == 2 else ""
    raise ConfigError(
      f"data.path={str(file.bin)!r} has {odd}{size}{'' if odd else ' bytes'}, so it does not hold {width.name} ids; "
      "copy it again, or add the .idx if it is from Megatron-LM"
    )
  return _Part(array_file(file.bin, width), may_have_header=True)
