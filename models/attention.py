"""Grouped-query attention with rotary positions: the layer, and the ways to compute its core.

All implementations compute the same function; `plain` is the reference. `auto` picks cuDNN on a GPU if it supports the
shapes, `blockwise` on a CPU, and `plain` elsewhere (`resolve`).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError
from models.config import ModelConfig
from models.dimensions import Sharding
from models.layers import linear, linears, weight

OUTPUT = "attention output"  # its name for remat policies: what a device keeps of it
QUERY_BLOCK = 64  # queries that `blockwise` processes at a time


class Cache(NamedTuple):
  """Keys and values of the positions seen so far, [B, S, K, H] each; [L, B, S, K, H] for all blocks stacked."""

  k: jax.Array
  v: jax.Array


def resolve(config: ModelConfig, platform: str) -> str:
  """The implementation to use on a platform ("cpu", "gpu" or "tpu"): the best one for `auto`, else the one named.

  Raises ConfigError for "cudnn" where it does not work. It needs an NVIDIA GPU, bfloat16 or float16, heads whose size
  is a multiple of 8 and at most 128, and with segments an even sequence.
  """
  fits_heads = config.head_dim % 8 == 0 and config.head_dim <= 128
  fits_length = not config.segments or config.positions % 2 == 0
  fits_cudnn = platform == "gpu" and config.dtype != "float32" and fits_heads and fits_length
  if config.attention == "cudnn" and not fits_cudnn:
    raise ConfigError(
      "model.attention='cudnn' needs a GPU, bfloat16, a head size that is a multiple of 8 up to 128, and for documents "
      f"an even model.seq_len, but this run has platform {platform!r}, {config.dtype}, head size {config.head_dim} and "
      f"model.seq_len={config.seq_len}; use 'auto'"
    )
  if config.attention != "auto":
    return config.attention
  return "blockwise" if platform == "cpu" else "cudnn" if fits_cudnn else "plain"


def rope_angles(coordinates: jax.Array, head_dim: int, base: float) -> jax.Array:
  """The angles of rotary embedding (arXiv:2104.09864): coordinates [..., C] → [..., head_dim / 2].

  C is the number of coordinates of a position: 1 in a text, 2 (row and column) in an image. Each coordinate sets the
  angles of an equal share of the pairs.
  """
  count = coordinates.shape[-1]
  pairs = head_dim // 2 // count
  frequency = base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
  return (coordinates[..., None] * frequency).reshape(*coordinates.shape[:-1], count * pairs)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates each pair of elements (i, i + H/2) of x [B, T, N, H] by angles [T, H/2] or [B, T, H/2]."""
  cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def plain(
  q: jax.Array,  # [B, T, N, H]
  k: jax.Array,  # [B, S, K, H], where N is a multiple of K
  v: jax.Array,  # [B, S, K, H]
  *,
  causal: bool,
  offset: jax.Array | int = 0,
  segments: jax.Array | None = None,  # [B, S]
) -> jax.Array:
  """The reference: each query attends to the keys that it sees → [B, T, N, H].

  If `causal`, query t sees the keys up to position t + offset. With `segments`, the queries are the last T of the S
  positions, and see only the keys of their own segment. Padding is a segment too, so every query sees at least itself.
  """
  b, t, n, h = q.shape
  s, groups = k.shape[1], k.shape[2]
  q = q.reshape(b, t, groups, n // groups, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) / math.sqrt(h)
  visible: jax.Array | bool = True
  if causal:
    visible = jnp.arange(s)[None, :] <= jnp.arange(t)[:, None] + offset  # [T, S]
  if segments is not None:
    visible &= same_segment(segments[:, s - t :], segments)[:, None, None]  # [B, 1, 1, T, S]
  if visible is not True:
    scores = jnp.where(visible, scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def blockwise(
  q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, segments: jax.Array | None = None
) -> jax.Array:
  """`plain` on one block of queries at a time. If causal, each block skips the keys that it cannot see."""
  if not causal:
    return plain(q, k, v, causal=False, segments=segments)

  def row(start: int) -> jax.Array:
    stop = start + QUERY_BLOCK
    seen = None if segments is None else segments[:, :stop]
    return plain(q[:, start:stop], k[:, :stop], v[:, :stop], causal=True, offset=start, segments=seen)

  return jnp.concatenate([row(start) for start in range(0, q.shape[1], QUERY_BLOCK)], axis=1)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, segments: jax.Array | None = None) -> jax.Array:
  """cuDNN's fused attention, for bfloat16 or float16 on NVIDIA GPUs. It turns segments into a bias [B, 1, T, T]."""
  mask = None if segments is None else same_segment(segments, segments)[:, None]
  return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="cudnn")


def same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
  """Whether a query and a key are in the same segment: [B, T] and [B, S] → [B, T, S]."""
  return queries[:, :, None] == keys[:, None, :]


IMPLEMENTATIONS = {"plain": plain, "blockwise": blockwise, "cudnn": cudnn}
KERNELS = frozenset({"cudnn"})  # which the compiler cannot split


class Attention(nnx.Module):
  """Self-attention in which `heads` query heads share `kv_heads` key-value heads (arXiv:2305.13245)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    d, n, k, h, dtype = config.width, config.heads, config.kv_heads, config.head_dim, config.param_dtype
    self.query = weight(rngs, (d, n, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.key = weight(rngs, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.value = weight(rngs, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.out = weight(rngs, (n, h, d), ("heads", None, "embed"), std=(2 * config.depth * d) ** -0.5, dtype=dtype)
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
    """Returns [B, T, D] and the updated cache. With a cache, x begins at position `start` and has no segments."""
    x = sharding.whole_sequence(x)
    projected = linears(x, (self.query[...], self.key[...], self.value[...]), self._join, sharding)
    q, k, v = (sharding.activation(y, "batch", None, "heads", None) for y in projected)
    q, k = rotate(q, angles), rotate(k, angles)
    if cache is None:
      attended = self._attend(q, k, v, segments, sharding)
    else:
      cache = Cache(
        jax.lax.dynamic_update_slice_in_dim(cache.k, k, start, axis=1),
        jax.lax.dynamic_update_slice_in_dim(cache.v, v, start, axis=1),
      )
      attended = plain(q, cache.k, cache.v, causal=True, offset=start)
    attended = sharding.activation(attended, "batch", None, "heads", None)  # [B, T, N, H]
    out = linear(attended, self.out[...], inputs=2, flat=False)
    return checkpoint_name(sharding.split_sequence(out), OUTPUT), cache

  def _join(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """Arrays [..., N, H], [..., K, H] and [..., K, H] → [..., K, (N/K + 2)·H]: for each key head what belongs to it."""
    groups = arrays[1].shape[-2]
    return jnp.concatenate([a.reshape(*a.shape[:-2], groups, -1) for a in arrays], axis=-1)

  def _attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sharding: Sharding
  ) -> jax.Array:
    """Queries [B, T, N, H], keys and values [B, T, K, H], segments [B, T] → [B, T, N, H]."""
    if not self.is_kernel:
      return self.core(q, k, v, segments=segments)
    kernel = lambda q, k, v, *rest: self.core(q, k, v, segments=rest[0] if rest else None)
    heads, rest = ("batch", None, "heads", None), () if segments is None else (segments,)
    return sharding.local(kernel, q, k, v, *rest, dims=(heads, heads, heads, ("batch", None))[: 3 + len(rest)])
