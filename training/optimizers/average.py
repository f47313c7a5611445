"""The moving average of the weights: a model that is often better than the newest weights, and less noisy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from training.optimizers.rule import Tree


class Averaged(NamedTuple):
  """The state of an optimizer that also keeps the average of the weights: `ema`, in float32."""

  rule: Any
  ema: Tree


def averaged(transform: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
  """The same transformation, whose state also has the average. Each step moves it by 1 - `decay` to the new weights.

  After t steps the decay is at most (1 + t) / (10 + t), so that the average soon forgets the random initial weights.
  """
  inner = optax.with_extra_args_support(transform)

  def init(params: Tree) -> Averaged:
    return Averaged(inner.init(params), jax.tree.map(lambda w: w.astype(jnp.float32), params))

  def update(
    gradients: Tree, state: Averaged, params: Tree = None, *, rate: jax.Array, step: jax.Array, **more: Any
  ) -> tuple[Tree, Averaged]:
    changes, new = inner.update(gradients, state.rule, params, **more)
    share = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    move = lambda mean, w, change: mean + share * (w - rate * change - mean)
    return changes, Averaged(new, jax.tree.map(move, state.ema, params, changes))

  return optax.GradientTransformationExtraArgs(init, update)
