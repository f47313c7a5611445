"""Rows of a table by token ids, which may be split over the vocabulary, and their gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from models.dimensions import Sharding, resized
from models.ops.gradients import with_gradient


def lookup(table: jax.Array, ids: jax.Array, sharding: Sharding) -> jax.Array:
  """Rows of a table [V, D], for token ids [B, T] → [B, T, D].

  Every device looks up the ids that its part of the table holds, and the results are summed. This is written out
  because XLA's partitioner aborts the process on a sharded lookup inside a pipeline's shard_map (jax 0.12.0.1).
  """
  parts = sharding.shards("vocab")
  if parts == 1:
    # The ids are pinned. Otherwise the compiler splits them like the result's positions, and sends them by permutes.
    return table[sharding.activation(ids, "batch", None)]
  rows = -(-table.shape[0] // parts)
  table = resized(table, (rows * parts, table.shape[1]))
  tables = sharding.activation(table.reshape(parts, rows, -1), "vocab", None, None)
  local = sharding.activation(ids - rows * jnp.arange(parts).reshape(-1, 1, 1), "vocab", "batch", None)  # [parts, B, T]
  found = jax.vmap(lambda part, i: part[i])(tables, jnp.clip(local, 0, rows - 1))
  found = sharding.activation(found, "vocab", "batch", None, None)
  found = jnp.where(((local >= 0) & (local < rows))[..., None], found, 0)
  return jax.lax.reduce(found, np.zeros((), found.dtype), jax.lax.add, (0,))  # jnp.sum would send float32


def summed_in_float32(table: jax.Array, ids: jax.Array, sharding: Sharding) -> jax.Array:
  """`lookup` in a table in bfloat16.

  An id's gradient is the sum over all places where it stands. Bfloat16 has 8 significant bits, so a sum of 1,024 equal
  numbers stops at about a third of the result. So each device adds up its own tokens in float32. Like the gradients of
  other weights, its sum is rounded once, and then added to those of other devices.
  """
  vocab, width = table.shape

  def own_sums(ids: jax.Array, g: jax.Array, rows: jax.Array) -> jax.Array:
    """A device's contribution to the gradient of its part of the table [1, v, D], whose rows have these numbers [v]."""
    at = ids - rows[0]
    at = jnp.where(at < 0, len(rows), at)  # rows of other devices; a negative index would count from the end
    sums = jnp.zeros((len(rows), width), jnp.float32).at[at].add(g.astype(jnp.float32), mode="drop")
    return sums.astype(table.dtype)[None]

  def backward(ids: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    rows = jnp.arange(vocab + -vocab % sharding.shards("vocab"))
    dims = [("batch", None), ("batch", None, None), ("vocab",)]
    parts = sharding.local(own_sums, ids, g, rows, dims=dims, results=("batch", "vocab", None))
    sums = jax.lax.reduce(parts, np.zeros((), parts.dtype), jax.lax.add, (0,))  # jnp.sum would send float32
    return resized(sums, table.shape), None

  return with_gradient(lambda table, ids: (lookup(table, ids, sharding), ids), backward, table, ids)
