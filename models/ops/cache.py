"""The cache of attention: keys and values of the positions that a text has so far. A local layer keeps its window."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.ops.pieces import softmax


class Cache(NamedTuple):
  """Keys and values of the positions seen so far, [B, K, S, H] each; [L, B, K, S, H] for all blocks stacked.

  Heads come before positions, so that what a head reads is one matrix. XLA's CPU backend takes two to three times as
  long to read the other order.
  """

  k: jax.Array
  v: jax.Array

  def of_layer(self, number: jax.Array) -> "Cache":
    """The cache of one block."""
    return Cache(*(jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in self))

  def add(self, new: "Cache", start: jax.Array | int) -> "Cache":
    """The cache of all blocks with the new positions [L, B, K, T, H] from `start` on: a number, or [B]."""
    starts = jnp.asarray(start)

    def write(cache: jax.Array, x: jax.Array) -> jax.Array:
      if not starts.ndim:
        return jax.lax.dynamic_update_slice_in_dim(cache, x, starts, axis=3)

      def row(b: jax.Array, cache: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, jax.lax.dynamic_slice_in_dim(x, b, 1, 1), (0, b, 0, starts[b], 0))

      # A loop writes in place. XLA's CPU backend takes 400 times as long to scatter.
      return jax.lax.fori_loop(0, x.shape[1], row, cache)

    return Cache(*map(write, self, new))


class Local(NamedTuple):
  """The cache of local layers, as `Cache`: a position is in the column of its number modulo S, where an older one was.

  Attributes:
    lengths: [L, B], how many positions of each text are read first. What pads them is not kept.
  """

  k: jax.Array
  v: jax.Array
  lengths: jax.Array

  def of_layer(self, number: jax.Array) -> "Local":
    """The cache of one block."""
    return Local(*(jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in self))

  def positions(self, start: jax.Array) -> jax.Array:
    """Of each of the S columns, the newest position before `start` that belongs there; below 0: none."""
    size = self.k.shape[-2]
    return start - 1 - (start - 1 - jnp.arange(size)) % size

  def add(self, new: Cache, start: jax.Array | int) -> "Local":
    """The cache with the new positions [L, B, K, T, H] from `start` on: a number, or [B]."""
    size, length, first = self.k.shape[-2], new.k.shape[-2], jnp.reshape(start, (-1, 1))  # [1 or B, 1]
    if length == 1:
      return Local(*Cache(self.k, self.v).add(new, jnp.asarray(start) % size), self.lengths)
    counted = self.lengths[0][:, None]  # [B, 1]
    end = jnp.where(first < counted, jnp.minimum(first + length, counted), first + length)
    at = end - 1 - (end - 1 - jnp.arange(size)) % size  # [B, S]
    from_new = (at >= first)[None, :, None, :, None]
    found = jnp.clip(at - first, 0, length - 1)[None, :, None, :, None]
    put = lambda old, new: jnp.where(from_new, jnp.take_along_axis(new, found, axis=3), old)
    return Local(put(self.k, new.k), put(self.v, new.v), self.lengths)


class Mixed(NamedTuple):
  """The caches of a model with local and other layers."""

  whole: Cache
  local: Local


AnyCache = Cache | Local | Mixed


def of_kind(cache: AnyCache, is_local: bool) -> "Cache | Local":
  """The cache of the layers of a kind."""
  return (cache.local if is_local else cache.whole) if isinstance(cache, Mixed) else cache


def added(cache: AnyCache, new: Cache, is_local: Sequence[bool], start: jax.Array | int) -> AnyCache:
  """The cache with new positions of all layers [L, B, K, T, H], of which some are local."""
  if not isinstance(cache, Mixed):
    return cache.add(new, start)
  of = lambda local: jax.tree.map(lambda x: x[jnp.array([i for i, one in enumerate(is_local) if one == local])], new)
  return Mixed(cache.whole.add(of(False), start), cache.local.add(of(True), start))


def split(cache: AnyCache, is_local: Sequence[bool]) -> tuple[Any, Any]:
  """The cache of the first layers, of which some are local, and that of the others."""

  def cut(cache: Any, count: int) -> tuple[Any, Any]:
    return jax.tree.map(lambda x: x[:count], cache), jax.tree.map(lambda x: x[count:], cache)

  if not isinstance(cache, Mixed):
    return cut(cache, len(is_local))
  whole, local = cut(cache.whole, len(is_local) - sum(is_local)), cut(cache.local, sum(is_local))
  first, last = zip(whole, local, strict=True)
  return Mixed(*first), Mixed(*last)


def empty(layers: Sequence[bool], shape: Sequence[int], window: int, lengths: jax.Array, dtype: str) -> AnyCache:
  """A cache without positions.

  Args:
    layers: whether each layer is local.
    shape: [B, K, S, H], of a layer that keeps all positions.
    window: how many positions local layers see. They keep those before the newest.
    lengths: [B] (`Local`).
  """
  b, k, s, h = shape
  whole = jnp.zeros((len(layers) - sum(layers), b, k, s, h), dtype)
  if not any(layers):
    return Cache(whole, whole)
  zeros = jnp.zeros((sum(layers), b, k, min(s, max(window - 1, 1)), h), dtype)
  local = Local(zeros, zeros, jnp.broadcast_to(lengths, (sum(layers), b)))
  return local if all(layers) else Mixed(Cache(whole, whole), local)


def with_past(
  q: jax.Array,  # [B, T, N, H]
  k: jax.Array,  # [B, T, K, H]
  v: jax.Array,
  past: "Cache | Local",  # of one block
  start: jax.Array | int,  # or [B]
  window: int = 0,  # of a layer with a `Local`
  sinks: jax.Array | None = None,  # [N]
) -> jax.Array:
  """`plain` for positions from `start` on: each sees the first `start` past positions, and new ones up to itself."""
  (b, t, n, h), (groups, s) = q.shape, past.k.shape[1:3]
  q = q.reshape(b, t, groups, n // groups, h)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  scores = lambda keys, visible: jnp.where(
    visible, jnp.einsum("btkgh,bksh->bkgts", q, keys, preferred_element_type=jnp.float32) / math.sqrt(h), -jnp.inf
  )
  starts, i = jnp.reshape(start, (-1, 1, 1, 1, 1)), jnp.arange(t)[:, None]
  is_past, is_own = jnp.arange(s) < starts, jnp.arange(t) <= i
  if isinstance(past, Local):
    at = past.positions(starts)
    is_past, is_own = (at >= 0) & (at > starts + i - window), is_own & (jnp.arange(t) > i - window)
  before, own = scores(past.k, is_past), scores(k, is_own)
  weights = softmax(jnp.concatenate([before, own], axis=-1), sinks).astype(v.dtype)
  # Weights come first in the result: XLA's CPU backend runs the other order on one thread, in ten times as long.
  read = lambda part, values: jnp.einsum("bkgts,bksh->bkgth", part, values)
  attended = read(weights[..., :s], past.v) + read(weights[..., s:], v)
  return jnp.moveaxis(attended, 3, 1).reshape(b, t, n, h)
