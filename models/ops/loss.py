"""Cross-entropy; for the next token without the logits of all tokens at once.

The logits of a text, [tokens, vocabulary] in float32, are larger than anything else in a step. `next_token` makes them
for one chunk of tokens at a time. In training it computes the gradients of a chunk while its logits exist. So no logits
are kept, and none are computed twice.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.dimensions import Sharding, resized


class Targets(NamedTuple):
  """What is to be predicted: the correct tokens [B, T] or classes [B], and which of the predictions count.

  `position` [B, T] is each prediction's position in its text, from 1, if losses are also wanted by position.
  """

  values: jax.Array
  counted: jax.Array
  position: jax.Array | None = None


Sums = dict[str, jax.Array]  # "loss" and "count", and what `Objective.sums` names, summed over predictions
BY_POSITION = ("loss", "count")  # the sums that may also be made by position, as NAME_by_position

LOGITS = 1 << 24  # logits that a device has in one chunk: 64 MiB in float32
LOGITS_OF_GPU = 1 << 27  # the same on a GPU, at most (`chunk_of_gpus`): 512 MiB
LEAST = 1024  # tokens in a chunk; with fewer, passes over the head's gradient would take longer than products with it


def buckets(positions: int) -> list[int]:
  """The last position, from 1, of each bucket of positions: 1, 2, 4, ..., until all positions have a bucket."""
  return [1 << number for number in range((positions - 1).bit_length() + 1)]


def chunk_count(tokens: int, width: int, vocab: int, chunk: int = 0) -> int:
  """The number of chunks in which a device processes its tokens; the last one may be padded.

  Args:
    tokens, vocab: a device's own tokens, and its part of the vocabulary.
    width: the model's width. With fewer tokens than this, the head's gradient takes more memory than all logits.
    chunk: tokens in a chunk, at most; 0 chooses.
  """
  if not chunk and tokens < width:
    return 1
  return max(1, -(-tokens // (chunk or max(LEAST, LOGITS // vocab))))


def chunk_of_gpus(width: int, vocab: int) -> int:
  """The tokens of a chunk on a GPU; 0: as elsewhere.

  Each chunk reads and writes the head's gradient. In chunks of twice the width that takes less than the logits do. It
  spares `lm_1b` 5% of its memory traffic on an H100, and takes 0.4 GB.
  """
  tokens = min(2 * width, LOGITS_OF_GPU // max(vocab, 1))
  return tokens if tokens > max(LEAST, LOGITS // max(vocab, 1)) else 0


@jax.named_scope("loss")
def of_logits(logits: jax.Array, targets: Targets) -> tuple[jax.Array, Sums]:
  """Cross-entropy of logits [B, V] against targets [B], and all sums."""
  values, counted = targets.values, targets.counted
  is_target = values[:, None] == jnp.arange(logits.shape[-1])
  target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
  loss = jnp.sum(jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - target_logit, 0))
  others = jnp.max(jnp.where(is_target, -jnp.inf, logits), axis=-1)
  correct = counted & (target_logit > others)  # a tie counts as wrong
  return loss, {"loss": loss, "correct": jnp.sum(correct), "count": jnp.sum(counted)}


@jax.named_scope("loss")
def next_token(
  x: jax.Array,  # [B, T, D], normalized
  head: jax.Array,  # [D, V]
  targets: Targets,  # [B, T]
  sharding: Sharding,
  chunk: int = 0,
) -> tuple[jax.Array, Sums]:
  """Cross-entropy of the logits x @ head, and all sums.

  Devices that each hold a part of the vocabulary sum over the parts, chunk by chunk. The gradients of x and of the
  head are summed over devices once, after the last chunk: until then a device keeps its own gradients, as one entry of
  a leading dimension. Differentiable once, and only backward.
  """
  vocab = head.shape[1]
  # Devices need equal parts of the vocabulary. The columns that are added predict nothing.
  head = resized(head, (head.shape[0], vocab + -vocab % sharding.shards("vocab")))
  ids = jnp.arange(head.shape[1])

  def run(x: jax.Array, head: jax.Array, differentiate: bool) -> list[jax.Array]:
    """The sums of losses and of correct predictions, then the gradients of the loss: each [devices, ...]."""
    results = [("batch",), ("batch",), ("vocab", "batch", None, None), ("batch", None, "vocab")]
    return sharding.local(
      functools.partial(_on_own_tokens, vocab=vocab, sharding=sharding, chunk=chunk, differentiate=differentiate),
      *(x, head, targets.values, targets.counted, ids),
      dims=[("batch", None, None), (None, "vocab"), ("batch", None), ("batch", None), ("vocab",)],
      results=results if differentiate else results[:2],
    )

  @jax.custom_vjp
  def sums(x: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, correct = run(x, head, False)
    return jnp.sum(loss), jnp.sum(correct)

  def forward(x: jax.Array, head: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    loss, correct, of_x, of_head = run(x, head, True)
    of_x = sharding.sum_pieces(of_x, "vocab", ("batch", None, None))
    return (jnp.sum(loss), jnp.sum(correct)), (of_x, sharding.sum_pieces(of_head, "batch", ("embed", "vocab")))

  def backward(gradients: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(g * cotangents[0].astype(g.dtype) for g in gradients)

  sums.defvjp(forward, backward)
  loss, correct = sums(x, head)
  return loss, {"loss": loss, "correct": correct, "count": jnp.sum(targets.counted)}


def by_position(
  score: Callable[[Targets], tuple[jax.Array, Sums]], targets: Targets, positions: int
) -> tuple[jax.Array, Sums]:
  """What `score` returns, and in its sums also "loss" and "count" of each bucket of positions [buckets].

  The logits are computed once for all buckets, because only which predictions count differs between them.
  """
  position = targets.position
  is_in = lambda last: targets.counted & (position <= last) & (position > last // 2)
  sums = jax.vmap(lambda last: score(targets._replace(counted=is_in(last)))[1])(jnp.array(buckets(positions)))
  total = {name: jnp.sum(found) for name, found in sums.items()}
  return total["loss"], total | {f"{name}_by_position": sums[name] for name in BY_POSITION}


def _on_own_tokens(
  x: jax.Array,  # [b, T, D]
  head: jax.Array,  # [D, v]
  targets: jax.Array,  # [b, T]
  counted: jax.Array,  # [b, T]
  ids: jax.Array,  # [v], the tokens that these columns of the head predict
  *,
  vocab: int,
  sharding: Sharding,
  chunk: int,
  differentiate: bool,
) -> list[jax.Array]:
  """The sums over a device's own tokens, and its contributions to the gradients; with a leading dimension of 1."""
  total, largest = (functools.partial(sharding.across, f, dim="vocab") for f in (jax.lax.psum, jax.lax.pmax))
  tokens, (width, held) = targets.size, head.shape
  count = chunk_count(tokens, width, held, chunk)
  size = -(-tokens // count)

  def one(of_head: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, targets, counted = chunk
    logits = jnp.dot(x, head, preferred_element_type=jnp.float32)  # [c, v]
    if vocab % sharding.shards("vocab"):
      logits = jnp.where(ids < vocab, logits, -jnp.inf)
    is_target = targets[:, None] == ids
    target = total(jnp.sum(jnp.where(is_target, logits, 0), axis=-1))
    others = largest(jnp.max(jnp.where(is_target, -jnp.inf, logits), axis=-1))
    top = jnp.maximum(others, target)
    exponentials = jnp.exp(logits - top[:, None])
    normalizer = total(jnp.sum(exponentials, axis=-1))
    loss = jnp.sum(jnp.where(counted, jnp.log(normalizer) + top - target, 0))
    correct = jnp.sum(counted & (target > others))  # a tie counts as wrong
    if not differentiate:
      return of_head, (loss, correct)
    of_logits = jnp.where(counted[:, None], exponentials / normalizer[:, None] - is_target, 0).astype(head.dtype)
    of_head += jnp.dot(x.T, of_logits, preferred_element_type=jnp.float32)
    return of_head, (loss, correct, of_logits @ head.T)

  def split(array: jax.Array, *rest: int) -> jax.Array:
    padded = jnp.pad(array.reshape(tokens, *rest), [(0, count * size - tokens), *((0, 0) for _ in rest)])
    return padded.reshape(count, size, *rest)  # padding does not count

  start = jnp.zeros(head.shape if differentiate else (), jnp.float32)
  of_head, found = jax.lax.scan(one, start, (split(x, x.shape[-1]), split(targets), split(counted)))
  sums = [jnp.sum(part)[None] for part in found[:2]]
  if not differentiate:
    return sums
  # Without the barrier, the TPU compiler fails if this is scattered and then added up in float32 again (libtpu 0.0.42).
  of_head = jax.lax.optimization_barrier(of_head.astype(head.dtype))
  return [*sums, found[2].reshape(-1, x.shape[-1])[:tokens].reshape(1, *x.shape), of_head[None]]
