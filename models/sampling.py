"""Chooses the next token of a text from the model's logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from errors import ConfigError, not_negative


class Sampling(NamedTuple):
  """How the next token is chosen. The logits are changed in this order, as in the library transformers.

  Attributes:
    repetition_penalty: tokens that are in the text already become less likely: a positive logit is divided by it, and a
      negative one multiplied (arXiv:1909.05858). 1: none.
    temperature: logits are divided by it; 0 picks the most likely token.
    top_k: only so many of the most likely tokens; 0: all.
    top_p: only the most likely tokens whose probabilities make this sum (arXiv:1904.09751); 1: all.
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
    """Whether it must be known which tokens a text holds."""
    return self.repetition_penalty != 1


def choose(logits: jax.Array, sampling: Sampling, seen: jax.Array, keys: jax.Array) -> jax.Array:
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
    likely = jnp.where(before < sampling.top_p, ordered, jnp.inf)  # the first is always kept
    logits = _at_least(logits, likely.min(axis=-1, keepdims=True))
  return jax.vmap(jax.random.categorical)(keys, logits)


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
  return jnp.where(logits < least, -jnp.inf, logits)
