"""Stores an optimizer's state in another precision between steps."""

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
  """Rounds float32 to one of the two nearest numbers of bfloat16. The nearer it is, the likelier."""
  # bfloat16 is the upper half of float32. A random number below one unit of it carries as often as it should.
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), upper, x.astype(jnp.bfloat16))
