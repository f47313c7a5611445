"""Whole documents packed into sequences. `segments` says which tokens of a sequence belong to the same document.

A document longer than a sequence is cut into full pieces. Neighbouring pieces share one token, as windows do
(tokens.py). The rest of it, and short documents, share sequences. They are placed by best-fit decreasing: the longest
piece first, each into the fullest sequence that still has room for it. (Ding et al. 2024, "Fewer truncations improve
language modeling".) So every prediction within a document is made exactly once in an epoch.

With prompts or dialogues, only some predictions count. A full piece without one is left out: nothing in it counts, and
no other piece sees it. The last token of a document counts. So every sequence has a prediction that counts.

The placement is computed once and kept in files. Training reads it by position and holds none of it in memory.
"""

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.cache import prepared
from data.dataset import HostBatch
from data.files import ArrayFile, Numbers, array_file

FORMAT = 1  # version of the index; increase it when the placement or the files change
GROUP = 1 << 18  # documents that are packed together; bounds the memory
BLOCK = 1 << 18  # full pieces written at a time
READ = 1 << 24  # tokens of which it is read at a time whether they count


@dataclasses.dataclass(frozen=True)
class Packed:
  """Sequences of `length` + 1 tokens: first the full pieces of long documents, then sequences of several pieces.

  Attributes:
    tokens: all documents in a row.
    length: the predictions of a sequence, one less than its tokens.
    full: where each full piece starts, int64 [F].
    bins: how many pieces are placed before each sequence of several, and in all, int64 [B + 1].
    pieces: start and size of each piece, int64 [2 * pieces].
    completions: whether each token counts, bool; None if all do.
  """

  tokens: Numbers
  length: int
  full: ArrayFile
  bins: ArrayFile
  pieces: ArrayFile
  completions: ArrayFile | None = None

  def __len__(self) -> int:
    return len(self.full) + len(self.bins) - 1

  def read(self, ids: np.ndarray) -> HostBatch:
    """Sequences as `tokens` and `segments`, int32 [N, length + 1]; where only some count also `completions`, bool.

    Segments are 1, 2, ... by place, 0 for padding.
    """
    tokens, segments = np.zeros((2, len(ids), self.length + 1), np.int32)
    found, files = {"tokens": tokens, "segments": segments}, [(tokens, self.tokens)]
    if self.completions is not None:
      found["completions"] = np.zeros(tokens.shape, np.bool_)
      files.append((found["completions"], self.completions))
    full = ids < len(self.full)
    starts = self.full.read(ids[full], 1)[:, 0]
    for rows, file in files:
      rows[full] = file.read(starts, self.length + 1)
    segments[full] = 1
    for row in np.flatnonzero(~full).tolist():
      number = int(ids[row]) - len(self.full)
      first, last = self.bins.slice(number, number + 2).tolist()
      at = 0
      for segment, (start, size) in enumerate(self.pieces.slice(2 * first, 2 * last).reshape(-1, 2).tolist(), 1):
        for rows, file in files:
          rows[row, at : at + size] = file.slice(start, start + size)
        segments[row, at : at + size] = segment
        at += size
    return found


def packed(
  tokens: Numbers,
  ends: ArrayFile,
  length: int,
  cache_root: str,
  key: Any,
  completions: ArrayFile | None = None,
) -> Packed:
  """Packs documents into sequences of `length` + 1 tokens. Prepares the index under `cache_root` if there is none.

  Args:
    tokens: all documents in a row.
    ends: the position just after each document, int64, in increasing order.
    length: the predictions of a sequence.
    cache_root: the folder of prepared data.
    key: determines `ends` and `completions`: equal keys, equal documents.
    completions: whether each token counts, bool; None if all do.
  """
  write = lambda to: _write(to, ends, length, completions)
  folder = prepared(cache_root, "packing", (FORMAT, key, length), write)
  full, bins, pieces = (array_file(folder / name, "<i8") for name in ("full", "bins", "pieces"))
  return Packed(tokens, length, full, bins, pieces, completions)


def _write(folder: Path, ends: ArrayFile, length: int, completions: ArrayFile | None) -> None:
  """Writes the index: the files `full`, `bins` and `pieces`, as `Packed` reads them."""
  with (
    (folder / "full").open("wb") as full,
    (folder / "bins").open("wb") as bins,
    (folder / "pieces").open("wb") as out,
  ):
    placed, before = 0, np.zeros(1, np.int64)
    bins.write(before.tobytes())
    for first in range(0, len(ends), GROUP):
      stops = ends.slice(first, min(first + GROUP, len(ends)))
      starts = np.concatenate([before, stops[:-1]])
      predictions = np.maximum(stops - starts - 1, 0)
      count = predictions // length
      _write_full(full, starts, count, length, completions)

      rest = predictions % length
      pieces, counts = _place(np.stack([starts + count * length, rest + 1], axis=1)[rest > 0], length + 1)
      out.write(pieces.tobytes())
      bins.write((placed + np.cumsum(counts)).tobytes())
      placed, before = placed + len(pieces), stops[-1:]


def _write_full(
  file: BinaryIO, starts: np.ndarray, count: np.ndarray, length: int, completions: ArrayFile | None
) -> None:
  """Writes where the full pieces start: `count` [D] of each of the documents at `starts` [D].

  Leaves out pieces in which no prediction counts.
  """
  after = np.cumsum(count)
  block = BLOCK if completions is None else max(1, min(BLOCK, READ // length))
  for first in range(0, int(after[-1]), block):
    number = np.arange(first, min(first + block, int(after[-1])))
    document = np.searchsorted(after, number, side="right")
    within = number - (after - count)[document]
    at = starts[document] + within * length
    file.write((at if completions is None else at[completions.read(at + 1, length).any(axis=1)]).tobytes())


def _place(pieces: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
  """Places pieces (start, size) [N, 2] into bins of `room` tokens, by best-fit decreasing.

  Returns the pieces in the order of their bins, and the number of pieces in each bin.
  """
  pieces = pieces[np.argsort(-pieces[:, 1], kind="stable")]
  bin_of = np.array(_best_fit(pieces[:, 1].tolist(), room), np.int64)
  return pieces[np.argsort(bin_of, kind="stable")], np.bincount(bin_of)


def _best_fit(sizes: list[int], room: int) -> list[int]:
  """The bin of each piece: the one with the least room that suffices, or else a new one."""
  bins: list[int] = []
  with_free: dict[int, list[int]] = defaultdict(list)  # the bins with so much room
  occupied = number = 0  # bit i of `occupied`: there are bins with room i
  for size in sizes:
    if enough := occupied >> size:
      free = size + (enough & -enough).bit_length() - 1
      at = with_free[free].pop()
      if not with_free[free]:
        occupied ^= 1 << free
    else:
      free, at, number = room, number, number + 1
    bins.append(at)
    with_free[free - size].append(at)
    occupied |= 1 << (free - size)
  return bins
