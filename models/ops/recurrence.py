"""Linear recurrences over the positions of a text: state = decay · state before + new, in float32.

`jax.lax.associative_scan` computes all states of a chunk in log(T) rounds. If devices share the positions
(positions.py), each computes its own two chunks as if they began a text. Then the total decay and the last state of
every chunk are all-gathered, which is small. Each device combines those before its chunks, in order.

The backward pass is the same recurrence from the other end, so it gathers as much again, and reduces nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.ops.layers import with_gradient
from models.ops.positions import chunks, halves, join, own
from models.remat import KERNEL


def states(decay: jax.Array, new: jax.Array, segments: jax.Array | None, sharding: Sharding) -> jax.Array:
  """The state after each position [B, t, N, H].

  Args:
    decay, new: [B, t, N, H] in float32, of a device's own positions.
    segments: [B, T], of all positions: a state begins with 0 where a segment does; None: each row is one segment.
  """
  if segments is not None:
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    begins = own(sharding.activation(begins, "batch", None), sharding)
    decay = jnp.where(begins[..., None, None], 0, decay)
  dims = ("batch", None, "heads", None)
  return sharding.local(functools.partial(_states, sharding), decay, new, dims=(dims, dims), results=dims)


def _states(sharding: Sharding, decay: jax.Array, new: jax.Array) -> jax.Array:
  def forward(decay: jax.Array, new: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    before = checkpoint_name(_before(decay, new, sharding), KERNEL)
    return decay * before + new, (decay, before)

  def backward(given: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    decay, before = given
    g = g + _before(decay, decay * g, sharding, reverse=True)  # of a state: by its own result, and by later ones
    return g * before, g

  return with_gradient(forward, backward, decay, new)


def _before(decay: jax.Array, new: jax.Array, sharding: Sharding, reverse: bool = False) -> jax.Array:
  """The state before each position; with `reverse`, of the recurrence that begins at the end of a text."""
  count = sharding.shards("positions")
  if count == 1:
    return _exclusive(*_scan(decay, new, 1, reverse), 1, reverse)[1]
  parts = [_scan(*part, 1, reverse) for part in zip(halves(decay), halves(new), strict=True)]
  ends = jnp.stack([jnp.stack([x[:, 0 if reverse else -1] for x in part]) for part in parts])  # [2 chunks, 2, B, N, H]
  every = sharding.across(jax.lax.all_gather, ends, "positions")  # [devices, 2 chunks, 2, B, N, H]
  ordered = jnp.concatenate([every[:, 0], every[::-1, 1]])
  _, first = _exclusive(*_scan(ordered[:, 0], ordered[:, 1], 0, reverse), 0, reverse)  # [chunks, B, N, H]
  device = sharding.index("positions")
  found = []
  for number, part in zip((device, chunks(count) - 1 - device), parts, strict=True):
    total, state = _exclusive(*part, 1, reverse)
    found.append(total * first[number][:, None] + state)
  return join(*found)


def _scan(decay: jax.Array, new: jax.Array, axis: int, reverse: bool) -> tuple[jax.Array, jax.Array]:
  """The total decay, and the state of a text that begins with 0, after each entry along an axis."""
  after = lambda early, late: (early[0] * late[0], late[0] * early[1] + late[1])
  total, state = jax.lax.associative_scan(after, (decay, new), axis=axis, reverse=reverse)
  return total, state


def _exclusive(total: jax.Array, state: jax.Array, axis: int, reverse: bool) -> tuple[jax.Array, jax.Array]:
  """The same before each entry."""
  size = total.shape[axis] - 1

  def shifted(x: jax.Array, first: float) -> jax.Array:
    edge = jnp.full_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis), first)
    kept = jax.lax.slice_in_dim(x, 1 if reverse else 0, size + 1 if reverse else size, axis=axis)
    return jnp.concatenate([kept, edge] if reverse else [edge, kept], axis=axis)

  return shifted(total, 1.0), shifted(state, 0.0)
