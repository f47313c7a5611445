"""The optimizer's settings, which all optimizers share. optimizers/ has the optimizers, schedules.py learning rates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from errors import ConfigError, above_zero, not_negative, one_of, positive
from training.optimizers import ELEMENTWISE, OPTIMIZERS, Rule
from training.optimizers.average import Averaged, averaged
from training.optimizers.rounding import stored
from training.schedules import SCHEDULES

MOMENTS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """The optimizer's settings; `configs/base.py` documents each field.

  The learning rate is a function of the step and is applied outside `transform`. So skipped updates count as steps, and
  the state of `transform` holds only what the optimizer itself needs.
  """

  learning_rate: float
  schedule: str
  warmup: int
  steps: int
  final_fraction: float
  decay_fraction: float
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float
  name: str
  momentum: float
  moments: str
  on_host: bool
  ema: float

  def __post_init__(self) -> None:
    one_of("optimizer.name", self.name, OPTIMIZERS)
    one_of("optimizer.moments", self.moments, MOMENTS)
    one_of("optimizer.schedule", self.schedule, SCHEDULES)
    if self.on_host and not self.can_stream:
      raise ConfigError(
        f"optimizer.on_host=True does not fit optimizer.name={self.name!r} with optimizer.moments={self.moments!r}; "
        f"use one of {', '.join(ELEMENTWISE)} with 'float32'"
      )
    positive("steps", self.steps)
    above_zero("optimizer.learning_rate", self.learning_rate, "3e-4")
    above_zero("optimizer.eps", self.eps, "1e-8")
    not_negative("optimizer.warmup", self.warmup, "use 0 for no warm-up")
    for name in ("final_fraction", "decay_fraction"):
      if not 0 <= getattr(self, name) <= 1:
        raise ConfigError(f"optimizer.{name}={getattr(self, name)} must be from 0 to 1")
    for name in ("b1", "b2", "momentum", "ema"):
      if not 0 <= getattr(self, name) < 1:
        raise ConfigError(f"optimizer.{name}={getattr(self, name)} must be at least 0 and below 1")
    for name in ("clip_norm", "weight_decay"):
      not_negative(f"optimizer.{name}", getattr(self, name))

  @property
  def can_stream(self) -> bool:
    """Whether the state can be in the host's memory: parts of a weight can then be updated one after another."""
    return self.name in ELEMENTWISE and self.moments == "float32"

  def rule(self, dims: dict[str, Any], dtype: str) -> Rule:
    """The optimizer for weights with these logical dimensions, in a model that computes in this dtype.

    Its transformation turns gradients into updates, which the learning rate then scales.
    """
    own = OPTIMIZERS[self.name](self, dims, dtype)
    transform = optax.chain(
      stored(own.transform, self.moments),
      optax.add_decayed_weights(self.weight_decay, mask=is_decayed),
    )
    names: Any = (own.dims, optax.MaskedState(optax.EmptyState()))
    if self.ema:
      return own._replace(transform=averaged(transform, self.ema), dims=Averaged(names, dims))
    return own._replace(transform=transform, dims=names)

  def clipped(self, gradients: Any, norm: jax.Array) -> Any:
    """Gradients with this global norm, scaled down if it is above `clip_norm`."""
    if not self.clip_norm:
      return gradients
    return jax.tree.map(lambda g: jnp.where(norm < self.clip_norm, g, (g / norm) * self.clip_norm), gradients)

  def learning_rate_at(self, step: jax.Array | int) -> jax.Array:
    """The learning rate of the update from `step` to step + 1. Zero only near the end, with `final_fraction` 0."""
    return SCHEDULES[self.schedule](self, min(self.warmup, self.steps))(step)


def is_decayed(params: dict[str, Any]) -> dict[str, Any]:
  """Weight decay applies to matrices, not to the scales of norms, nor to biases and sinks."""
  return jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(("scale", "bias", "sinks")), params)
