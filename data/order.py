"""The order of examples, computed and not stored: any position can be asked for without the ones before it.

`shuffled` is the order within one epoch of one source. `turns` is the order in which the sources of a mixture take
their turns.
"""

import functools
import heapq
import math
from fractions import Fraction

import numpy as np

MAX_PERIOD = 100_000  # the longest table of turns


def shuffled(
  place: np.ndarray, size: int | np.ndarray, seed: int, epoch: int | np.ndarray, stream: int | np.ndarray = 0
) -> np.ndarray:
  """The numbers of the examples at places [N] of an epoch's order, a permutation of range(size). Stores no table.

  `stream` gives sources of the same size orders of their own. Places of several sources and epochs are computed
  together: then `size`, `epoch` and `stream` are arrays [N], with those of each place.

  It is a Feistel network over the smallest even number of bits that can hold every place. A result outside the range is
  permuted again (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
  """
  sizes = np.atleast_1d(size).astype(np.uint64)
  bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]  # of the largest place
  half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
  orders, which = np.unique(np.atleast_1d(np.add(epoch, np.left_shift(stream, 32))), return_inverse=True)
  keys = np.stack([np.random.Philox(key=[seed, order]).random_raw(6) for order in orders.tolist()], axis=1)[:, which]

  def permute(x: np.ndarray, half: np.ndarray, keys: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low
    for key in keys:
      left, right = right, left ^ (_mix(right + key) & low)
    return (left << half) | right

  x = permute(place.astype(np.uint64), half, keys)
  of = lambda values, chosen: values[..., chosen] if values.shape[-1] > 1 else values
  while (outside := x >= sizes).any():
    x[outside] = permute(x[outside], of(half, outside), of(keys, outside))
  return x.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
  """The finalizer of splitmix64: every bit of the input affects every bit of the output."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def turns_of(weights: tuple[float, ...]) -> tuple[int, ...]:
  """How many turns each source takes in a period, in the ratio of the weights.

  Decimal weights are kept exactly: 0.7 and 0.3 become 7 and 3. A ratio that would need a period longer than MAX_PERIOD
  is rounded to one of that length. Every source gets at least one turn.
  """
  exact = [Fraction(repr(w)) for w in weights]
  scale = math.lcm(*(f.denominator for f in exact))
  counts = [int(f * scale) for f in exact]
  counts = [n // math.gcd(*counts) for n in counts]
  if sum(counts) <= MAX_PERIOD:
    return tuple(counts)
  ideal = [n * (MAX_PERIOD - len(counts)) / sum(counts) for n in counts]  # each has one turn already
  found = [math.floor(x) for x in ideal]
  by_remainder = sorted(range(len(ideal)), key=lambda i: found[i] - ideal[i])
  for i in by_remainder[: MAX_PERIOD - len(counts) - sum(found)]:
    found[i] += 1
  return tuple(n + 1 for n in found)


@functools.lru_cache(maxsize=8)
def turns(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
  """Whose turn it is at each position of a period, and how many turns that source had before, int32 [sum(counts)] each.

  After any number of positions, each source has had its share of them to within one turn. Turn j of a source with share
  w must not come before position floor(j / w), and must have come before position ceil((j + 1) / w). Taking the open
  turn with the earliest deadline meets all of these (Baruah et al. 1996, "Proportionate progress").
  """
  period = sum(counts)
  source, before = np.empty(period, np.int32), np.empty(period, np.int32)
  opens: list[list[tuple[int, int, int]]] = [[] for _ in range(period)]  # at a position: (deadline, source, turn)
  opens[0] = [(-(-period // n), s, 0) for s, n in enumerate(counts)]
  ready: list[tuple[int, int, int]] = []
  for position in range(period):
    for turn in opens[position]:
      heapq.heappush(ready, turn)
    opens[position] = []
    _, s, j = heapq.heappop(ready)
    source[position], before[position] = s, j
    if j + 1 < counts[s]:
      start = max(position + 1, (j + 1) * period // counts[s])
      opens[start].append((-(-(j + 2) * period // counts[s]), s, j + 1))
  return source, before


def turns_taken(counts: tuple[int, ...], positions: int) -> np.ndarray:
  """How many turns each source has taken after so many positions, int64 [sources]."""
  source, _ = turns(counts)
  periods, rest = divmod(positions, len(source))
  return periods * np.array(counts) + np.bincount(source[:rest], minlength=len(counts))
