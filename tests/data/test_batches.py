"""The order of examples: a pure function of seed and step, the same for any number of processes."""

import threading

import numpy as np
import pytest
from helpers import program

from data.batches import Batches, EvaluationBatches, Mixture
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
  assert chosen(4) != list(range(10))


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
