"""Linear recurrences over the positions of a text: state = decay · state before + new, in float32.

`jax.lax.associative_scan` computes all states of a chunk in log(T) rounds. If devices share the positions
(positions.py), each computes its own two chunks as if they began a text. Then the total decay and the last state of
every chunk are all-gathered, which is small, and each device combines those before its chunks, in order.

The backward pass is the same recurrence from the other end. So it gathers as much again, and reduces nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.ops.gradients import with_gradient
from models.ops.positions import chunks, halves, join, own
from models.remat import KERNEL

Pair = tuple[jax.Array, jax.Array]  # a decay, and a state that began with 0


class State(NamedTuple):
  """The cache of a recurrence: a state [B, K, H], and how many positions of a text are read first [B]; all by layer."""

  state: jax.Array
  lengths: jax.Array

  def of_layer(self, number: jax.Array) -> "State":
    """The cache of one block."""
    return State(*(jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in self))

  def add(self, new: "State", start: jax.Array | int) -> "State":
    """The cache of all blocks after new positions."""
    return new


def states(decay: jax.Array, new: jax.Array, segments: jax.Array | None, sharding: Sharding) -> jax.Array:
  """The state after each position [B, t, K, H].

  Args:
    decay, new: [B, t, K, H] in float32, of a device's own positions.
    segments: [B, T], of all positions: a state begins with 0 where a segment does; None: each row is one segment.
  """
  if segments is not None:
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    decay = jnp.where(own(sharding.activation(begins, "batch", None), sharding)[..., None, None], 0, decay)
  before, dims = functools.partial(_before, sharding), ("batch", None, "heads", None)

  def forward(decay: jax.Array, new: jax.Array) -> tuple[jax.Array, Pair]:
    earlier = checkpoint_name(before(decay, new), KERNEL)
    return decay * earlier + new, (decay, earlier)

  def backward(given: Pair, g: jax.Array) -> Pair:
    decay, earlier = given
    g += before(decay, decay * g, reverse=True)  # what a state changes by its own result, and by later ones
    return g * earlier, g

  run = lambda decay, new: with_gradient(forward, backward, decay, new)
  return sharding.local(run, decay, new, dims=(dims, dims), results=dims)


def _before(sharding: Sharding, decay: jax.Array, new: jax.Array, reverse: bool = False) -> jax.Array:
  """The state before each position; with `reverse`, of the recurrence that begins at the end of a text."""
  count, last = sharding.shards("positions"), 0 if reverse else -1
  if count == 1:
    return _exclusive(decay, new, 1, reverse)[1]
  parts = [*zip(halves(decay), halves(new), strict=True)]
  found = [_exclusive(*part, 1, reverse) for part in parts]
  at_end = lambda pair: tuple(x[:, last] for x in pair)
  ends = jnp.stack([jnp.stack(_after(*map(at_end, both))) for both in zip(found, parts, strict=True)])
  every = sharding.across(jax.lax.all_gather, ends, "positions")  # [devices, 2 chunks, 2, B, K, H]
  ordered = jnp.concatenate([every[:, 0], every[::-1, 1]])
  first = _exclusive(ordered[:, 0], ordered[:, 1], 0, reverse)[1]  # [chunks, B, K, H]
  early = sharding.index("positions")
  numbers = (early, chunks(count) - 1 - early)
  return join(*(total * first[n][:, None] + state for n, (total, state) in zip(numbers, found, strict=True)))


def _exclusive(decay: jax.Array, new: jax.Array, axis: int, reverse: bool) -> Pair:
  """The total decay and the state before each entry along an axis."""
  edges = [((0, 0, 0), (-1, 1, 0) if reverse else (1, -1, 0))[at == axis] for at in range(decay.ndim)]
  shifted = jax.lax.pad(decay, jnp.ones((), decay.dtype), edges), jax.lax.pad(new, jnp.zeros((), new.dtype), edges)
  return jax.lax.associative_scan(_after, shifted, axis=axis, reverse=reverse)


def _after(early: Pair, late: Pair) -> Pair:
  """Joins two parts that follow one another."""
  return early[0] * late[0], late[0] * early[1] + late[1]
