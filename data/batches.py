"""Batches: which examples are in the batch at a step, the rows that this process reads, and padding.

The order is computed, not stored (order.py). So any batch can be read without the ones before it, and resuming a run
needs only its step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from data.dataset import HostBatch as HostBatch
from data.dataset import Source as Source
from data.order import shuffled, turns, turns_of, turns_taken

TOGETHER = 1 << 13  # examples whose numbers are computed at the same time
Rows = slice | np.ndarray  # selects rows of a global batch


@dataclasses.dataclass(frozen=True)
class Mixture:
  """Sources that take turns, each shuffled by itself, with epochs of its own.

  Attributes:
    sources: the examples of each part. The whole numbers them in a row, the first source's first.
    weights: the share of each source, in any unit; () for equal shares.
    first: the position in the run from which on this mixture holds. Not 0 if it changed in mid-run.
    given: how many examples each source had given before that; () for none.
    streams: give sources of the same size orders of their own; () for 0, 1, ... in each size.
  """

  sources: Sequence[Source]
  weights: tuple[float, ...] = ()
  first: int = 0
  given: tuple[int, ...] = ()
  streams: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    sizes = [len(source) for source in self.sources]
    object.__setattr__(self, "streams", self.streams or tuple(sizes[:s].count(n) for s, n in enumerate(sizes)))

  @functools.cached_property
  def turns(self) -> tuple[int, ...]:
    """How many examples each source gives in a period of the mixture."""
    return turns_of(self.weights or (1,) * len(self.sources))

  @functools.cached_property
  def starts(self) -> np.ndarray:
    """The number of each source's first example, and the number of all examples, int64 [sources + 1]."""
    return np.cumsum([0, *(len(source) for source in self.sources)])

  def counts(self, position: int) -> np.ndarray:
    """How many examples each source has given in the run before a position, int64 [sources]."""
    return turns_taken(self.turns, position - self.first) + (np.array(self.given) if self.given else 0)

  def epochs(self, position: int) -> np.ndarray:
    """How many epochs each source has given in the run before a position, float64 [sources]."""
    return self.counts(position) / np.diff(self.starts)

  def ids(self, positions: np.ndarray, seed: int) -> np.ndarray:
    """The numbers of the examples at these positions of the run, int64 [N]."""
    source, before = turns(self.turns)
    period, turn = np.divmod(positions - self.first, len(source))
    whose = source[turn]
    given = np.array(self.given or (0,) * len(self.sources))
    place = period * np.array(self.turns)[whose] + before[turn] + given[whose]
    sizes = np.diff(self.starts)[whose]
    epoch, place = np.divmod(place, sizes)
    return self.starts[whose] + shuffled(place, sizes, seed, epoch, np.array(self.streams)[whose])

  def read(self, ids: np.ndarray) -> HostBatch:
    """The examples with these numbers, stacked."""
    if len(self.sources) == 1:
      return self.sources[0].read(ids)
    whose = np.searchsorted(self.starts, ids, side="right") - 1
    parts = [(whose == s, self.sources[s].read(ids[whose == s] - self.starts[s])) for s in np.unique(whose)]
    out = {name: np.empty((len(ids), *x.shape[1:]), x.dtype) for name, x in parts[0][1].items()}
    for mine, part in parts:
      for name, x in part.items():
        out[name][mine] = x
    return out


@dataclasses.dataclass(frozen=True)
class Batches:
  """The training batches of a mixture, in their global order.

  Attributes:
    mixture: the examples.
    size: how many examples a global batch holds.
    seed: the seed of the order.
  """

  mixture: Mixture
  size: int
  seed: int = 0

  def ids(self, step: int) -> np.ndarray:
    """The numbers of the examples in the global batch at a step, int64 [size]. A batch may span two epochs."""
    if step * self.size < self.mixture.first:
      raise ValueError(f"step {step} is before the step from which on this mixture holds")
    together = max(1, TOGETHER // self.size)
    first = step - step % together
    return self._ids(first, together)[(step - first) * self.size :][: self.size]

  @functools.cached_property
  def _ids(self) -> Callable[[int, int], np.ndarray]:
    """The numbers in several batches. NumPy computes many of them almost as fast as a few, so they are kept."""

    def compute(step: int, count: int) -> np.ndarray:
      positions = step * self.size + np.arange(count * self.size)
      # A change of the mixture may be in the middle of these batches. Nobody asks for those before it.
      return self.mixture.ids(np.maximum(positions, self.mixture.first), self.seed)

    return functools.lru_cache(maxsize=2)(compute)

  def read(self, step: int, rows: Rows = slice(None)) -> HostBatch:
    """Rows of the global batch at a step, with `id` and an all-true `mask`."""
    ids = self.ids(step)[rows]
    return self.mixture.read(ids) | {"id": id_words(ids), "mask": np.ones(len(ids), np.bool_)}


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
  """Batches that together hold `examples` examples of a source (all if 0 or more than there are), each exactly once.

  A fixed shuffle picks the examples, so that a few represent all. The last batch is padded, with a false `mask`.
  """

  source: Source
  size: int
  examples: int = 0

  @property
  def total(self) -> int:
    """How many examples all batches hold."""
    return min(self.examples or len(self.source), len(self.source))

  def __len__(self) -> int:
    return -(-self.total // self.size)

  def read(self, number: int, rows: Rows = slice(None)) -> HostBatch:
    """Rows of the batch with this number, with `id` and `mask`."""
    place = number * self.size + np.arange(self.size)[rows]
    ids = shuffled(np.minimum(place, self.total - 1), len(self.source), seed=0, epoch=0)
    return self.source.read(ids) | {"id": id_words(ids), "mask": place < self.total}

  def all(self) -> Iterator[HostBatch]:
    """All batches, whole."""
    return (self.read(number) for number in range(len(self)))


def id_words(ids: np.ndarray) -> np.ndarray:
  """Splits example numbers int64 [B] into words uint32 [B, 2], the low word first. JAX disables 64 bits by default."""
  return np.ascontiguousarray(ids, "<i8").view("<u4").reshape(-1, 2)
