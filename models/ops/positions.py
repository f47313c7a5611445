"""Which positions of a text a device has, if several devices share them.

A text is cut into 2·n equal chunks. Each of n devices has an early and a late one, here for four devices:

    device    0 | 1 | 2 | 3 | 3 | 2 | 1 | 0     positions →

With a causal mask, each pair of devices then has two pairs of chunks that see each other, whichever devices they are.
So all devices compute equally many scores (context.py). With consecutive chunks, the last device would compute 2·n - 1
times as many as the first. Positions, segments, targets and dropout follow this order; data, batches and checkpoints do
not know it.
"""

import jax
import jax.numpy as jnp

from models.dimensions import Sharding


def own(x: jax.Array, sharding: Sharding) -> jax.Array:
  """A device's own positions of x [B, T, ...], which has all positions: the early chunk, then the late one."""
  count = sharding.shards("positions")
  return x if count == 1 else of_device(x, sharding.index("positions"), count)


def of_device(x: jax.Array, device: jax.Array, count: int) -> jax.Array:
  """The positions of one of `count` devices: [B, T, ...] → [B, T/count, ...]."""
  size = x.shape[1] // chunks(count)
  chunk = lambda number: jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=1)
  return join(chunk(device), chunk(chunks(count) - 1 - device))


def chunks(count: int) -> int:
  """Into how many chunks so many devices cut a text."""
  return 2 * count


def halves(x: jax.Array) -> list[jax.Array]:
  """The early and the late half of a device's own positions [B, t, ...]."""
  return jnp.split(x, 2, axis=1)


def join(early: jax.Array, late: jax.Array) -> jax.Array:
  """The way back from `halves`: two of [B, t/2, ...] → [B, t, ...]."""
  return jnp.concatenate([early, late], axis=1)
