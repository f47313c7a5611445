"""Ways to compute attention's core: which values each query reads, and how much.

All ways compute the same function. `plain` is the reference, and runs anywhere. `choose` picks the best for a platform:
cuDNN's fused attention on NVIDIA GPUs, splash attention on TPUs, `blockwise` on CPUs. The fused ones never hold the
scores of all pairs of positions in memory.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError
from models.dimensions import Dims, Sharding
from models.ops import context, halo, pieces
from models.ops.context import Choice
from models.ops.gradients import with_gradient
from models.ops.pieces import TILE, Kernel, Read, Segments, mask_name, same_segment
from models.remat import KERNEL

if TYPE_CHECKING:
  from models.sizes import ModelSizes

CUDNN_HEAD = 256  # the largest head of cuDNN's backward pass, on GPUs since H100 (on older ones: choice.on_device)


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
  if name == "cudnn" and sizes.shown and not sizes.predicts.causal:
    return "has windows with a causal mask only"
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
  window: int = 0,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """What each head reads [B, T, N, H], by the model's implementation. A kernel runs on each device's own part.

  Args:
    window: how many positions a query sees, itself included; 0: all.
    sinks: [N], float32, the score of one more key that each query of a head sees, and of which the value is zero.
  """
  name, causal = sizes.attention, sizes.predicts.causal

  def core(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any) -> jax.Array:
    return of_text(name, q, k, v, causal=causal, segments=segments, window=window, sinks=sinks)

  splits = sharding.shards("positions") > 1
  if name not in KERNELS and not splits:
    return core(q, k, v, segments, sinks)
  heads = ("batch", None, "heads", None)
  given: list[tuple[jax.Array, Dims]] = [(x, heads) for x in (q, k, v)]
  given += [] if segments is None else [(segments, ("batch", None))]
  given += [] if sinks is None else [(sinks, ("heads",))]

  def kernel(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
    own = q, k, v, None if segments is None else rest[0], None if sinks is None else rest[-1]
    if splits and window and sizes.local_way != "exchange":
      return halo.attend(PIECES[name], *own, sharding, window, sizes.local_way == "halo")
    if splits:
      return context.attend(sizes.attention_context, core, PIECES[name], *own, sharding, causal)
    return core(*own)

  arrays, dims = zip(*given, strict=True)
  return sharding.local(kernel, *arrays, dims=dims, results=heads)


def of_text(name: str, *arrays: jax.Array, sinks: jax.Array | None = None, **options: Any) -> jax.Array:
  """What queries read of whole texts, by an implementation. The arguments are those of `plain`."""
  if sinks is None:
    return IMPLEMENTATIONS[name](*arrays, **options)
  run = functools.partial(_whole, PIECES[name]) if name in KERNELS else IMPLEMENTATIONS[name]
  return run(*arrays, sinks=sinks, **options)


def plain(
  q: jax.Array,  # [B, T, N, H]
  k: jax.Array,  # [B, S, K, H], where N is a multiple of K
  v: jax.Array,  # [B, S, K, H]
  *,
  causal: bool,
  offset: jax.Array | int = 0,  # or [B]
  segments: jax.Array | None = None,  # [B, S]
  window: int = 0,
  sinks: jax.Array | None = None,  # [N]
) -> jax.Array:
  """The reference: each query attends to the keys that it sees → [B, T, N, H].

  If `causal`, query t sees the keys up to position t + offset. With `segments`, the queries are the last T of the S
  positions, and see only the keys of their own segment. Padding is a segment too, so every query sees at least itself.
  With a `window`, a query sees only keys that are fewer positions away. With `sinks`, each also sees a key with this
  score, of which the value is zero.
  """
  b, t, n, h = q.shape
  s, groups = k.shape[1], k.shape[2]
  q = q.reshape(b, t, groups, n // groups, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) / math.sqrt(h)
  visible: jax.Array | bool = True
  if causal:
    offset = jnp.reshape(offset, (-1, 1, 1, 1, 1))  # [1 or B, K, G, T, S]
    visible = jnp.arange(s) <= jnp.arange(t)[:, None] + offset
  if window:
    distance = jnp.arange(t)[:, None] + offset - jnp.arange(s)
    visible &= (distance < window) & (distance > -window)
  if segments is not None:
    visible &= same_segment(segments[:, s - t :], segments)[:, None, None]  # [B, 1, 1, T, S]
  if visible is not True:
    scores = jnp.where(visible, scores, -jnp.inf)
  weights = pieces.softmax(scores, sinks).astype(v.dtype)
  return checkpoint_name(jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h), "attended")


def _whole(
  kernel: Kernel,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  segments: jax.Array | None = None,
  window: int = 0,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """`plain` by a kernel for pieces of texts: the whole text is one piece. It saves the log-sum-exp of scores."""

  def forward(*given: Any) -> tuple[jax.Array, Any]:
    q, k, v, segments, sinks = given
    own = _segments_twice(segments)
    read = pieces.with_sinks(kernel.forward(q, k, v, own, causal, window=window), sinks)
    read = Read(*(checkpoint_name(x, KERNEL) for x in read))
    return read.out, (q, k, v, own, sinks, read)

  def backward(given: Any, of_out: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, own, sinks, read = given
    gradients = kernel.backward(q, k, v, own, causal, read, of_out, window=window)
    return *(g.astype(q.dtype) for g in gradients), None, pieces.of_sinks(sinks, read, of_out)

  return with_gradient(forward, backward, q, k, v, segments, sinks)


def blockwise(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  segments: jax.Array | None = None,
  window: int = 0,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """`plain` on one block of queries at a time. If causal, each block skips the keys that it cannot see.

  It saves the log-sum-exp of a query's scores instead of its weights.
  """
  if not causal:
    return plain(q, k, v, causal=False, segments=segments, window=window, sinks=sinks)
  return _whole(pieces.BLOCKWISE, q, k, v, causal=True, segments=segments, window=window, sinks=sinks)


def cudnn(
  q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, segments: jax.Array | None = None, window: int = 0
) -> jax.Array:
  """cuDNN's fused attention, for bfloat16 on NVIDIA GPUs. It turns segments into a bias [B, 1, T, T].

  Pads heads to a multiple of 8 and the text to an even length, as cuDNN needs.
  """
  (_, t, _, h), scale = q.shape, 1 / math.sqrt(q.shape[-1])
  more = t % 2
  both = pieces.with_padding(_segments_twice(segments), q, k, more, more, causal)
  mask = None if both is None else same_segment(*both)[:, None]
  q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, -h % 8))) for x in (q, k, v))
  local = (window - 1, 0) if window else None
  out = jax.nn.dot_product_attention(
    q, k, v, mask=mask, scale=scale, is_causal=causal, local_window_size=local, implementation="cudnn"
  )
  return out[:, :t, :, :h]


def splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  causal: bool,
  segments: jax.Array | None = None,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Splash attention, a kernel for TPUs that skips blocks of masked pairs. It comes with JAX.

  Pads the text to a multiple of 128 positions.

  Args:
    interpret: run the kernel step by step, on any platform; for tests.
  """
  (_, t, n, h), more = q.shape, -q.shape[1] % TILE
  ids = pieces.segment_ids(pieces.with_padding(_segments_twice(segments), q, k, more, more, causal))
  rows = lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)  # [B, N, T, H]
  kernel = pieces.splash_kernel(
    t + more, t + more, n, causal, window, residual_checkpoint_name=KERNEL, interpret=interpret
  )
  with jax.named_scope(mask_name(causal, window)):
    attended = jax.vmap(kernel)(rows((q / math.sqrt(h)).astype(q.dtype)), rows(k), rows(v), ids)
  return attended.swapaxes(1, 2)[:, :t]


def _segments_twice(segments: jax.Array | None) -> Segments:
  """The segments of whole texts, for the queries and for the keys."""
  return None if segments is None else (segments, segments)


Core = Callable[..., jax.Array]
IMPLEMENTATIONS: dict[str, Core] = {"plain": plain, "blockwise": blockwise, "cudnn": cudnn, "splash": splash}
# For pieces of texts, and for texts with sinks.
PIECES = {"plain": pieces.BLOCKWISE, "blockwise": pieces.BLOCKWISE, "cudnn": pieces.CUDNN, "splash": pieces.SPLASH}
KERNELS = frozenset({"cudnn", "splash"})  # the compiler cannot split them
BEST = {"cpu": "blockwise", "gpu": "cudnn", "tpu": "splash"}
