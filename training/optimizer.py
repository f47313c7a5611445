"""AdamW with warm-up, cosine decay and clipping by global norm."""

import dataclasses
from typing import Any

import jax
import optax

from errors import ConfigError, above_zero, not_negative, positive


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The optimizer's settings; `configs/base.py` documents each field.

  The learning rate is a function of the step and is applied outside `transform`. So skipped updates count as steps, and
  the state of `transform` holds only Adam's moments and their count.
  """

  learning_rate: float
  warmup: int
  steps: int
  final_fraction: float
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float

  def __post_init__(self) -> None:
    positive("steps", self.steps)
    above_zero("optimizer.learning_rate", self.learning_rate, "3e-4")
    above_zero("optimizer.eps", self.eps, "1e-8")
    not_negative("optimizer.warmup", self.warmup, "use 0 for no warm-up")
    if not 0 <= self.final_fraction <= 1:
      raise ConfigError(f"optimizer.final_fraction={self.final_fraction} must be from 0 to 1")
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        raise ConfigError(f"optimizer.{name}={getattr(self, name)} must be at least 0 and below 1")
    for name in ("clip_norm", "weight_decay"):
      not_negative(f"optimizer.{name}", getattr(self, name))

  @property
  def transform(self) -> optax.GradientTransformation:
    """Turns gradients into updates, which the learning rate then scales."""
    return optax.chain(
      optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity(),
      optax.scale_by_adam(self.b1, self.b2, self.eps),
      optax.add_decayed_weights(self.weight_decay, mask=is_decayed),
    )

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """The learning rate of the update from `step` to step + 1. It is never zero."""
    warmup = min(self.warmup, self.steps)
    rates = optax.warmup_cosine_decay_schedule(
      init_value=self.learning_rate / (warmup + 1),
      peak_value=self.learning_rate,
      warmup_steps=warmup,
      decay_steps=max(self.steps, warmup + 1),
      end_value=self.learning_rate * self.final_fraction,
    )
    return rates(step)


def is_decayed(params: dict[str, Any]) -> dict[str, Any]:
  """Weight decay applies to matrices, not to the scales of norms."""
  return jax.tree.map_with_path(lambda path, _: path[-1].key != "scale", params)
