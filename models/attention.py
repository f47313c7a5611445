"""Grouped-query attention with rotary positions: the layer, and the ways to compute its core.

Every implementation computes the same function as `plain`; `auto` takes cuDNN's on a GPU where the shapes allow it, the
blockwise one on a CPU, and `plain` elsewhere (`resolve`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from errors import ConfigError
from models.config import ModelConfig
from models.dimensions import Sharding
from models.layers import linear, weight

QUERY_BLOCK = 64  # rows of queries that `blockwise` handles at a time


class Cache(NamedTuple):
  """Keys and values of the positions seen so far, [B, S, K, H] each (with a leading `layers` axis when stacked)."""

  k: jax.Array
  v: jax.Array


def resolve(name: str, platform: str, dtype: str, head_dim: int) -> str:
  """The implementation that `auto` stands for on a platform ("cpu", "gpu", "tpu"); other names stand for themselves.

  Raises ConfigError for cuDNN where it cannot work: it takes bfloat16 or float16 on NVIDIA GPUs, in heads of a
  multiple of 8 up to 128.
  """
  fits_cudnn = platform == "gpu" and dtype != "float32" and head_dim % 8 == 0 and head_dim <= 128
  if name == "cudnn" and not fits_cudnn:
    raise ConfigError(
      f"model.attention='cudnn' needs a GPU, bfloat16 and heads of a multiple of 8 up to 128, but here are platform "
      f"{platform!r}, {dtype} and heads of {head_dim}; use 'auto'"
    )
  if name != "auto":
    return name
  return "blockwise" if platform == "cpu" else "cudnn" if fits_cudnn else "plain"


def rope_angles(positions: jax.Array, head_dim: int, base: float) -> jax.Array:
  """Angles of rotary embedding (arXiv:2104.09864): positions [T, A] → [T, head_dim / 2].

  A is the number of coordinates of a position: 1 in a text, 2 (row, column) in an image; each coordinate turns an
  equal share of the pairs.
  """
  coordinates = positions.shape[-1]
  pairs = head_dim // 2 // coordinates
  frequency = base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
  return (positions[:, :, None] * frequency).reshape(positions.shape[0], coordinates * pairs)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Turns the pairs (i, i + H/2) of x [B, T, N, H] by angles [T, H / 2]."""
  cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, offset: jax.Array | int = 0) -> jax.Array:
  """The reference. q [B, T, N, H] attends to k and v [B, S, K, H]; N is a multiple of K → [B, T, N, H].

  `causal` lets query t see the keys up to position t + offset.
  """
  b, t, n, h = q.shape
  s, groups = k.shape[1], k.shape[2]
  q = q.reshape(b, t, groups, n // groups, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) / math.sqrt(h)
  if causal:
    visible = jnp.arange(s)[None, :] <= jnp.arange(t)[:, None] + offset  # [T, S]
    scores = jnp.where(visible, scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def blockwise(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
  """`plain`, a block of queries at a time, skipping the keys that a causal block cannot see."""
  if not causal:
    return plain(q, k, v, causal=False)
  rows = [
    plain(q[:, start : start + QUERY_BLOCK], k[:, : start + QUERY_BLOCK], v[:, : start + QUERY_BLOCK],
          causal=True, offset=start)
    for start in range(0, q.shape[1], QUERY_BLOCK)
  ]  # fmt: skip
  return jnp.concatenate(rows, axis=1)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
  """cuDNN's fused attention; bfloat16 or float16 on NVIDIA GPUs."""
  return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


IMPLEMENTATIONS = {"plain": plain, "blockwise": blockwise, "cudnn": cudnn}


class Attention(nnx.Module):
  """Self-attention of `heads` query heads that share `kv_heads` key-value heads (arXiv:2305.13245)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    d, n, k, h, dtype = config.width, config.heads, config.kv_heads, config.head_dim, config.param_dtype
    self.query = weight(rngs, (d, n, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.key = weight(rngs, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.value = weight(rngs, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.out = weight(rngs, (n, h, d), ("heads", None, "embed"), std=(2 * config.depth * d) ** -0.5, dtype=dtype)
    self.core = IMPLEMENTATIONS[config.attention]
    self.causal = config.predicts.causal

  def __call__(
    self, x: jax.Array, angles: jax.Array, sharding: Sharding, cache: Cache | None = None, start: jax.Array | int = 0
  ) -> tuple[jax.Array, Cache | None]:
    """x [B, T, D], angles [T, H/2] → [B, T, D]. With a cache, x stands at positions start .. start + T."""
    q, k, v = (
      sharding.activation(linear(x, w[...]), "batch", None, "heads", None) for w in (self.query, self.key, self.value)
    )
    q, k = rotate(q, angles), rotate(k, angles)
    if cache is None:
      attended = self.core(q, k, v, causal=self.causal)
    else:
      cache = Cache(
        jax.lax.dynamic_update_slice_in_dim(cache.k, k, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(cache.v, v, start, axis=1),
      )
      attended = plain(q, cache.k, cache.v, causal=True, offset=start)
    attended = sharding.activation(attended, "batch", None, "heads", None)  # [B, T, N, H]
    out = linear(attended, self.out[...], inputs=2)
    return sharding.activation(out, "batch", None, None), cache
