"""The order of examples: a pure function of seed and step, the same for any number of processes."""

import threading

import numpy as np
import pytest
from helpers import program

from data.batches import Batches, EvaluationBatches, Mixture, id_words
from data.order import shuffled
from data.prefetch import prefetch
from data.synthetic import Synthetic


def source(size: int) -> Synthetic:
  return Synthetic(program(model__seq_len=8).sizes, first=0, size=size)


def batches(size: int, batch: int, seed: int) -> Batches:
  return Batches(Mixture((source(size),)), batch, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1024, 5000])
def test_shuffled_is_a_permutation_that_seed_and_epoch_change(size: int):
  order = shuffled(np.arange(size), size, seed=1, epoch=0)
  assert sorted(order) == list(range(size))
  if size >= 100:
    others = [shuffled(np.arange(size), size, seed=s, epoch=e) for s, e in ((1, 1), (2, 0))]
    assert all((order != other).mean() > 0.9 for other in [*others, np.arange(size)])


def test_shuffled_computes_each_position_by_itself():
  whole = shuffled(np.arange(1000), 1000, seed=3, epoch=7)
  np.testing.assert_array_equal(shuffled(np.array([17, 999, 4]), 1000, seed=3, epoch=7), whole[[17, 999, 4]])


def in_python(place: int, size: int, seed: int, epoch: int, stream: int = 0) -> int:
  """`shuffled` for one place, written out with Python's integers: a Feistel network of six rounds, walked in cycles.

  Its hash is the finalizer of splitmix64 (Steele et al. 2014), with the constants of Java's SplittableRandom.
  """
  keys = np.random.Philox(key=[seed, epoch + (stream << 32)]).random_raw(6).tolist()
  half = max(1, -(-(size - 1).bit_length() // 2))
  x = place
  while True:
    left, right = divmod(x, 2**half)
    for key in keys:
      z = (right + key) % 2**64
      z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
      z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
      left, right = right, left ^ (z ^ z >> 31) % 2**half
    x = left * 2**half + right
    if x < size:
      return x


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 1024, 1025, 5_000_000_000])
def test_the_order_is_that_of_the_network_in_python(size: int):
  """Also for numbers above 2³², and of several sources and epochs together."""
  places = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
  found = shuffled(places, size, seed=7, epoch=3, stream=2)
  assert found.tolist() == [in_python(p, size, 7, 3, 2) for p in places.tolist()]
  mixed = [(0, size, 4, 0), (size // 2, size, 5, 1), (3, 11, 4, 0), (10, 11, 0, 70_000)]
  place, sizes, epochs, streams = (np.array(x) for x in zip(*mixed, strict=True))
  assert shuffled(place, sizes, 9, epochs, streams).tolist() == [in_python(p, n, 9, e, s) for p, n, e, s in mixed]


def test_the_order_goes_on_where_numbers_are_computed_anew():
  """`ids` computes the numbers of 8,192 examples at a time, so this epoch is made of three such pieces."""
  size, batch = 20_000, 500
  order = batches(size, batch, seed=5)
  ids = np.concatenate([order.ids(step) for step in range(2 * size // batch)])
  for epoch in range(2):
    assert sorted(ids[epoch * size : (epoch + 1) * size]) == list(range(size)), f"epoch {epoch}"
  assert ids[[0, 8191, 8192, 8193, 19_999]].tolist() == [
    in_python(p, size, 5, 0) for p in (0, 8191, 8192, 8193, 19_999)
  ]
  assert ids[20_000] == in_python(0, size, 5, 1)
  for step in (39, 0, 17):  # in any order
    assert order.ids(step).tolist() == ids[step * batch :][:batch].tolist()


def test_a_batch_of_more_than_is_computed_at_a_time():
  ids = batches(20_000, 9000, seed=5).ids(1)
  assert ids[[0, 8999]].tolist() == [in_python(p, 20_000, 5, 0) for p in (9000, 17_999)]


def test_words_of_a_number_are_its_low_and_its_high_half():
  assert id_words(np.array([5, 2**32 + 7, 3 * 2**32])).tolist() == [[5, 0], [7, 1], [0, 3]]


@pytest.mark.parametrize("batch", [8, 12, 250])
def test_each_epoch_holds_each_example_once(batch: int):
  order, size = batches(100, batch, seed=5), 100
  ids = np.concatenate([order.ids(step) for step in range(3 * size // batch + 1)])
  for epoch in range(3):
    part = ids[epoch * size : (epoch + 1) * size]
    assert sorted(part) == list(range(size))[: len(part)] or len(part) < size


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_slices_of_processes_make_the_same_global_batch(processes: int):
  order, size = batches(50, 16, seed=2), 16
  for step in (0, 3, 11):  # step 3 crosses the end of an epoch
    rows = [slice(p * size // processes, (p + 1) * size // processes) for p in range(processes)]
    parts = [order.read(step, r) for r in rows]
    whole = order.read(step)
    for name in whole:
      np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])


@pytest.mark.parametrize("size, batch", [(100, 32), (96, 32), (5, 32), (100, 7)])
@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_holds_each_example_once(size: int, batch: int, processes: int):
  batch *= processes
  seen: list[int] = []
  for p in range(processes):
    rows = slice(p * batch // processes, (p + 1) * batch // processes)
    of_all = EvaluationBatches(source(size), batch)
    for part in (of_all.read(number, rows) for number in range(len(of_all))):
      assert len(part["id"]) == batch // processes
      seen += part["id"][part["mask"], 0].tolist()
  assert sorted(seen) == list(range(size))


def test_a_partial_evaluation_always_has_the_same_examples():
  def chosen(batch: int) -> list[int]:
    return [i for b in EvaluationBatches(source(100), batch, 10).all() for i in b["id"][b["mask"], 0].tolist()]

  assert len(chosen(4)) == 10
  assert chosen(4) == chosen(32)
  assert chosen(7) == [in_python(p, 100, seed=0, epoch=0) for p in range(10)]
  assert [len(EvaluationBatches(source(100), batch, 10)) for batch in (4, 5, 10, 32)] == [3, 2, 1, 1]
  assert [EvaluationBatches(source(100), 4, examples).total for examples in (0, 10, 100, 101)] == [100, 10, 100, 100]


def test_an_evaluation_is_padded_with_its_last_example():
  """What is masked must be an example that there is: of 16, place 16 has none."""
  for examples, last in ((10, 9), (16, 15)):
    *_, final = EvaluationBatches(source(16), 7, examples).all()
    padding = final["id"][~final["mask"], 0]
    assert len(padding) == -examples % 7
    assert set(padding.tolist()) == {in_python(last, 16, seed=0, epoch=0)}


def test_prefetch_keeps_the_order_and_reads_ahead():
  ahead = threading.Event()

  def make(i: int) -> int:
    if i == 1:
      ahead.set()
    return i * i

  with prefetch(make, range(5)) as reader:
    assert ahead.wait(timeout=30)  # item 1 is made before item 0 is asked for
    assert list(reader) == [0, 1, 4, 9, 16]


def test_prefetch_by_several_threads_keeps_the_order():
  together = threading.Barrier(3, timeout=30)

  def make(i: int) -> int:
    together.wait()  # three at a time, or none
    return i * i

  with prefetch(make, range(9), ahead=3, threads=3) as reader:
    assert list(reader) == [i * i for i in range(9)]


def test_prefetch_raises_what_its_thread_raised_and_stops_early():
  def make(i: int) -> int:
    if i == 2:
      raise RuntimeError("broken record")
    return i

  with pytest.raises(RuntimeError, match="broken record"), prefetch(make, range(5)) as reader:
    list(reader)
  with prefetch(make, iter(int, 1)) as reader:  # an endless supply
    next(reader)
  assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
