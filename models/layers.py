"""The building blocks of the Transformer: weights, linear maps, RMSNorm, SwiGLU and dropout."""

import math
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


def linear(x: jax.Array, w: jax.Array, *, inputs: int = 1) -> jax.Array:
  """Contracts the last `inputs` dimensions of x with the first of w: [..., I] × [I, O...] → [..., O...].

  It is a product of two matrices, because XLA's CPU backend runs the weight gradient of a contraction over two
  dimensions (batch and position) at half the speed of one over a single dimension.
  """
  lead, out = x.shape[: x.ndim - inputs], w.shape[inputs:]
  x = x.reshape(math.prod(lead), -1)
  return (x @ w.reshape(x.shape[-1], -1)).reshape(*lead, *out)


class RMSNorm(nnx.Module):
  """Root mean square normalization over the width, in float32 (arXiv:1910.07467)."""

  def __init__(self, config: "ModelConfig"):
    self.eps = config.norm_eps
    self.scale = nnx.Param(jnp.ones(config.width, config.param_dtype), dims=(None,))

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] → [B, T, D]
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
    return (normed * self.scale[...]).astype(x.dtype)


class SwiGLU(nnx.Module):
  """The gated MLP: down(silu(gate(x)) · up(x)) (arXiv:2002.05202)."""

  def __init__(self, config: "ModelConfig", rngs: nnx.Rngs):
    d, f, dtype = config.width, config.mlp_width, config.param_dtype
    self.gate = weight(rngs, (d, f), ("embed", "mlp"), std=d**-0.5, dtype=dtype)
    self.up = weight(rngs, (d, f), ("embed", "mlp"), std=d**-0.5, dtype=dtype)
    self.down = weight(rngs, (f, d), ("mlp", "embed"), std=(2 * config.depth * f) ** -0.5, dtype=dtype)

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array, sharding: Sharding) -> jax.Array:  # [B, T, D] → [B, T, D]
    h = jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...])
    h = sharding.activation(h, "batch", None, "mlp")  # [B, T, F]
    return sharding.activation(linear(h, self.down[...]), "batch", None, None)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, sharding: Sharding) -> jax.Array:
  """Zeroes elements of x [B, T, D] with probability `rate` and scales up the rest. `keys` [B] has a key per example.

  Keys depend on the example and the step, never on the device, so every layout drops the same elements.
  """
  if keys is None or rate == 0:
    return x
  keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
  keep = sharding.activation(keep, "batch", None, None)
  return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def fold_in(keys: jax.Array | None, data: jax.Array | int) -> jax.Array | None:
  """Folds a number into each of the keys [B]."""
  return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, data))(keys)
