"""Ways to compute attention's core: which values each query reads, and how much. Also rotary positions and the cache.

All ways compute the same function. `plain` is the reference, and runs anywhere. `choose` picks the best for a platform:
cuDNN's fused attention on NVIDIA GPUs, splash attention on TPUs, `blockwise` on CPUs. The fused ones never hold the
scores of all pairs of positions in memory.
"""

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError
from models.dimensions import Sharding
from models.ops import context
from models.ops.context import Choice
from models.ops.gradients import with_gradient
from models.ops.pieces import (
  BLOCKWISE,
  CUDNN,
  SPLASH,
  TILE,
  Read,
  Segments,
  same_segment,
  segment_ids,
  splash_kernel,
  with_padding,
)  # fmt: skip
from models.remat import KERNEL

if TYPE_CHECKING:
  from models.sizes import ModelSizes

CUDNN_HEAD = 128  # the largest head that cuDNN's backward pass supports on every GPU since A100


def choose(sizes: "ModelSizes", platform: str) -> Choice:
  """The implementation for a platform ("cpu", "gpu" or "tpu"): the best one that fits for `auto`, else the one named.

  Raises ConfigError if the named implementation does not fit.
  """
  if sizes.attention in ("plain", "blockwise") or not sizes.mixes.per_pair(sizes):
    return Choice(sizes.attention)
  wanted = BEST.get(platform, "plain") if sizes.attention == "auto" else sizes.attention
  obstacle = _obstacle(wanted, sizes, platform)
  if sizes.attention != "auto" and obstacle:
    raise ConfigError(f"model.attention={wanted!r} {obstacle}; use 'auto'")
  return Choice("plain", f"{wanted} {obstacle}") if obstacle else Choice(wanted)


def _obstacle(name: str, sizes: "ModelSizes", platform: str) -> str:
  """Why an implementation does not fit; "" if it does."""
  if name == "cudnn" and platform != "gpu":
    return f"needs an NVIDIA GPU, and this run has platform {platform!r}"
  if name == "cudnn" and sizes.dtype == "float32":
    return "computes in bfloat16, and model.dtype='float32'"
  if name == "cudnn" and sizes.head_dim > CUDNN_HEAD:
    return f"has heads of at most {CUDNN_HEAD}, and model.head_dim={sizes.head_dim}"
  if name == "splash" and platform != "tpu":
    return f"needs a TPU, and this run has platform {platform!r}"
  if name == "splash" and sizes.positions < TILE:
    return f"works on {TILE} positions at a time, and the model sees {sizes.positions}"
  return ""


def attend(
  sizes: "ModelSizes",
  q: jax.Array,  # [B, T, N, H]
  k: jax.Array,  # [B, T, K, H]
  v: jax.Array,
  segments: jax.Array | None,  # [B, T]; of all positions, even if q, k and v have only a device's own
  sharding: Sharding,
) -> jax.Array:
  """What each head reads [B, T, N, H], by the model's implementation. A kernel runs on each device's own part."""
  name, causal = sizes.attention, sizes.predicts.causal
  core, splits = functools.partial(IMPLEMENTATIONS[name], causal=causal), sharding.shards("positions") > 1
  if name not in KERNELS and not splits:
    return core(q, k, v, segments=segments)

  def kernel(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
    segments = rest[0] if rest else None
    if splits:
      return context.attend(sizes.attention_context, core, PIECES[name], q, k, v, segments, sharding, causal)
    return core(q, k, v, segments=segments)

  heads, rest = ("batch", None, "heads", None), () if segments is None else (segments,)
  return sharding.local(kernel, q, k, v, *rest, dims=(*(heads,) * 3, ("batch", None))[: 3 + len(rest)], results=heads)


def plain(
  q: jax.Array,  # [B, T, N, H]
  k: jax.Array,  # [B, S, K, H], where N is a multiple of K
  v: jax.Array,  # [B, S, K, H]
  *,
  causal: bool,
  offset: jax.Array | int = 0,  # or [B]
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
    offset = jnp.reshape(offset, (-1, 1, 1, 1, 1))  # [1 or B, K, G, T, S]
    visible = jnp.arange(s) <= jnp.arange(t)[:, None] + offset
  if segments is not None:
    visible &= same_segment(segments[:, s - t :], segments)[:, None, None]  # [B, 1, 1, T, S]
  if visible is not True:
    scores = jnp.where(visible, scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return checkpoint_name(jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h), "attended")


def rope_angles(coordinates: jax.Array, sizes: "ModelSizes") -> jax.Array:
  """The angles of rotary embedding (arXiv:2104.09864): coordinates [..., C] → [..., head_dim / 2].

  C is the number of coordinates of a position: 1 in a text, 2 (row and column) in an image. Each coordinate sets the
  angles of an equal share of the pairs.

  With `rope_scaling`, pairs that turn slowly turn `factor` times slower, as in Llama 3.1 (arXiv:2407.21783). So a model
  reads longer texts than it was trained on. Pairs that turn at least `high` times over `length` positions stay as they
  are, pairs that turn at most `low` times are slowed down in full, and those between in part.
  """
  count = coordinates.shape[-1]
  pairs = sizes.head_dim // 2 // count
  frequency = sizes.rope_base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
  if sizes.rope_scaling:
    factor, low, high, length = sizes.rope_scaling
    unscaled = jnp.clip((length * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
    frequency *= unscaled + (1 - unscaled) / factor
  return (coordinates[..., None] * frequency).reshape(*coordinates.shape[:-1], count * pairs)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates each pair of elements (i, i + H/2) of x [B, T, N, H] by angles [T, H/2] or [B, T, H/2]."""
  cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


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


def with_past(
  q: jax.Array,  # [B, T, N, H]
  k: jax.Array,  # [B, T, K, H]
  v: jax.Array,
  past_k: jax.Array,  # [B, K, S, H], as in a Cache
  past_v: jax.Array,
  start: jax.Array | int,  # or [B]
) -> jax.Array:
  """`plain` for positions from `start` on: each sees the first `start` past positions, and new ones up to itself."""
  (b, t, n, h), (groups, s) = q.shape, past_k.shape[1:3]
  q = q.reshape(b, t, groups, n // groups, h)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  scores = lambda keys, visible: jnp.where(
    visible, jnp.einsum("btkgh,bksh->bkgts", q, keys, preferred_element_type=jnp.float32) / math.sqrt(h), -jnp.inf
  )
  before = scores(past_k, jnp.arange(s) < jnp.reshape(start, (-1, 1, 1, 1, 1)))
  own = scores(k, jnp.arange(t) <= jnp.arange(t)[:, None])
  weights = jax.nn.softmax(jnp.concatenate([before, own], axis=-1), axis=-1).astype(v.dtype)
  # Weights come first in the result: XLA's CPU backend runs the other order on one thread, in ten times as long.
  read = lambda part, values: jnp.einsum("bkgts,bksh->bkgth", part, values)
  attended = read(weights[..., :s], past_v) + read(weights[..., s:], v)
  return jnp.moveaxis(attended, 3, 1).reshape(b, t, n, h)


def blockwise(
  q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, segments: jax.Array | None = None
) -> jax.Array:
  """`plain` on one block of queries at a time. If causal, each block skips the keys that it cannot see.

  It saves the log-sum-exp of a query's scores instead of its weights.
  """
  if not causal:
    return plain(q, k, v, causal=False, segments=segments)

  def forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, Any]:
    own = _segments_twice(segments)
    read = Read(*(checkpoint_name(x, KERNEL) for x in BLOCKWISE.forward(q, k, v, own, True)))
    return read.out, (q, k, v, own, read)

  def backward(given: Any, of_out: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, own, read = given
    gradients = BLOCKWISE.backward(q, k, v, own, True, read, of_out)
    return *(g.astype(q.dtype) for g in gradients), None

  return with_gradient(forward, backward, q, k, v, segments)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, segments: jax.Array | None = None) -> jax.Array:
  """cuDNN's fused attention, for bfloat16 on NVIDIA GPUs. It turns segments into a bias [B, 1, T, T].

  Pads heads to a multiple of 8 and the text to an even length, as cuDNN needs.
  """
  (_, t, _, h), scale = q.shape, 1 / math.sqrt(q.shape[-1])
  more = t % 2
  both = with_padding(_segments_twice(segments), q, k, more, more, causal)
  mask = None if both is None else same_segment(*both)[:, None]
  q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, -h % 8))) for x in (q, k, v))
  out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=causal, implementation="cudnn")
  return out[:, :t, :, :h]


def splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  segments: jax.Array | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Splash attention, a kernel for TPUs that skips blocks of masked pairs. It comes with JAX.

  Pads the text to a multiple of 128 positions.

  Args:
    interpret: run the kernel step by step, on any platform; for tests.
  """
  (_, t, n, h), more = q.shape, -q.shape[1] % TILE
  ids = segment_ids(with_padding(_segments_twice(segments), q, k, more, more, causal))
  rows = lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)  # [B, N, T, H]
  kernel = splash_kernel(t + more, t + more, n, causal, residual_checkpoint_name=KERNEL, interpret=interpret)
  with jax.named_scope("causal" if causal else "full"):  # the mask, for readers of the program (lab/analysis/calls.py)
    attended = jax.vmap(kernel)(rows((q / math.sqrt(h)).astype(q.dtype)), rows(k), rows(v), ids)
  return attended.swapaxes(1, 2)[:, :t]


def _segments_twice(segments: jax.Array | None) -> Segments:
  """The segments of whole texts, for the queries and for the keys."""
  return None if segments is None else (segments, segments)


IMPLEMENTATIONS = {"plain": plain, "blockwise": blockwise, "cudnn": cudnn, "splash": splash}
PIECES = {"plain": BLOCKWISE, "blockwise": BLOCKWISE, "cudnn": CUDNN, "splash": SPLASH}  # for pieces of texts
KERNELS = frozenset({"cudnn", "splash"})  # the compiler cannot split them
BEST = {"cpu": "blockwise", "gpu": "cudnn", "tpu": "splash"}
