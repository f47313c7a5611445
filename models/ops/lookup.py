"""Rows of a table by token ids, with a gradient that is summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from models.dimensions import Sharding, resized
from models.ops.layers import with_gradient


def summed_in_float32(table: jax.Array, ids: jax.Array, sharding: Sharding) -> jax.Array:
  """`Sharding.lookup`: rows of a table [V, D] in bfloat16, for ids [B, T] → [B, T, D].

  An id's gradient is the sum over all places where it stands. Bfloat16 has 8 significant bits, so there a sum of 1,024
  equal numbers stops at half of it. So each device adds up its own tokens in float32. Like the gradients of other
  weights, its sum is rounded once, and then added to those of other devices.
  """
  vocab, width = table.shape

  def own_sums(ids: jax.Array, g: jax.Array, rows: jax.Array) -> jax.Array:
    """A device's contribution to its part of the table [1, v, D], whose rows have these numbers [v]."""
    at = ids - rows[0]
    at = jnp.where(at < 0, len(rows), at)  # rows of others; a negative index would count from the end
    sums = jnp.zeros((len(rows), width), jnp.float32).at[at].add(g.astype(jnp.float32), mode="drop")
    return sums.astype(table.dtype)[None]

  def backward(ids: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    rows = jnp.arange(vocab + -vocab % sharding.shards("vocab"))
    dims = [("batch", None), ("batch", None, None), ("vocab",)]
    parts = sharding.local(own_sums, ids, g, rows, dims=dims, results=("batch", "vocab", None))
    sums = jax.lax.reduce(parts, np.zeros((), parts.dtype), jax.lax.add, (0,))  # jnp.sum would send float32
    return resized(sums, table.shape), None

  return with_gradient(lambda table, ids: (sharding.lookup(table, ids), ids), backward, table, ids)
