"""The digest of an array: a hash of its bits and their positions, computed where the array is.

A checkpoint's record holds the digests of its arrays (checkpointing/record.py), and replicas are compared by the
digests of what they hold in common (replicas.py).
"""

from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 1 << 16  # elements that CPUs hash at a time: they fit into a core's cache


def digest(x: jax.Array) -> jax.Array:
  """A uint32 hash of every bit of an array and its position. It is the same under every layout.

  It is the sum, modulo 2³², of a hash of each element's bits and indices. The order of an integer sum does not matter,
  and a change of a single element always changes the digest. Other changes, such as two exchanged elements or a flipped
  bit in each of two, are missed about once in 2³² times. A sum of all elements' bits, each times an odd weight, would
  be cheaper. But it never sees the signs of two elements, because 2³¹ times the sum of two odd numbers is 0.
  """
  return _sum(jax.device_put(x, jax.memory.Space.Device), 0)  # an optimizer's state may be in the host's memory


def digest_by_rows(x: jax.Array, place: Any = 0) -> jax.Array:
  """The digest of what a CPU device holds: the same number, computed for at most BLOCK elements at a time.

  XLA's CPU backend sums a large array in two steps. Before the first it stores the hashes of all elements, which takes
  as much memory as the array, and more time. The compilers for GPUs and TPUs do not, and would be slow with blocks.

  Args:
    place: that of the first dimensions, of which `x` is a part.
  """
  if x.ndim < 2 or x.size <= BLOCK:
    return _sum(x, place)
  count, row = x.shape[0], x.size // x.shape[0]
  rows = max((n for n in range(1, BLOCK // row + 1) if count % n == 0), default=0)

  def block(i: jax.Array, total: jax.Array) -> jax.Array:
    first = i.astype(jnp.uint32)
    if not rows:  # even one is too large
      return total + digest_by_rows(x[i], _after(place, first))
    return total + _sum(jax.lax.dynamic_slice_in_dim(x, i * rows, rows), place, first * jnp.uint32(rows))

  return jax.lax.fori_loop(0, count // max(rows, 1), block, jnp.uint32(0))


def _sum(x: jax.Array, place: Any, first: Any = 0) -> jax.Array:
  """The sum of the hashes of an array's elements.

  Args:
    place: that of the dimensions before its own.
    first: the number of its first row.
  """
  words, place = bits(x), jnp.uint32(place)
  for dim in range(words.ndim):
    place = _after(place, jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) + jnp.uint32(0 if dim else first))
  return jnp.sum(_mix(words.astype(jnp.uint32) ^ _mix(place)), dtype=jnp.uint32)


def _after(place: Any, index: jax.Array) -> jax.Array:
  """A number for the indices of some dimensions and of the next. The odd factor keeps dimensions apart."""
  return place * jnp.uint32(0xCC9E2D51) + index


def bits(x: jax.Array) -> jax.Array:
  """The bits of an array's elements as unsigned integers. Those of 8 bytes become two, in a last dimension."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == bool:
    return x.astype(jnp.uint8)
  return jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")


def with_bits(words: jax.Array, like: jax.Array) -> jax.Array:
  """The opposite of `bits`, for an array of the dtype of `like`."""
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
  return words.astype(bool) if like.dtype == bool else jax.lax.bitcast_convert_type(words, like.dtype)


def _mix(x: jax.Array) -> jax.Array:
  """The finalizer of murmur3: a bijection in which every input bit affects every output bit."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x
