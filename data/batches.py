"""Batches: the global order of examples, the rows that this process reads, padding, and prefetching.

The order is computed, not stored: `shuffled` maps a position in an epoch to the number of an example. So any batch can
be read without the ones before it, and resuming a run needs only its step.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

HostBatch = dict[str, np.ndarray]  # the first dimension of each array is the examples
Rows = slice | np.ndarray  # selects rows of a global batch


class Source(Protocol):
  """Examples numbered from 0."""

  def __len__(self) -> int: ...

  def read(self, ids: np.ndarray) -> HostBatch:
    """The examples with these numbers, stacked."""
    ...


@dataclasses.dataclass(frozen=True)
class Batches:
  """The batches of a source, in their global order.

  Attributes:
    source: the examples.
    size: how many examples a global batch holds.
    seed: the seed of the order.
  """

  source: Source
  size: int
  seed: int = 0

  def train_ids(self, step: int) -> np.ndarray:
    """The numbers of the examples in the global batch at a step, [size]. A batch may span two epochs."""
    position = step * self.size + np.arange(self.size)
    epoch, place = np.divmod(position, len(self.source))
    return np.concatenate(
      [shuffled(place[epoch == e], len(self.source), self.seed, e) for e in range(epoch[0], epoch[-1] + 1)]
    )

  def train(self, step: int, rows: Rows = slice(None)) -> HostBatch:
    """Reads rows of the global batch at a step, with `id` and an all-true `mask`."""
    return self._read(self.train_ids(step)[rows], np.ones(self.size, np.bool_)[rows])

  def evaluation(self, rows: Rows = slice(None), examples: int | None = None) -> Iterator[HostBatch]:
    """Reads rows of batches that together hold `examples` examples of the source (all if None), each exactly once.

    A fixed shuffle picks the examples, so that a few represent all. The last batch is padded, with a false `mask`.
    """
    total = len(self.source) if examples is None else min(examples, len(self.source))
    for start in range(0, total, self.size):
      place = start + np.arange(self.size)[rows]
      ids = shuffled(np.minimum(place, total - 1), len(self.source), seed=0, epoch=0)
      yield self._read(ids, place < total)

  def _read(self, ids: np.ndarray, mask: np.ndarray) -> HostBatch:
    return self.source.read(ids) | {"id": id_words(ids), "mask": mask}


def id_words(ids: np.ndarray) -> np.ndarray:
  """Splits example numbers int64 [B] into words uint32 [B, 2], the low word first. JAX disables 64 bits by default."""
  return np.stack([ids & 0xFFFFFFFF, ids >> 32], axis=-1).astype(np.uint32)


def shuffled(place: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
  """The numbers of the examples at places [N] of an epoch's order, a permutation of range(size). Stores no table.

  It is a Feistel network over the smallest even number of bits that can hold every place. A result outside the range is
  permuted again (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
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
  """The finalizer of splitmix64: every bit of the input affects every bit of the output."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


class prefetch:
  """Iterates over `make(item)` for each item. A thread makes up to `ahead` results in advance.

  Use it as a context manager; leaving it stops the thread. If `make` raises an exception, the consumer gets it in
  place of that result.
  """

  def __init__(self, make: Callable[[Any], Any], items: Iterable[Any], ahead: int = 2):
    self._ready: queue.Queue = queue.Queue(maxsize=ahead)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._work, args=(make, items), daemon=True)

  def _work(self, make: Callable[[Any], Any], items: Iterable[Any]) -> None:
    try:
      for item in items:
        if not self._put((make(item), None)):
          return
      self._put((None, StopIteration()))
    except BaseException as error:  # any error goes to the consumer
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
    value, error = self._ready.get()
    if error is not None:
      raise error
    return value
