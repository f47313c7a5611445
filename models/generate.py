"""Generates texts one token at a time, with a key-value cache, and says how likely given texts are.

Prompts of different lengths stand in one array, padded at the right. A text never sees its padding, because it writes
its own tokens over it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from errors import ConfigError, not_negative
from models import stacks
from models.dimensions import UNSHARDED, Sharding
from models.keys import Purpose
from models.ops import cache as caches
from models.ops.cache import AnyCache, Cache
from models.ops.loss import LOGITS
from models.side_inputs import SideInputs
from models.stacks import Loop, Place
from models.transformer import Transformer

RunBlocks = Callable[[jax.Array, AnyCache, jax.Array | int], tuple[jax.Array, AnyCache]]  # (x, cache, start)


class Sampling(NamedTuple):
  """How the next token is chosen. The logits are changed in this order, as in the library transformers.

  Attributes:
    repetition_penalty: tokens that are in the text already become less likely: a positive logit is divided by it, and a
      negative one multiplied (arXiv:1909.05858). 1: no penalty.
    temperature: logits are divided by it; 0 picks the most likely token.
    top_k: how many of the most likely tokens can be chosen; 0: all.
    top_p: only the most likely tokens, whose probabilities make this sum, can be chosen (arXiv:1904.09751); 1: all.
  """

  repetition_penalty: float = 1.0
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def check(self) -> "Sampling":
    """Raises ConfigError for values that make no sense."""
    not_negative("temperature", self.temperature, "use 0 for the most likely token")
    not_negative("top_k", self.top_k, "use 0 for all tokens")
    if not 0 < self.top_p <= 1:
      raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; use 1 for all tokens")
    if not 0 < self.repetition_penalty < float("inf"):
      raise ConfigError(f"repetition_penalty={self.repetition_penalty} must be above 0; use 1 for none")
    return self

  @property
  def counts_tokens(self) -> bool:
    """Whether sampling needs to know which tokens a text holds."""
    return self.repetition_penalty != 1


class Texts(NamedTuple):
  """Texts that are being written.

  Attributes:
    cache: what the mixer keeps of all tokens but the newest (`Mixer.empty_cache`); None while it is passed apart, to be
      donated without the rest: a step's newest token is read while the next step runs.
    newest: [B], the newest token of each text.
    lengths: [B], how many tokens each text has.
    seen: [B, V], whether a text holds a token; [B, 0] if sampling does not need it.
    keys: [B], a random key for each text.
  """

  cache: AnyCache | None
  newest: jax.Array
  lengths: jax.Array
  seen: jax.Array
  keys: jax.Array


class TextWriter(NamedTuple):
  """Writes texts.

  Attributes:
    run_blocks: replaces `run_cached`, for a strategy that runs the blocks in its own way.
  """

  model: Transformer
  sampling: Sampling = Sampling()
  sharding: Sharding = UNSHARDED
  run_blocks: RunBlocks | None = None

  def begin(self, prompts: jax.Array, lengths: jax.Array, keys: jax.Array, *, size: int) -> Texts:
    """Reads prompts [B, P] of lengths [B], and writes the first token of each. The cache has room for `size` tokens.

    Keys belong to texts, so a text does not depend on the others in its batch.
    """
    batch, width = prompts.shape
    seen = jnp.zeros((batch, self.model.sizes.vocab_size if self.sampling.counts_tokens else 0), bool)
    if self.sampling.counts_tokens:
      is_text = jnp.arange(width) < lengths[:, None]
      seen = jax.vmap(lambda row, tokens, held: row.at[tokens].max(held))(seen, prompts, is_text)
    texts = Texts(
      self.model.sizes.mixes.empty_cache(self.model.sizes, lengths, size), prompts[:, 0], lengths, seen, keys
    )
    return self._next(texts, prompts, 0, lengths - 1)

  def extend(self, texts: Texts) -> Texts:
    """Writes one more token of each text."""
    return self._next(texts, texts.newest[:, None], texts.lengths - 1, jnp.zeros_like(texts.lengths))

  def log_likelihoods(self, tokens: jax.Array, counted: jax.Array) -> jax.Array:
    """The log-likelihood of each text, float32 [B]: the sum over the counted tokens. The first token is never scored.

    Makes logits for some positions at a time, as the loss does.

    Args:
      tokens, counted: [B, T + 1], the texts, and which of their tokens count.
    """
    sharding = self.sharding
    tokens, counted = (sharding.activation(x, "batch", None) for x in (tokens, counted))
    batch, length = tokens[:, 1:].shape
    cache = self.model.sizes.mixes.empty_cache(self.model.sizes, jnp.full(batch, length), length)
    x, _ = self._run(self.model.embed(tokens[:, :-1], sharding), cache, 0)

    def some(piece: tuple[jax.Array, ...]) -> jax.Array:
      x, targets, counted = piece
      logits = self.model.logits(x, sharding)  # [B, c, V]
      is_target = targets[..., None] == jnp.arange(logits.shape[-1])
      found = jnp.sum(jnp.where(is_target, logits, 0), axis=-1) - jax.nn.logsumexp(logits, axis=-1)
      return jnp.sum(jnp.where(counted, found, 0), axis=-1)

    size = min(length, max(1, LOGITS // (batch * self.model.sizes.vocab_size)))
    count = -(-length // size)

    def split(array: jax.Array) -> jax.Array:  # [B, T, ...] → [pieces, B, c, ...], the last piece padded
      padded = jnp.pad(array, [(0, 0), (0, count * size - length), *((0, 0),) * (array.ndim - 2)])
      return jnp.moveaxis(padded.reshape(batch, count, size, *array.shape[2:]), 1, 0)

    return jnp.sum(jax.lax.map(some, (split(x), split(tokens[:, 1:]), split(counted[:, 1:]))), axis=0)

  def _next(self, texts: Texts, tokens: jax.Array, start: jax.Array | int, last: jax.Array) -> Texts:
    """Reads tokens [B, T] from the position `start` on, and writes the token after the column `last` [B]."""
    assert texts.cache is not None
    x, cache = self._run(self.model.embed(tokens, self.sharding), texts.cache, start)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]  # [B, D]
    logits = self.model.next_logits(x, self.sharding)
    keys = jax.vmap(jax.random.fold_in)(texts.keys, texts.lengths)
    newest = choose_token(logits, self.sampling, texts.seen, keys).astype(tokens.dtype)
    seen = texts.seen
    if self.sampling.counts_tokens:
      seen = jax.vmap(lambda row, token: row.at[token].set(True))(seen, newest)
    return Texts(cache, newest, texts.lengths + 1, seen, texts.keys)

  def _run(self, x: jax.Array, cache: AnyCache, start: jax.Array | int) -> tuple[jax.Array, AnyCache]:
    if self.run_blocks:
      return self.run_blocks(x, cache, start)
    return run_cached(self.model, x, cache, start, self.sharding)


def run_cached(
  model: Transformer,
  x: jax.Array,  # [B, T, D]
  cache: AnyCache,  # of the layers that run
  start: jax.Array | int,
  sharding: Sharding = UNSHARDED,
  loops: Sequence[Loop] | None = None,
) -> tuple[jax.Array, AnyCache]:
  """Runs the blocks on positions that see earlier ones in the cache. Also returns the cache with the new positions.

  Args:
    start: the position of the first column of x; [B] if it differs between rows.
    loops: the blocks to run, by default all (`Transformer.run_blocks`).
  """
  c, side = model.sizes, SideInputs.of(model.sizes, x.shape[1], start=start, sharding=sharding)
  loops = stacks.loops(c.kinds) if loops is None else loops
  kinds = stacks.kinds_of(loops)
  found = {name: model.scanned(name, sharding) for name in dict.fromkeys(kind.stack for kind in kinds)}

  def body(place: Place, x: jax.Array, layer: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, Cache]:
    (weights, first), local = layer, c.has_window(place.kind)
    # A block takes its part of the cache by its number: a part for each loop would be a copy.
    number = place.number_among(first, lambda kind: c.has_window(kind) == local)
    own, block = caches.of_kind(cache, local).of_layer(number), found[place.kind.stack][1](place.own(weights))
    x, new, _ = block(x, side.of_layer(first + place.at, place.kind.sees), sharding, own, start)
    assert new is not None
    return x, new

  weights = {name: weights for name, (weights, _) in found.items()}
  x, new = stacks.scan(lambda place: functools.partial(body, place), x, weights, loops)
  # Written once for all blocks: a scan that returned the cache would copy it.
  return x, caches.added(cache, stacks.in_order(new), [*map(c.has_window, kinds)], start)


def generate(writer: TextWriter, prompt: jax.Array, *, length: int, key: jax.Array) -> jax.Array:
  """Continues each prompt [B, P] by `length` tokens → [B, P + length], in a single program.

  Raises ValueError if P + length exceeds `model.seq_len`, the length the model was trained on.
  """
  (batch, prompt_length), longest = prompt.shape, writer.model.sizes.seq_len
  if prompt_length + length > longest:
    raise ValueError(f"prompt ({prompt_length}) + length ({length}) exceeds model.seq_len={longest}")
  texts = writer.begin(prompt, jnp.full(batch, prompt_length), text_keys(key, batch), size=prompt_length + length)
  end, tokens = jax.lax.scan(lambda texts, _: (writer.extend(texts), texts.newest), texts, length=length - 1)
  return jnp.concatenate([prompt, tokens.T, end.newest[:, None]], axis=1)


def text_keys(key: jax.Array, batch: int) -> jax.Array:
  """A key for each text [B], from a seed's root key."""
  return jax.vmap(jax.random.fold_in, (None, 0))(Purpose.SAMPLING.key(key), jnp.arange(batch))


def choose_token(logits: jax.Array, sampling: Sampling, seen: jax.Array, keys: jax.Array) -> jax.Array:
  """The next tokens [B].

  Args:
    logits: [B, V], float32.
    seen: [B, V], whether a text holds a token; not read without a repetition penalty.
    keys: [B], a random key for each text and position.
  """
  if sampling.counts_tokens:
    penalty = sampling.repetition_penalty
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
  if sampling.temperature == 0:
    return jax.lax.top_k(logits, 1)[1][:, 0]  # XLA's CPU backend takes two to four times as long for an argmax
  logits = logits / sampling.temperature
  if 0 < sampling.top_k < logits.shape[-1]:
    logits = _at_least(logits, jax.lax.top_k(logits, sampling.top_k)[0][:, -1:])
  if sampling.top_p < 1:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
    likely = jnp.where(before < sampling.top_p, ordered, jnp.inf)  # the most likely token is always kept
    logits = _at_least(logits, likely.min(axis=-1, keepdims=True))
  return jax.vmap(jax.random.categorical)(keys, logits)


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
  return jnp.where(logits < least, -jnp.inf, logits)
