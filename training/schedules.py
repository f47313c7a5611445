"""Schedules: the learning rate as a function of the step. To add one, write a function and add it to `SCHEDULES`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import optax

if TYPE_CHECKING:
  from training.optimizer import Optimizer


def cosine(o: "Optimizer", warmup: int) -> optax.Schedule:
  """Falls from the peak along half a cosine, over all steps after the warm-up (arXiv:1608.03983)."""
  return optax.warmup_cosine_decay_schedule(
    init_value=o.learning_rate / (warmup + 1),
    peak_value=o.learning_rate,
    warmup_steps=warmup,
    decay_steps=max(o.steps, warmup + 1),
    end_value=o.learning_rate * o.final_fraction,
  )


def constant(o: "Optimizer", warmup: int) -> optax.Schedule:
  """Stays at the peak. A run can be continued for any number of steps."""
  return optax.warmup_constant_schedule(o.learning_rate / (warmup + 1), o.learning_rate, warmup)


def wsd(o: "Optimizer", warmup: int) -> optax.Schedule:
  """Warm-up, stable, decay (arXiv:2404.06395): stays at the peak, and falls in a line over the last steps.

  A run with more steps can go on from any checkpoint before the decay: it has seen the same learning rates.
  """
  decay = min(round(o.decay_fraction * o.steps), o.steps - warmup)
  fall = optax.linear_schedule(o.learning_rate, o.learning_rate * o.final_fraction, decay)
  return optax.join_schedules([constant(o, warmup), fall], [o.steps - decay])


# By name: (settings, steps of warm-up) → the learning rate of the update from a step to the next.
SCHEDULES: dict[str, Callable[["Optimizer", int], optax.Schedule]] = {
  "cosine": cosine, "constant": constant, "wsd": wsd,
}  # fmt: skip
