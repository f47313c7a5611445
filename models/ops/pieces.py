"""Attention of some queries to some keys of a text, so that what they read of several pieces can be merged.

A kernel returns, beside what each query reads of a piece, the log-sum-exp of its scores. `merge` joins the results of
two pieces with these. The backward pass is given what the queries read of *all* pieces, and the log-sum-exp of all
scores. From them it makes the true weights of a piece again, and the gradients of the pieces add up: the gradient of
softmax needs no sum over keys, because that sum is the product of what the query has read and its gradient
(arXiv:2205.14135).

What JAX ships for TPUs and GPUs can do this, but not through public functions. The private ones are called here only.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

QUERY_BLOCK = 64  # queries that `BLOCKWISE` processes at a time
TILE = 128  # positions; splash attention works on multiples of it
BLOCKS = (512, 384, 256, 128)  # positions that splash attention processes at a time: the largest that divides the text
HIDDEN = -1e30  # the score of a key that a query does not see. It is finite, for queries that see none in a piece
PADDING = -1  # the segment of padding that a kernel adds

Segments = tuple[jax.Array, jax.Array] | None  # of queries [B, T] and of keys [B, S]; None: all are one segment


class Read(NamedTuple):
  """What queries read: `out` [B, T, N, H], and the log-sum-exp of their scores [B, T, N], float32."""

  out: jax.Array
  logsumexp: jax.Array


class Kernel(NamedTuple):
  """An implementation of attention to a piece, for a platform.

  Attributes:
    forward: (q [B, T, N, H], k [B, S, K, H], v, segments, causal, window=0) → Read. If `causal`, queries and keys are
      the same positions, in order. With a window, each query sees so many keys at most, its own and those before it;
      only if `causal`.
    backward: (q, k, v, segments, causal, Read of all pieces, gradient of its `out`, window=0) → the gradients of q, k
      and v that come from this piece.
  """

  forward: Callable[..., Read]
  backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def merge(a: Read, b: Read) -> Read:
  """What queries read of two pieces. A query that sees no key in one of them has a log-sum-exp of about `HIDDEN`."""
  total = jnp.logaddexp(a.logsumexp, b.logsumexp)
  share = lambda part: part.out * jnp.exp(part.logsumexp - total)[..., None]
  return Read(share(a) + share(b), total)


def with_sinks(read: Read, sinks: jax.Array | None) -> Read:
  """`merge` with one more key for each head, of which the score is given [N] and the value is zero. None: without."""
  if sinks is None:
    return read
  total = jnp.logaddexp(read.logsumexp, sinks)
  return Read((read.out * jnp.exp(read.logsumexp - total)[..., None]).astype(read.out.dtype), total)


def softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
  """The weights of keys [B, K, G, T, S], by their scores; of `with_sinks`, where all scores are at hand."""
  if sinks is None:
    return jax.nn.softmax(scores)
  one = jnp.broadcast_to(sinks.reshape(scores.shape[1], -1, 1, 1), (*scores.shape[:-1], 1))
  return jax.nn.softmax(jnp.concatenate([scores, one], axis=-1))[..., :-1]


def of_sinks(sinks: jax.Array | None, read: Read, of_out: jax.Array) -> jax.Array | None:
  """The gradient of sinks [N], from what queries read beside them (`with_sinks`) and the gradient of its `out`."""
  if sinks is None:
    return None
  mean = jnp.sum(of_out * read.out, axis=-1, dtype=jnp.float32)
  return -jnp.sum(jnp.exp(sinks - read.logsumexp) * mean, axis=(0, 1))


def same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
  """Whether a query and a key are in the same segment: [B, T] and [B, S] → [B, T, S]."""
  return queries[:, :, None] == keys[:, None, :]


def splash_block(length: int, window: int = 0) -> int:
  """How many positions of a text of this length splash attention processes at a time.

  With a window at most a quarter of it, or TILE. So a block of queries computes few pairs that the window hides.
  """
  padded, most = length + -length % TILE, max(window // 4, TILE) if window else BLOCKS[0]
  return next(size for size in BLOCKS if padded % size == 0 and size <= most)


def query_block(window: int) -> int:
  """How many queries `BLOCKWISE` processes at a time: few for a short window, so that few keys are outside of it."""
  return min(QUERY_BLOCK, max(8, window // 8)) if window else QUERY_BLOCK


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, causal: bool, window: int = 0) -> Read:
  """`Kernel.forward`, for a block of queries at a time: q [B, T, N, H], k and v [B, S, K, H]."""
  keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
  read, logsumexp = [], []
  for _, seen, scores in _scores(q, keys, segments, causal, window):
    largest = jnp.max(scores, axis=-1, keepdims=True)
    exponentials = jnp.exp(scores - largest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    weights, own = exponentials.astype(v.dtype), values[:, :, seen]
    summed = jnp.einsum("bkgts,bksh->bkgth", weights, own, preferred_element_type=jnp.float32)
    read.append(summed / total)
    logsumexp.append(largest + jnp.log(total))
  joined = lambda parts: _positions_first(jnp.concatenate(parts, axis=3))
  return Read(joined(read).astype(q.dtype), joined(logsumexp)[..., 0])


def _blockwise_backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: Segments,
  causal: bool,
  read: Read,
  of_out: jax.Array,
  window: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`Kernel.backward`: gradients of q, k, v in their shapes, float32. `of_out` [B, T, N, H]: the gradient of `out`."""
  keys, values, groups = k.swapaxes(1, 2), v.swapaxes(1, 2), k.shape[2]
  queries, of_read, logsumexp = (_heads_first(x, groups) for x in (q, of_out, read.logsumexp[..., None]))
  mean = _heads_first(jnp.sum(of_out * read.out, axis=-1, keepdims=True, dtype=jnp.float32), groups)
  of_k, of_v = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  add = lambda total, at, part: jax.lax.dynamic_update_slice(total, total[:, :, at] + part, (0, 0, at.start, 0))
  scale, of_q = 1 / math.sqrt(q.shape[-1]), []
  for rows, seen, scores in _scores(q, keys, segments, causal, window):
    block = lambda x, rows=rows: x[:, :, :, rows]
    weights = jnp.exp(scores - block(logsumexp))
    of_weights = product("bkgth,bksh->bkgts", block(of_read), values[:, :, seen])
    of_scores = (weights * (of_weights - block(mean)) * scale).astype(q.dtype)
    of_q.append(product("bkgts,bksh->bkgth", of_scores, keys[:, :, seen]))
    of_k = add(of_k, seen, product("bkgts,bkgth->bksh", of_scores, block(queries)))
    of_v = add(of_v, seen, product("bkgts,bkgth->bksh", weights.astype(q.dtype), block(of_read)))
  return _positions_first(jnp.concatenate(of_q, axis=3)), of_k.swapaxes(1, 2), of_v.swapaxes(1, 2)


def _scores(
  q: jax.Array, keys: jax.Array, segments: Segments, causal: bool, window: int
) -> Iterator[tuple[slice, slice, jax.Array]]:
  """For each block of queries: its rows, the keys that it may see, and the scores of these [B, K, G, t, s].

  If causal, these keys end with the block's last query. With a window, they begin with the first that it shows.
  """
  queries = _heads_first((q / math.sqrt(q.shape[-1])).astype(q.dtype), keys.shape[1])
  size = query_block(window)
  for start in range(0, q.shape[1], size):
    rows = slice(start, start + size)
    first, stop = max(start + 1 - window, 0) if window else 0, start + size if causal else keys.shape[2]
    seen = slice(first, stop)
    block, shown = queries[:, :, :, rows], keys[:, :, seen]
    visible: Any = True
    if causal:
      own = start - seen.start + jnp.arange(block.shape[3])[:, None]  # the key of each query
      visible = jnp.arange(shown.shape[2]) <= own
      visible &= jnp.arange(shown.shape[2]) > own - window if window else True
    if segments is not None:
      visible &= same_segment(segments[0][:, rows], segments[1][:, seen])[:, None, None]
    scores = jnp.einsum("bkgth,bksh->bkgts", block, shown, preferred_element_type=jnp.float32)
    yield rows, seen, scores if visible is True else jnp.where(visible, scores, HIDDEN)


def _heads_first(x: jax.Array, groups: int) -> jax.Array:
  """[B, T, N, H] → [B, K, N/K, T, H]."""
  return jnp.moveaxis(x.reshape(*x.shape[:2], groups, -1, x.shape[-1]), 1, 3)


def _positions_first(x: jax.Array) -> jax.Array:
  """[B, K, N/K, T, H] → [B, T, N, H]."""
  x = jnp.moveaxis(x, 3, 1)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def with_padding(segments: Segments, q: jax.Array, k: jax.Array, queries: int, keys: int, causal: bool) -> Segments:
  """The segments of queries and keys that are padded by so many positions: padding is a segment of its own.

  None if the padding needs no segments: a causal mask hides the padding, which comes last.
  """
  if segments is None and (causal or not keys):
    return None
  own = segments or tuple(jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k))
  add = lambda x, more: jnp.pad(x, ((0, 0), (0, more)), constant_values=PADDING)
  return add(own[0], queries), add(own[1], keys)


def splash_kernel(queries: int, keys: int, heads: int, causal: bool, window: int = 0, **options: Any) -> Any:
  """Splash attention of one example, for lengths that are multiples of `TILE`: a function of q, k, v and SegmentIds."""
  from jax.experimental.pallas.ops.tpu import splash_attention as pallas  # only here, as it takes long to import

  shape, (q, k) = (queries, keys), (splash_block(length, window) for length in (queries, keys))
  mask: Any
  if window:
    mask = pallas.LocalMask(shape, (window - 1, 0 if causal else window - 1), offset=0)
  else:
    mask = (pallas.CausalMask if causal else pallas.FullMask)(shape)
  return pallas.make_splash_mha(
    pallas.MultiHeadMask([mask] * heads),
    block_sizes=pallas.BlockSizes(q, k, k, q, k, k, q, k),  # forward pass; gradients of keys; gradients of queries
    head_shards=1,
    q_seq_shards=1,
    **options,
  )


def mask_name(causal: bool, window: int) -> str:
  """The name of a kernel's mask, for readers of the program (lab/analysis/calls.py)."""
  return ("causal" if causal else "full") + (f"_{window}" if window else "")


def segment_ids(segments: Segments) -> Any:
  """The segments as splash attention takes them."""
  from jax.experimental.pallas.ops.tpu import splash_attention as pallas

  return None if segments is None else pallas.SegmentIds(*segments)


def _splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: Segments,
  causal: bool,
  *read: jax.Array,
  window: int = 0,
  interpret: bool = False,
) -> Any:
  """One direction of splash attention. `read`: for the backward pass, `out`, the log-sum-exp, and `out`'s gradient."""
  (t, s), h = (x.shape[1] for x in (q, k)), q.shape[-1]
  queries, keys = -t % TILE, -s % TILE
  ids = segment_ids(with_padding(segments, q, k, queries, keys, causal))
  rows = lambda x, more: jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2))).swapaxes(1, 2)  # [B, N, T, ...]
  given = rows((q / math.sqrt(h)).astype(q.dtype), queries), rows(k, keys), rows(v, keys), ids
  kernel = splash_kernel(
    t + queries, s + keys, q.shape[2], causal, window, save_residuals=not read, interpret=interpret
  )
  with jax.named_scope(mask_name(causal, window)):
    if not read:
      out, (logsumexp,) = jax.vmap(kernel)(*given)
      return Read(out.swapaxes(1, 2)[:, :t], logsumexp.swapaxes(1, 2)[:, :t])
    found = jax.vmap(functools.partial(_splash_backward, kernel))(*given, *(rows(x, queries) for x in read))
  of_q, of_k, of_v = (x.swapaxes(1, 2) for x in found)
  return of_q[:, :t] / math.sqrt(h), of_k[:, :s], of_v[:, :s]


def _splash_backward(kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, *read: jax.Array) -> Any:
  """The gradients of one example, [N, T, H] and [K, S, H], by the rule of the kernel."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as rules

  out, logsumexp, of_out = read
  residuals = (q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
  return rules._splash_attention_bwd(**kernel.kwargs, res=residuals, do=of_out)[3:6]


def _cudnn(
  q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, causal: bool, *read: jax.Array, window: int = 0
) -> Any:
  """One direction of cuDNN's fused attention, which needs even lengths, and heads of a multiple of 8."""
  from jax._src.cudnn import fused_attention_stablehlo as fused

  (t, s), h = (x.shape[1] for x in (q, k)), q.shape[-1]
  queries, keys = t % 2, s % 2
  segments = with_padding(segments, q, k, queries, keys, causal)
  rows = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, -x.shape[-1] % 8)))
  none = jnp.zeros(0, q.dtype)
  # Pairs of different segments get a bias far below all scores, as in JAX itself.
  bias = none if segments is None else jnp.where(same_segment(*segments), 0, jnp.finfo(q.dtype).min / 2).astype(q.dtype)
  options: dict[str, Any] = {
    "scale": 1 / math.sqrt(h),
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (segments is not None, False),  # has a bias, which has no gradient
    "mask_type": fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
    "layout": fused.AttentionLayout.BTNH.value,
    "sliding_window_length": window or None,
  } | ({"score_mod": None} if jax.__version_info__ >= (0, 12) else {})
  given = rows(q, queries), rows(k, keys), rows(v, keys), bias if segments is None else bias[:, None], *(none,) * 6
  if not read:
    out, logsumexp = fused._dot_product_attention_fwd_p_wrapper.bind(*given, **options, is_training=True)
    return Read(out[:, :t, :, :h], logsumexp.swapaxes(1, 2)[:, :t])
  out, logsumexp, of_out = read
  saved = jnp.pad(logsumexp, ((0, 0), (0, queries), (0, 0))).swapaxes(1, 2), rows(out, queries), rows(of_out, queries)
  of_q, of_k, of_v = fused._dot_product_attention_bwd_p_wrapper.bind(*given, *saved, **options)[:3]
  return of_q[:, :t, :, :h], of_k[:, :s, :, :h], of_v[:, :s, :, :h]


def _kernel(run: Callable[..., Any]) -> Kernel:
  """A kernel, from a function that runs both directions."""

  def backward(*given: Any, window: int = 0) -> Any:
    *inputs, read, of_out = given
    return run(*inputs, *read, of_out, window=window)

  return Kernel(run, backward)


BLOCKWISE, CUDNN = Kernel(_blockwise, _blockwise_backward), _kernel(_cudnn)
SPLASH, SPLASH_INTERPRETED = _kernel(_splash), _kernel(functools.partial(_splash, interpret=True))
