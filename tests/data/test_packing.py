"""Sequences made from tokens: windows, packed documents and classified texts."""

import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.files import ArrayFile, array_file
from data.text import packing
from data.text.labels import Labelled
from data.text.packing import Packed, packed
from data.text.sources import find_text
from data.text.tokens import Windows


def file_of(path: Path, values: Sequence[int] | np.ndarray, dtype: str) -> ArrayFile:
  np.asarray(values, dtype).tofile(path)
  return array_file(path, dtype)


def pack(folder: Path, sizes: Sequence[int] | np.ndarray, length: int, key: str = "") -> Packed:
  """Packs documents of these sizes. Their tokens are 0, 1, 2, ..., so each token gives its position."""
  folder.mkdir(exist_ok=True)
  ends = np.cumsum(np.asarray(sizes, np.int64))
  tokens = file_of(folder / "tokens", np.arange(ends[-1]), "<u4")
  return packed(tokens, file_of(folder / "ends", ends, "<i8"), length, str(folder / "cache"), (key, list(sizes)))


def predictions(batch: dict[str, np.ndarray]) -> np.ndarray:
  """The positions of all predictions: tokens that are followed by a token of the same segment."""
  tokens, segments = batch["tokens"], batch["segments"]
  counts = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] > 0)
  assert (tokens[:, 1:][counts] == tokens[:, :-1][counts] + 1).all()
  return tokens[:, :-1][counts]


@pytest.mark.parametrize("length", [1, 2, 7, 32])
def test_every_prediction_within_a_document_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int):
  monkeypatch.setattr(packing, "GROUP", 64)
  monkeypatch.setattr(packing, "BLOCK", 5)
  random = np.random.default_rng(length)
  around = [0, 1, 2, 3, length, length + 1, length + 2, 2 * length, 2 * length + 1, 2 * length + 2, 9 * length]
  sizes = np.concatenate([around, random.geometric(0.5 / length, 300), random.permutation(around)])
  examples = pack(tmp_path, sizes, length)
  batch = examples.read(np.random.default_rng(0).permutation(len(examples)))

  last = np.cumsum(sizes)[sizes > 0] - 1
  expected = np.setdiff1d(np.arange(sizes.sum()), last)
  np.testing.assert_array_equal(np.sort(predictions(batch)), expected)
  steps = np.diff(batch["segments"], axis=1)
  padding = batch["segments"] == 0
  assert (batch["segments"][:, 0] == 1).all()
  assert ((steps == 0) | (steps == 1) | padding[:, 1:]).all()  # 1, 2, ... in order; padding comes last
  assert (batch["tokens"][padding] == 0).all()
  assert all(len(np.unique(row)) - (0 in row) == row.max() for row in batch["segments"])
  assert batch["tokens"].shape == batch["segments"].shape == (len(examples), length + 1)
  assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}


def test_long_documents_are_cut_and_the_rest_is_placed_where_it_fits_best(tmp_path: Path):
  # Sequences of 10 tokens. The first document gives two full pieces, from 0 and from 9, and a rest of 6 tokens from 18.
  # By size: 8 opens a sequence, 6 the next, 4 fills that one, 3 opens a third, and 2 fits the first best.
  examples = pack(tmp_path, [24, 4, 8, 3, 1, 2], length=9)
  assert len(examples) == 5
  batch = examples.read(np.arange(5))
  np.testing.assert_array_equal(
    batch["tokens"],
    [
      np.arange(0, 10),
      np.arange(9, 19),
      [28, 29, 30, 31, 32, 33, 34, 35, 40, 41],
      [18, 19, 20, 21, 22, 23, 24, 25, 26, 27],
      [36, 37, 38, 0, 0, 0, 0, 0, 0, 0],
    ],
  )
  np.testing.assert_array_equal(
    batch["segments"],
    [[1] * 10, [1] * 10, [1] * 8 + [2] * 2, [1] * 6 + [2] * 4, [1] * 3 + [0] * 7],
  )


def test_documents_far_apart_share_a_sequence(tmp_path: Path):
  """2,000 of 5 tokens, then 2,000 of 4: each sequence of 9 tokens has one of both, since all are packed together."""
  examples = pack(tmp_path, [5] * 2000 + [4] * 2000, length=8)
  assert len(examples) == 2000
  assert (examples.read(np.arange(2000))["segments"] == [1] * 5 + [2] * 4).all()


def test_each_piece_goes_where_the_least_room_is_left():
  sizes = sorted(np.random.default_rng(0).integers(2, 31, 500).tolist(), reverse=True)
  sums: list[int] = []
  for size in sizes:  # by a search through all bins
    fits = [i for i, used in enumerate(sums) if used + size <= 40]
    if fits:
      sums[max(fits, key=lambda i: sums[i])] += size
    else:
      sums.append(size)
  found = np.bincount(packing._best_fit(sizes, 40), weights=sizes)
  assert sorted(found) == sorted(sums)


@pytest.fixture(scope="module")
def library() -> list[int]:
  """The sizes in bytes of the standard library's files, with one more for the END token."""
  return [file.size + 1 for file in find_text("")]


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_less_than_two_percent_of_the_standard_library_is_padding(tmp_path: Path, library: list[int], length: int):
  examples = pack(tmp_path, library, length)
  segments = examples.read(np.arange(len(examples)))["segments"]
  assert 0 <= (segments == 0).mean() < 0.02
  assert segments.size > sum(library) > 5_000_000


def test_the_index_is_kept_until_the_documents_or_the_length_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  sizes = np.random.default_rng(0).integers(1, 50, 200).tolist()
  before = pack(tmp_path, sizes, 16)
  with monkeypatch.context() as patched:
    patched.setattr(packing, "_write", lambda *_: pytest.fail("the index was made again"))
    again = pack(tmp_path, sizes, 16)
  ids = np.arange(len(before))
  for field, values in before.read(ids).items():
    np.testing.assert_array_equal(again.read(ids)[field], values)
  assert pack(tmp_path, sizes, 17).full.path.parent != before.full.path.parent
  assert pack(tmp_path, [*sizes[:-1], 99], 16).full.path.parent != before.full.path.parent


def test_a_killed_preparation_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(packing, "GROUP", 16)
  sizes = np.random.default_rng(0).integers(1, 50, 100).tolist()
  whole = pack(tmp_path / "whole", sizes, 16)
  place, calls = packing._place, []

  def killed(*arguments):
    calls.append(1)
    if len(calls) == 4:
      raise KeyboardInterrupt
    return place(*arguments)

  with monkeypatch.context() as patched:
    patched.setattr(packing, "_place", killed)
    with pytest.raises(KeyboardInterrupt):
      pack(tmp_path / "killed", sizes, 16)
  again = pack(tmp_path / "killed", sizes, 16)
  for one, other in zip((whole.full, whole.bins, whole.pieces), (again.full, again.bins, again.pieces), strict=True):
    assert one.path.read_bytes() == other.path.read_bytes()


def test_a_document_of_any_length_is_packed_in_little_memory(tmp_path: Path):
  ends = file_of(tmp_path / "ends", [20_000_000, 20_000_003], "<i8")
  missing = ArrayFile(tmp_path / "tokens", np.dtype("<u2"), 20_000_003)  # packing reads no token
  tracemalloc.start()
  examples = packed(missing, ends, 8, str(tmp_path / "cache"), "long")
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert examples.full.path.stat().st_size == 8 * ((20_000_000 - 1) // 8)
  assert peak < 16e6


def test_threads_read_the_same_examples(tmp_path: Path):
  sizes = np.random.default_rng(0).integers(1, 60, 400)
  examples = [pack(tmp_path, sizes, 16), Windows(array_file(tmp_path / "tokens", "<u4"), 16)]
  for source in examples:
    ids = np.random.default_rng(1).integers(0, len(source), (40, 50))
    with ThreadPoolExecutor(8) as pool:
      found = list(pool.map(source.read, ids))
    for batch, some in zip(found, ids, strict=True):
      for field, values in source.read(some).items():
        np.testing.assert_array_equal(batch[field], values)


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_windows_share_their_border(tmp_path: Path, tokens: int, windows: int):
  source = Windows(file_of(tmp_path / "tokens", np.arange(tokens), "<u2"), 8)
  assert len(source) == windows
  found = source.read(np.arange(windows))["tokens"]
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, np.arange(windows)[:, None] * 8 + np.arange(9))


def test_a_classified_text_is_a_document_without_its_end(tmp_path: Path):
  # Documents of 3, 0, 6 and 4 tokens and an END (0). Of the empty one, the END remains. The third is cut.
  tokens = file_of(tmp_path / "tokens", [5, 6, 7, 0, 0, 1, 2, 3, 4, 5, 6, 0, 9, 8, 7, 6, 0], "u1")
  ends = file_of(tmp_path / "ends", [4, 5, 12, 17], "<i8")
  source = Labelled(tokens, ends, file_of(tmp_path / "labels", [2, 0, 1, 2], "<i4"), 4)
  assert len(source) == 4
  batch = source.read(np.array([3, 0, 2, 1]))
  np.testing.assert_array_equal(batch["tokens"], [[9, 8, 7, 6], [5, 6, 7, 0], [1, 2, 3, 4], [0, 0, 0, 0]])
  np.testing.assert_array_equal(batch["segments"], [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
  np.testing.assert_array_equal(batch["label"], [2, 2, 1, 0])
  assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}
