"""Adafactor: stores only row and column means of Adam's second moment (Shazeer and Stern 2018, arXiv:1804.04235).

There is no first moment, so the state is far smaller than the weights. As in Zhai et al. 2021 (arXiv:2106.04560),
updates do not grow with their weights, and the decay of the second moment stops at b2.

optax's `scale_by_factored_rms` takes the two largest dimensions of an array for rows and columns. Stacked layers would
be one of them in a deep model. Here every layer's matrix has rows and columns by name.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.dimensions import STACKED, Dims, map_dims
from training.optimizers.rule import Rule, Tree, sides

if TYPE_CHECKING:
  from training.optimizer import Optimizer

EXPONENT = 0.8  # the second moment decays by 1 - step^-0.8
TINY = 1e-30  # added to squared gradients
LARGEST = 1.0  # root mean square of an update


class FactoredState(NamedTuple):
  """The moments of each weight: for a matrix the means of its rows and columns, for a norm's scale every number."""

  step: Any
  moments: Tree


def adafactor(settings: "Optimizer", dims: Tree, dtype: str) -> Rule:
  def zeros(w: jax.Array, names: Dims) -> dict[str, jax.Array]:
    return {name: jnp.zeros([w.shape[at] for at in kept], w.dtype) for name, kept in _kept(names).items()}

  def init(params: Tree) -> FactoredState:
    return FactoredState(jnp.zeros([], jnp.int32), jax.tree.map(zeros, params, dims))

  def update(gradients: Tree, state: FactoredState, params: Tree = None) -> tuple[Tree, FactoredState]:
    step = optax.safe_increment(state.step)
    decay = jnp.minimum(1 - step.astype(jnp.float32) ** -EXPONENT, settings.b2)

    def moments(g: jax.Array, names: Dims, old: dict[str, jax.Array]) -> dict[str, jax.Array]:
      means = {name: jnp.mean(g * g + TINY, _others(names, kept)) for name, kept in _kept(names).items()}
      return {name: decay * old[name] + (1 - decay) * mean for name, mean in means.items()}

    new = jax.tree.map(moments, gradients, dims, state.moments)
    return jax.tree.map(_scaled, gradients, dims, new), FactoredState(step, new)

  kept_dims = lambda names: {name: tuple(names[at] for at in kept) for name, kept in _kept(names).items()}
  sums = lambda names: [(kept, _others(names, kept)) for kept in _kept(names).values()]
  state = FactoredState((), map_dims(kept_dims, dims))
  return Rule(optax.GradientTransformation(init, update), state, sums=sums)


def _kept(dims: Dims) -> dict[str, tuple[int, ...]]:
  """For each moment of a weight, the dimensions of the weight that the moment keeps."""
  lead, found = _lead(dims), sides(dims)
  if found is None:
    return {"all": tuple(range(len(dims)))}
  return {"rows": lead + found.rows, "columns": lead + found.columns}


def _lead(dims: Dims) -> tuple[int, ...]:
  """The dimensions of layers and of experts, if there are any."""
  return tuple(at for at, dim in enumerate(dims) if dim in STACKED)


def _others(dims: Dims, kept: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(at for at in range(len(dims)) if at not in kept)


def _scaled(g: jax.Array, dims: Dims, moments: dict[str, jax.Array]) -> jax.Array:
  """A gradient divided by the root of its second moment, and made smaller if it is too large, in each matrix apart."""
  kept, lead = _kept(dims), _lead(dims)
  whole = {name: jnp.expand_dims(moment, _others(dims, kept[name])) for name, moment in moments.items()}
  if "all" in whole:
    update = g * jax.lax.rsqrt(whole["all"])
  else:
    mean = jnp.mean(whole["rows"], _others(dims, lead), keepdims=True)
    update = g * jax.lax.rsqrt(whole["rows"] / mean) * jax.lax.rsqrt(whole["columns"])
  size = jnp.sqrt(jnp.mean(update * update, _others(dims, lead), keepdims=True))
  return update / jnp.maximum(1.0, size / LARGEST)
