"""Generates text one token at a time, with a key-value cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import Cache
from models.config import ModelConfig
from models.dimensions import UNSHARDED, Sharding
from models.parameters import bind

RunBlocks = Callable[[jax.Array, Cache, jax.Array | int], tuple[jax.Array, Cache | None]]  # (x, cache, start)


def generate(
  config: ModelConfig,
  params: dict[str, Any],
  prompt: jax.Array,  # [B, P] token ids
  *,
  length: int,
  key: jax.Array,
  temperature: float = 1.0,
  sharding: Sharding = UNSHARDED,
  run_blocks: RunBlocks | None = None,
) -> jax.Array:
  """Continues each prompt by `length` tokens → [B, P + length]. Temperature 0 picks the most likely token.

  One pass over the prompt fills the cache. After that, each step runs a single position. A strategy that runs the
  blocks in its own way passes `run_blocks(x, cache, start)`, which replaces the model's.

  Raises ValueError if P + length exceeds `model.seq_len`, the length the model was trained on.
  """
  batch, prompt_length = prompt.shape
  if prompt_length + length > config.seq_len:
    raise ValueError(f"prompt ({prompt_length}) + length ({length}) exceeds model.seq_len={config.seq_len}")
  model = bind(config, params)

  run_blocks = run_blocks or (lambda x, c, start: model.run_blocks(x, sharding=sharding, cache=c, start=start))

  def run(tokens: jax.Array, cache: Cache, start: jax.Array | int) -> tuple[jax.Array, Cache]:
    x, updated = run_blocks(model.embed(tokens, sharding), cache, start)
    assert updated is not None  # as a cache was given
    return model.logits(x[:, -1:], sharding)[:, 0], updated  # [B, V]

  def choose(logits: jax.Array, position: jax.Array | int) -> jax.Array:
    if temperature == 0:
      return jnp.argmax(logits, axis=-1).astype(prompt.dtype)
    chosen = jax.random.categorical(jax.random.fold_in(key, position), logits / temperature)
    return chosen.astype(prompt.dtype)

  def step(carry: tuple[jax.Array, Cache], position: jax.Array) -> tuple[tuple[jax.Array, Cache], jax.Array]:
    token, cache = carry
    logits, cache = run(token[:, None], cache, position)
    return (choose(logits, position), cache), token

  logits, cache = run(prompt, model.empty_cache(batch, prompt_length + length), 0)
  first = choose(logits, prompt_length - 1)
  positions = prompt_length + jnp.arange(length - 1)
  (last, _), tokens = jax.lax.scan(step, (first, cache), positions)
  return jnp.concatenate([prompt, tokens.T, last[:, None]], axis=1)
