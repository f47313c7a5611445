"""The digest of an array: a hash of its bits and their positions, computed where the array is.

A checkpoint's record holds the digests of its arrays (checkpointing/record.py), and replicas are compared by the
digests of what they hold in common (replicas.py).
"""

import jax
import jax.numpy as jnp


def digest(x: jax.Array) -> jax.Array:
  """A uint32 hash of every bit of an array and its position. It is the same under every layout.

  It is the sum, modulo 2³², of a hash of each element's bits and indices. The order of an integer sum does not matter,
  and a change of a single element always changes the digest. Other changes, such as two exchanged elements or a flipped
  bit in each of two, are missed about once in 2³² times. A sum of all elements' bits, each times an odd weight, would
  be cheaper. But it never sees the signs of two elements, because 2³¹ times the sum of two odd numbers is 0.
  """
  x = jax.device_put(x, jax.memory.Space.Device)  # an optimizer's state may be in the host's memory
  words = bits(x)
  place = jnp.zeros(words.shape, jnp.uint32)
  for dim in range(words.ndim):  # the odd factor keeps the indices of different dimensions apart
    place = place * jnp.uint32(0xCC9E2D51) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
  return jnp.sum(_mix(words.astype(jnp.uint32) ^ _mix(place)), dtype=jnp.uint32)


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
