"""Pieces of arrays: what devices hold of them, which process keeps which, and new arrays put together from old pieces.

A piece is known by where it is in its array. So the pieces that one layout has saved fit any other layout.
"""

import collections
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Bounds = tuple[tuple[int, int], ...]  # where a piece starts and stops, in each dimension of its array


class Piece(NamedTuple):
  """A rectangular part of an array. `name` and `dtype` are the array's."""

  name: str
  bounds: Bounds
  dtype: str

  @property
  def shape(self) -> tuple[int, ...]:
    return shape_of(self.bounds)

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Held(NamedTuple):
  """A piece, and the processes that have it on one of their devices."""

  piece: Piece
  processes: frozenset[int]


def shape_of(bounds: Bounds) -> tuple[int, ...]:
  return tuple(stop - start for start, stop in bounds)


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
  """The bounds of a shard, given its index as JAX has it."""
  return tuple(
    (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
  )


def held(arrays: Iterable[tuple[str, Any]]) -> list[Held]:
  """All pieces of named arrays, or of abstract ones, under their shardings; each piece once."""
  found = []
  for name, x in arrays:
    holders: dict[Bounds, set[int]] = collections.defaultdict(set)
    for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items():
      holders[bounds_of(index, x.shape)].add(device.process_index)
    found += [Held(Piece(name, at, str(x.dtype)), frozenset(who)) for at, who in sorted(holders.items())]
  return found


def shared_out(pieces: Iterable[Held], processes: int) -> list[list[Piece]]:
  """Which process keeps which pieces: each piece is kept once, by the one of its holders with the fewest bytes so far.

  Pieces with a single holder come first, then large ones. All processes come to the same result.
  """
  kept: list[list[Piece]] = [[] for _ in range(processes)]
  loads = [0] * processes
  for piece, holders in sorted(pieces, key=lambda one: (len(one.processes) > 1, -one.piece.bytes, one.piece)):
    rank = min(sorted(holders), key=lambda process: loads[process])
    kept[rank].append(piece)
    loads[rank] += piece.bytes
  return kept


def overlap(one: Bounds, other: Bounds) -> Bounds | None:
  """The part of an array that both have; None if there is none."""
  both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
  return both if all(start < stop for start, stop in both) else None


def missing(target: Bounds, pieces: Iterable[Bounds]) -> int:
  """How many elements of `target` are in none of these pieces, which do not overlap."""
  found = (overlap(target, piece) for piece in pieces)
  return math.prod(shape_of(target)) - sum(math.prod(shape_of(both)) for both in found if both is not None)


def assembled(target: Bounds, dtype: str, values: Mapping[Bounds, np.ndarray]) -> np.ndarray:
  """The part `target` of an array, given the values of pieces that together cover it, up to padding of zeros."""
  out = np.zeros(shape_of(target), jnp.dtype(dtype))
  for bounds, piece in values.items():
    if (both := overlap(target, bounds)) is not None:  # that of a number is ()
      out[_within(both, target)] = piece[_within(both, bounds)]
  return out


def _within(part: Bounds, whole: Bounds) -> tuple[slice, ...]:
  return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, whole, strict=True))


def own_shards(x: jax.Array) -> dict[Bounds, jax.Array]:
  """What the devices of this process hold of an array, each piece once."""
  return {bounds_of(shard.index, x.shape): shard.data for shard in x.addressable_shards}


def offset(hosts: Sequence[str]) -> int:
  """How far away in the ring of processes a neighbour is: as many as possible have theirs on another host. 0: no other.

  Process i keeps a copy for process i - offset, so each process has one neighbour, and is that of one.
  """
  count = len(hosts)
  away = lambda step: sum(hosts[i] != hosts[(i + step) % count] for i in range(count))
  return max(range(1, count), key=lambda step: (away(step), -step), default=0)


def neighbours(hosts: Collection[str]) -> list[int]:
  """For each process, the one that keeps a copy of its portion; itself if there is no other process."""
  names = list(hosts)
  away = offset(names)
  return [(i + away) % len(names) for i in range(len(names))]
