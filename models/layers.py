"""The small parts of a block: weights, RMSNorm and dropout."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models.dimensions import Dims, Sharding

if TYPE_CHECKING:
  from models.config import ModelConfig


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], dims: Dims, *, std: float, dtype: str) -> nnx.Param:
  """A weight drawn from a normal distribution; `dims` names its dimensions (dimensions.py)."""
  assert len(shape) == len(dims)
  value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value.astype(dtype), dims=dims)


class RMSNorm(nnx.Module):
  """Root mean square normalization over the last dimension, of this size, in float32 (arXiv:1910.07467)."""

  def __init__(self, size: int, config: "ModelConfig"):
    self.eps = config.norm_eps
    self.scale = nnx.Param(jnp.ones(size, config.param_dtype), dims=(None,))

  def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] → [..., size]
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
    return (normed * self.scale[...]).astype(x.dtype)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, sharding: Sharding) -> jax.Array:
  """Zeroes elements of x [B, T, D] with probability `rate` and scales up the rest. `keys` [B] has a key per example.

  Keys depend on the example and the step, never on the device, so every layout drops the same elements.
  """
  if keys is None or rate == 0:
    return x
  keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
  keep = sharding.activation(keep, "batch", "sequence", None)
  return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def fold_in(keys: jax.Array | None, data: jax.Array | int) -> jax.Array | None:
  """Folds a number into each of the keys [B]."""
  return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, data))(keys)
