"""Stores weights, and an optimizer's state, in another precision between steps."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from training.optimizers.rule import Tree


def stored(transform: optax.GradientTransformation, dtype: str) -> optax.GradientTransformationExtraArgs:
  """The same transformation, which computes in float32 and stores its state in `dtype`.

  Bfloat16 has 8 significant bits. A second moment changes by a share of 1 - b2 in a step. If that is less than half of
  its last bit, rounding to the nearest loses every change. So numbers are rounded up or down at random, by chances that
  keep their mean (Gupta et al. 2015, arXiv:1502.02551). The chances depend on the seed, the step and the
  position in the array, so they are the same under every layout.
  """
  inner = optax.with_extra_args_support(transform)

  def init(params: Tree) -> Any:
    return _cast(inner.init(params), dtype)

  def update(gradients: Tree, state: Any, params: Tree = None, *, key: jax.Array, **more: Any) -> tuple[Tree, Any]:
    given = (_cast(gradients, "float32"), _cast(state, "float32"))
    updates, new = inner.update(*given, params, key=key, **more)
    return updates, _rounded(new, jnp.dtype(dtype), key)

  return optax.GradientTransformationExtraArgs(init, update)


def _cast(tree: Tree, dtype: str) -> Tree:
  return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _rounded(tree: Tree, dtype: jnp.dtype, key: jax.Array) -> Tree:
  if dtype == jnp.float32:
    return tree
  leaves, structure = jax.tree.flatten(tree)
  is_number = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
  rounded = [
    rounded_at_random(x, jax.random.fold_in(key, i)) if floating else x
    for i, (x, floating) in enumerate(zip(leaves, is_number, strict=True))
  ]
  return jax.tree.unflatten(structure, rounded)


def rounded_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
  """Rounds float32 to one of the two nearest numbers of bfloat16. The nearer number is the likelier."""
  return _carried(x, _bits(x) + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32))


def words_of_keys(weights: Tree, key: jax.Array, stacks: Collection[str]) -> Tree:
  """The two words of a random key for each weight [2], and for each layer of weights in `stacks` [layers, 2].

  A layer's key does not depend on other layers, because an update may see one layer at a time (streaming.py).
  """
  leaves, structure = jax.tree.flatten_with_path(weights)
  keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
  split = [
    jax.random.split(k, len(w)) if path[0].key in stacks else k for k, (path, w) in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, map(jax.random.key_data, split))


def rounded_as(old: jax.Array, new: jax.Array, words: jax.Array) -> jax.Array:
  """The new weight, given in float32, in the dtype of the old one: in bfloat16 rounded at random (`words_of_keys`)."""
  return _carried(new, _bits(new) + hashed(words, new.shape)) if old.dtype == jnp.bfloat16 else new


def hashed(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """A random number below 2^16 for each element, from its weight's or layer's key and its place there.

  `jax.random.bits` takes ten times as long on CPUs, and there needs memory for two words of each element. The mixing is
  MurmurHash3's (`fmix32`), once for each word of the key.
  """
  lead = words.ndim - 1
  places = [
    jax.lax.broadcasted_iota(jnp.uint32, shape, at) * jnp.uint32(math.prod(shape[at + 1 :]) % 2**32)
    for at in range(lead, len(shape))
  ]
  found = sum(places, jnp.uint32(0))
  for word in jnp.moveaxis(words, -1, 0):
    found ^= word.reshape(word.shape + (1,) * (len(shape) - lead))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
      found = (found ^ (found >> shift)) * jnp.uint32(factor)
    found ^= found >> 16
  return found & 0xFFFF


def _bits(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _carried(x: jax.Array, bits: jax.Array) -> jax.Array:
  """x as bfloat16, given the bits of x plus random numbers below 2^16."""
  # bfloat16 is the upper half of float32. A random number below one unit of it carries as often as it should.
  upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))
