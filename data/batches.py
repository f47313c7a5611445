"""From numbered examples to batches: a global order, this process's rows of it, padding, and reading ahead.

The order is arithmetic, not a list: `shuffled` computes where a position of an epoch lies in the data set, so any
batch of any epoch can be read without reading the ones before, and resuming a run takes only its step.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

HostBatch = dict[str, np.ndarray]  # arrays with the examples on their first axis
Rows = slice | np.ndarray  # which rows of a global batch


class Source(Protocol):
  """Examples numbered from 0."""

  def __len__(self) -> int: ...

  def read(self, ids: np.ndarray) -> HostBatch:
    """The examples with these numbers, stacked."""
    ...


@dataclasses.dataclass(frozen=True)
class Batches:
  """The global sequence of batches of a source.

  Attributes:
    source: the examples.
    size: examples in a global batch.
    seed: of the order.
  """

  source: Source
  size: int
  seed: int = 0

  def train_ids(self, step: int) -> np.ndarray:
    """The numbers of the examples in the global batch at a step, [size]; epochs follow one another without a gap."""
    position = step * self.size + np.arange(self.size)
    epoch, place = np.divmod(position, len(self.source))
    return np.concatenate(
      [shuffled(place[epoch == e], len(self.source), self.seed, e) for e in range(epoch[0], epoch[-1] + 1)]
    )

  def train(self, step: int, rows: Rows = slice(None)) -> HostBatch:
    """These rows of the global batch at a step, with `id` and an all-true `mask`."""
    return self._read(self.train_ids(step)[rows], np.ones(self.size, np.bool_)[rows])

  def evaluation(self, rows: Rows = slice(None), examples: int | None = None) -> Iterator[HostBatch]:
    """These rows of the batches that together hold `examples` of the source (all if None), each exactly once.

    A fixed shuffle picks them, so that few are like all. The last batch is filled up, its `mask` false there.
    """
    total = len(self.source) if examples is None else min(examples, len(self.source))
    for start in range(0, total, self.size):
      place = start + np.arange(self.size)[rows]
      ids = shuffled(np.minimum(place, total - 1), len(self.source), seed=0, epoch=0)
      yield self._read(ids, place < total)

  def _read(self, ids: np.ndarray, mask: np.ndarray) -> HostBatch:
    return self.source.read(ids) | {"id": id_words(ids), "mask": mask}


def id_words(ids: np.ndarray) -> np.ndarray:
  """Example numbers int64 [B] as uint32 words [B, 2], the low word first: JAX has no 64-bit integers by default."""
  return np.stack([ids & 0xFFFFFFFF, ids >> 32], axis=-1).astype(np.uint32)


def shuffled(place: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
  """Where the places [N] of an epoch's order lie in a data set of `size` examples: a permutation of range(size).

  A Feistel network over the smallest even number of bits that holds `size`, walked again from any value that falls
  outside (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Costs no memory.
  """
  half = max(1, ((size - 1).bit_length() + 1) // 2)
  low = np.uint64((1 << half) - 1)
  keys = np.random.Philox(key=[seed, epoch]).random_raw(6)

  def permute(x: np.ndarray) -> np.ndarray:
    left, right = x >> np.uint64(half), x & low
    for key in keys:
      left, right = right, left ^ (_mix(right + key) & low)
    return (left << np.uint64(half)) | right

  x = permute(place.astype(np.uint64))
  while (outside := x >= size).any():
    x[outside] = permute(x[outside])
  return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
  """The finalizer of splitmix64: every bit of the input reaches every bit of the output."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


class prefetch:
  """Iterates over `make(item)` for the items, made by a thread that runs up to `ahead` of them in advance.

  Use as a context manager; leaving it stops the thread. `waited` is the time in seconds that the consumer spent
  waiting. An exception of `make` is raised where its result would have come.
  """

  def __init__(self, make: Callable[[Any], Any], items: Iterable[Any], ahead: int = 2):
    self.waited = 0.0
    self._ready: queue.Queue = queue.Queue(maxsize=ahead)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._work, args=(make, items), daemon=True)

  def _work(self, make: Callable[[Any], Any], items: Iterable[Any]) -> None:
    try:
      for item in items:
        if not self._put((make(item), None)):
          return
      self._put((None, StopIteration()))
    except BaseException as error:  # handed to the consumer, whatever it is
      self._put((None, error))

  def _put(self, result: tuple[Any, BaseException | None]) -> bool:
    while not self._stop.is_set():
      try:
        self._ready.put(result, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False

  def __enter__(self) -> "prefetch":
    self._thread.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._stop.set()
    self._thread.join()

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    start = time.perf_counter()
    value, error = self._ready.get()
    self.waited += time.perf_counter() - start
    if error is not None:
      raise error
    return value
