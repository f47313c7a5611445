"""Grouped-query attention with rotary positions: the layer. cores.py has the ways to compute its core."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.config import ModelConfig
from models.cores import IMPLEMENTATIONS, KERNELS, with_past
from models.dimensions import Sharding
from models.layers import RMSNorm, linear, linears, weight
from models.lora import Adapters


class Cache(NamedTuple):
  """Keys and values of the positions seen so far, [B, K, S, H] each; [L, B, K, S, H] for all blocks stacked.

  Heads come before positions, so that what a head reads is one matrix. XLA's CPU backend takes two to three times as
  long to read the other order.
  """

  k: jax.Array
  v: jax.Array

  def add(self, new: "Cache", start: jax.Array | int) -> "Cache":
    """The cache of all blocks with the new positions [L, B, K, T, H] from `start` on: a number, or [B]."""

    starts = jnp.asarray(start)

    def write(cache: jax.Array, x: jax.Array) -> jax.Array:
      if not starts.ndim:
        return jax.lax.dynamic_update_slice_in_dim(cache, x, starts, axis=3)

      def row(b: jax.Array, cache: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, jax.lax.dynamic_slice_in_dim(x, b, 1, 1), (0, b, 0, starts[b], 0))

      return jax.lax.fori_loop(
        0, x.shape[1], row, cache
      )  # in place; XLA's CPU backend takes 400 times as long to scatter

    return Cache(*map(write, self, new))


def rope_angles(coordinates: jax.Array, config: ModelConfig) -> jax.Array:
  """The angles of rotary embedding (arXiv:2104.09864): coordinates [..., C] → [..., head_dim / 2].

  C is the number of coordinates of a position: 1 in a text, 2 (row and column) in an image. Each coordinate sets the
  angles of an equal share of the pairs.

  With `rope_scaling`, pairs that turn slowly turn `factor` times slower, as in Llama 3.1 (arXiv:2407.21783). So a model
  reads longer texts than it was trained on. Pairs that turn at least `high` times over `length` positions stay as they
  are, pairs that turn at most `low` times are slowed down in full, and those between in part.
  """
  count = coordinates.shape[-1]
  pairs = config.head_dim // 2 // count
  frequency = config.rope_base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
  if config.rope_scaling:
    factor, low, high, length = config.rope_scaling
    kept = jnp.clip((length * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
    frequency *= kept + (1 - kept) / factor
  return (coordinates[..., None] * frequency).reshape(*coordinates.shape[:-1], count * pairs)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates each pair of elements (i, i + H/2) of x [B, T, N, H] by angles [T, H/2] or [B, T, H/2]."""
  cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
  """Self-attention in which `heads` query heads share `kv_heads` key-value heads (arXiv:2305.13245)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    d, n, k, h, dtype = config.width, config.heads, config.kv_heads, config.head_dim, config.param_dtype
    self.query = weight(rngs, (d, n, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.key = weight(rngs, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.value = weight(rngs, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.out = weight(rngs, (n, h, d), ("heads", None, "embed"), std=(2 * config.depth * d) ** -0.5, dtype=dtype)
    if config.qkv_bias:
      bias = lambda heads: nnx.Param(jnp.zeros((heads, h), dtype), dims=("heads", None))
      self.query_bias, self.key_bias, self.value_bias = bias(n), bias(k), bias(k)
    if config.qk_norm:
      self.query_norm, self.key_norm = RMSNorm(h, config), RMSNorm(h, config)
    self.has_bias, self.has_norms = config.qkv_bias, config.qk_norm
    self.lora = Adapters(
      config, rngs, query=(self.query, 1), key=(self.key, 1), value=(self.value, 1), out=(self.out, 2)
    )
    self.core = functools.partial(IMPLEMENTATIONS[config.attention], causal=config.predicts.causal)
    self.is_kernel = config.attention in KERNELS

  @jax.named_scope("attention")
  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    angles: jax.Array,  # [T, H/2] or [B, T, H/2]
    segments: jax.Array | None,  # [B, T]
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None]:
    """Returns [B, T, D] and, with a cache, the keys and values of these positions, which are not in it yet.

    With a cache, x begins at position `start` (a number, or [B]: one for each row) and has no segments.
    """
    whole = sharding.whole_sequence(x)
    projected = linears(whole, (self.query[...], self.key[...], self.value[...]), self._join, sharding)
    projected = self.lora.after_stream(dict(zip(("query", "key", "value"), projected, strict=True)), x, sharding)
    if self.has_bias:
      biases = (self.query_bias[...], self.key_bias[...], self.value_bias[...])
      projected = tuple(y + bias for y, bias in zip(projected, biases, strict=True))
    q, k, v = (sharding.activation(y, "batch", None, "heads", None) for y in projected)
    v = checkpoint_name(v, "value")
    if self.has_norms:  # whose gradients need what they read
      q, k = self.query_norm(checkpoint_name(q, "query")), self.key_norm(checkpoint_name(k, "key"))
      q, k = rotate(q, angles), rotate(k, angles)
    else:
      q, k = checkpoint_name(rotate(q, angles), "query"), checkpoint_name(rotate(k, angles), "key")
    if cache is None:
      attended = self._attend(q, k, v, segments, sharding)
    else:
      if isinstance(start, int) and start == 0:  # nothing came before, so the fastest core can read these positions
        attended = self._attend(q, k, v, segments, sharding)
      else:
        attended = with_past(q, k, v, *cache, start)
      cache = Cache(k.swapaxes(1, 2), v.swapaxes(1, 2))
    attended = sharding.activation(attended, "batch", None, "heads", None)  # [B, T, N, H]
    out = sharding.split_sequence(linear(attended, self.out[...], inputs=2, flat=False))
    out = self.lora.into_stream("out", out, attended, sharding, inputs=2)
    return checkpoint_name(out, "attention_output"), cache

  def _join(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Arrays [..., N, H], [..., K, H] and [..., K, H] → [..., K, (N/K + 2)·H]: for each key head what belongs to it."""
    groups = arrays[1].shape[-2]
    return jnp.concatenate([a.reshape(*a.shape[:-2], groups, -1) for a in arrays], axis=-1)

  def _attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sharding: Sharding
  ) -> jax.Array:
    """Queries [B, T, N, H], keys and values [B, T, K, H], segments [B, T] → [B, T, N, H]."""
    if not self.is_kernel:
      return checkpoint_name(self.core(q, k, v, segments=segments), "context")
    kernel = lambda q, k, v, *rest: self.core(q, k, v, segments=rest[0] if rest else None)
    heads, rest = ("batch", None, "heads", None), () if segments is None else (segments,)
    return sharding.local(kernel, q, k, v, *rest, dims=(*(heads,) * 3, ("batch", None))[: 3 + len(rest)], results=heads)
