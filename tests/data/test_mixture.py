"""Mixtures: shares, epochs, and the one stream that they make for any number of processes."""

import dataclasses
import re
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import config, one_sentence

import data
from data import text
from data.batches import Batches, HostBatch, Mixture
from data.dataset import sources_of
from data.order import MAX_PERIOD, shuffled, turns, turns_of, turns_taken


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Examples that say which source they are from."""

  source: int
  size: int

  def __len__(self) -> int:
    return self.size

  def read(self, ids: np.ndarray) -> HostBatch:
    return {"source": np.full(len(ids), self.source), "number": ids.astype(np.int32)}


def mixture(weights: tuple[float, ...], sizes: tuple[int, ...] = (), **fields) -> Mixture:
  sizes = sizes or tuple(10 + i for i in range(len(weights)))
  return Mixture(tuple(Numbers(i, size) for i, size in enumerate(sizes)), weights, **fields)


@pytest.mark.parametrize(
  "weights",
  [(1.0,), (0.7, 0.3), (0.6, *(0.01,) * 40), (1e-3, 0.5, 0.123), (5, 2, 2, 2, 2), (0.123456, 0.3, 0.576544)],
)
def test_after_any_number_of_examples_each_source_gave_its_share_to_within_one(weights: tuple[float, ...]):
  counts = turns_of(weights)
  source, before = turns(counts)
  exact = np.array(weights) / sum(weights)
  positions = np.arange(1, len(source) + 1)
  for s, share in enumerate(exact):
    given = np.cumsum(source == s)
    assert np.abs(given - positions * counts[s] / sum(counts)).max() < 1
    assert counts[s] / sum(counts) == pytest.approx(share, rel=0, abs=1 / MAX_PERIOD)
    np.testing.assert_array_equal(before[source == s], np.arange(counts[s]))


def test_decimal_weights_are_exact_and_very_small_ones_are_not_lost():
  assert turns_of((0.7, 0.3)) == (7, 3)
  assert turns_of((2.0, 1.0)) == (2, 1)
  small = turns_of((1e-9, 1.0))
  assert small[0] == 1
  assert sum(small) == MAX_PERIOD


def test_counts_are_those_of_the_stream():
  mixed = mixture((0.5, 0.3, 0.2))
  order = Batches(mixed, 16, seed=3)
  seen = np.concatenate([order.read(step)["source"] for step in range(40)])
  for position in (0, 1, 16, 333, 640):
    np.testing.assert_array_equal(mixed.counts(position), np.bincount(seen[:position], minlength=3))
    np.testing.assert_array_equal(turns_taken(mixed.turns, position), mixed.counts(position))
  np.testing.assert_allclose(mixed.epochs(640), [320 / 10, 192 / 11, 128 / 12])


def test_each_source_is_shuffled_by_itself_and_has_epochs_of_its_own():
  mixed = mixture((0.75, 0.25), sizes=(30, 7))
  order = Batches(mixed, 16, seed=1)
  read = [order.read(step) for step in range(60)]
  for s, size in ((0, 30), (1, 7)):
    numbers = np.concatenate([batch["number"][batch["source"] == s] for batch in read])
    epochs = [numbers[i : i + size].tolist() for i in range(0, len(numbers) - size + 1, size)]
    assert len(epochs) > 5
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_sources_of_the_same_size_have_orders_of_their_own():
  order = Batches(mixture((0.5, 0.5), sizes=(100, 100)), 200, seed=1)
  batch = order.read(0)
  first, second = (batch["number"][batch["source"] == s] for s in (0, 1))
  assert sorted(first) == sorted(second) == list(range(100))
  assert (first == second).mean() < 0.1
  alone = Batches(mixture((1.0,), sizes=(100,)), 100, seed=1).read(0)["number"]
  np.testing.assert_array_equal(first, alone)


def test_a_step_before_the_mixture_began_is_an_error():
  with pytest.raises(ValueError, match="step 2 is before"):
    Batches(mixture((0.5, 0.5), first=24), 8).ids(2)


def test_ids_tell_the_examples_of_all_sources_apart():
  mixed = mixture((0.5, 0.5), sizes=(10, 20))
  order = Batches(mixed, 8)
  ids = np.concatenate([order.ids(step) for step in range(10)])
  assert sorted(set(ids.tolist())) == list(range(30))


def test_numbers_of_many_sources_are_computed_together(monkeypatch: pytest.MonkeyPatch):
  """Each source has the order that it has alone, however many others there are."""
  made = np.random.default_rng(0)
  weights, sizes = tuple(made.integers(1, 50, 200).tolist()), tuple(made.integers(1, 300, 200).tolist())
  given, calls = tuple(made.integers(0, 1000, 200).tolist()), []
  mixed = mixture(weights, sizes, first=3, given=given)
  monkeypatch.setitem(Mixture.ids.__globals__, "shuffled", lambda *args: calls.append(1) or shuffled(*args))
  positions = 3 + np.arange(9000)
  ids = mixed.ids(positions, seed=5)
  assert len(calls) == 1
  source, _ = turns(mixed.turns)
  for s in range(0, 200, 9):
    mine = ids[source[(positions - 3) % len(source)] == s] - mixed.starts[s]
    epochs, places = np.divmod(given[s] + np.arange(len(mine)), sizes[s])
    each = zip(epochs.tolist(), places.tolist(), strict=True)
    assert mine.tolist() == [int(shuffled(np.array([p]), sizes[s], 5, e, mixed.streams[s])[0]) for e, p in each]


@pytest.mark.parametrize("processes", [2, 4])
def test_rows_of_processes_make_the_same_batch(processes: int):
  order = Batches(mixture((0.6, 0.3, 0.1)), 16, seed=2)
  for step in (0, 5, 21):
    whole = order.read(step)
    parts = [order.read(step, np.arange(p, 16, processes)) for p in range(processes)]
    for name in whole:
      for p, part in enumerate(parts):
        np.testing.assert_array_equal(part[name], whole[name][p::processes])


def test_a_changed_mixture_goes_on_where_each_source_was():
  """Source 0 stays, with another share. Its examples go on without a gap, and none is repeated in an epoch."""
  before = mixture((0.5, 0.5), sizes=(40, 40))
  position = 24
  after = mixture((0.8, 0.2), sizes=(40, 9), first=position, given=(int(before.counts(position)[0]), 0))
  first = Batches(before, 8, seed=4)
  second = Batches(after, 8, seed=4)
  read = [(first if step < 3 else second).read(step) for step in range(7)]
  numbers = np.concatenate([batch["number"][batch["source"] == 0] for batch in read])
  alone = Batches(mixture((1.0,), sizes=(40,)), 40, seed=4).read(0)["number"]
  np.testing.assert_array_equal(numbers[:37], alone[:37])
  assert after.counts(56).tolist() == [12 + 26, 6]


def test_forty_sources_need_no_more_threads_and_hardly_more_memory_than_one(tmp_path: Path):
  """Real texts. Memory is what Python and NumPy allocate while 50 batches are read."""
  for i in range(40):
    (tmp_path / f"{i}.txt").write_text(f"text {i:02d}\n" * 400)

  def taken(count: int) -> tuple[int, int, set[bytes]]:
    """The peak of memory, the number of threads, and which texts the batches are from."""
    path = {str(tmp_path / f"{i}.txt"): 1.0 for i in range(count)}
    c = config(data__path=path, data__cache_dir=str(tmp_path / "cache"), batch_size=80)
    order, seen = Batches(data.mixture(data.load(c)), c.batch_size), set()
    order.read(0)
    before = threading.active_count()
    tracemalloc.start()
    with data.prefetch(order.read, range(1, 51)) as reader:
      for batch in reader:
        threads = threading.active_count() - before
        seen |= {re.search(rb"text (\d\d)", bytes(row.astype(np.uint8)))[1] for row in batch["tokens"]}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, threads, seen

  (one, threads_of_one, _), (forty, threads, seen) = taken(1), taken(40)
  assert len(seen) == 40
  assert threads == threads_of_one == 1
  assert forty < one + (1 << 18)  # the texts have 2,560 kB


def test_weights_that_are_no_shares_are_refused():
  assert sources_of("a,b") == [("a,b", 1.0)]
  assert sources_of({"b": 1, "a": 0.5, "c": 0}) == [("a", 0.5), ("b", 1.0)]
  with one_sentence("data.path='{\"a\": 0.7'", "is not complete"):
    sources_of('{"a": 0.7')
  with one_sentence("data.path", "'a'", "-1"):
    sources_of({"a": -1, "b": 2})
  with one_sentence("data.path", "'many'"):
    sources_of({"a": "many"})
  for none in ({}, {"a": 0, "b": 0.0}):
    with one_sentence("data.path", "no source with a weight above 0"):
      sources_of(none)


def test_the_same_data_twice_is_refused(tmp_path: Path):
  """In one list, it would be read once. In two sources, one could train on what the other holds out."""
  (tmp_path / "texts").mkdir()
  a, b = (str(tmp_path / "texts" / f"{name}.txt") for name in "ab")
  for file in (a, b):
    Path(file).write_text("some words\n" * 100)
  again = f"{tmp_path}/texts/../texts/a.txt"
  for path in (f"{a},{b},{again}", f"{tmp_path}/texts,{b}"):
    with one_sentence("data.path=", ".txt' twice", "name it once"):
      text.find_text(path)
  with one_sentence("data.path names one source twice", repr(a), repr(again), "with both weights"):
    sources_of({a: 0.5, again: 0.5})
  with one_sentence(f"data.path has {a!r} in two sources", "take it out of one"):
    text.find_sources(config(data__path={a: 1, str(tmp_path / "texts"): 2}))
  assert len(text.find_sources(config(data__path={a: 1, b: 2}))) == 2
