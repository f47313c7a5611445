"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

It updates the matrices of the blocks. AdamW updates all other weights: embedding, head and the scales of norms. An
orthogonal update is scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so one learning rate and one
weight decay suit both.
"""

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.dimensions import STACKED, UNSHARDED, Dims, Sharding, is_dims
from training.optimizers.rule import Rule, Tree, sides

if TYPE_CHECKING:
  from training.optimizer import Optimizer

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: small singular values grow fast; all end between 0.7 and 1.2
RMS = 0.2  # about that of AdamW's updates
TINY = 1e-8  # added to the size of a matrix


class MuonState(NamedTuple):
  """The momentum of the blocks' matrices, and Adam's moments of all other weights. Each has None for the rest."""

  momentum: Any
  adam: Any


def muon(settings: "Optimizer", dims: Tree, dtype: str) -> Rule:
  momentum = optax.trace(settings.momentum, nesterov=True)
  adam = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
  matrices, others = (functools.partial(_chosen, dims, wanted) for wanted in (True, False))

  def init(params: Tree) -> MuonState:
    return MuonState(momentum.init(matrices(params)), adam.init(others(params)))

  def update(
    gradients: Tree, state: MuonState, params: Tree = None, *, sharding: Sharding = UNSHARDED, **more: Any
  ) -> tuple[Tree, MuonState]:
    moved, of_momentum = momentum.update(matrices(gradients), state.momentum)
    scaled, of_adam = adam.update(others(gradients), state.adam)
    made = jax.tree.map(lambda m, names: orthogonal(m, names, dtype, sharding), moved, matrices(dims))
    joined = jax.tree.map(lambda names, m, s: s if m is None else m, dims, made, scaled, is_leaf=is_dims)
    return joined, MuonState(of_momentum, of_adam)

  names = MuonState(optax.TraceState(matrices(dims)), optax.ScaleByAdamState((), mu=others(dims), nu=others(dims)))
  return Rule(optax.GradientTransformationExtraArgs(init, update), names, is_orthogonal, flops)


def is_orthogonal(dims: Dims) -> bool:
  """Whether the updates of a weight with these dimensions are made orthogonal: those of the blocks' matrices."""
  return bool(dims) and dims[0] in STACKED and sides(dims) is not None


def _chosen(dims: Tree, wanted: bool, tree: Tree) -> Tree:
  """The tree with only the blocks' matrices, or if not `wanted`, all other weights; None in place of the rest."""
  return jax.tree.map(lambda names, x: x if is_orthogonal(names) is wanted else None, dims, tree, is_leaf=is_dims)


def orthogonal(x: jax.Array, dims: Dims, dtype: str, sharding: Sharding) -> jax.Array:
  """Makes each matrix of a stacked weight orthogonal, and gives it the size of AdamW's updates.

  Devices hold pieces of matrices. They exchange these pieces, and compute, in `dtype`.
  """
  made = sharding.by_layer(functools.partial(_newton_schulz, dims=dims), x.astype(dtype), dims)
  return RMS * math.sqrt(max(_sizes(x, dims))) * made.astype(x.dtype)


def _sizes(x: jax.Array, dims: Dims) -> tuple[int, ...]:
  """The numbers of rows and columns of each layer's matrix."""
  return tuple(math.prod(x.shape[at] for at in side) for side in sides(dims) or ())


def _newton_schulz(x: jax.Array, dims: Dims) -> jax.Array:
  """The Newton-Schulz iteration on stacked matrices, [L, ...] or [L, E, ...]: singular values become about 1."""
  m = x.reshape(-1, *_sizes(x, dims))
  is_tall = m.shape[1] > m.shape[2]
  m = m.swapaxes(1, 2) if is_tall else m  # products of the shorter side cost less
  size = jnp.linalg.norm(m.astype(jnp.float32), axis=(1, 2), keepdims=True)
  a, b, c = COEFFICIENTS

  def iterate(m: jax.Array, _: None) -> tuple[jax.Array, None]:
    gram = m @ m.swapaxes(1, 2)
    return a * m + (b * gram + c * gram @ gram) @ m, None

  m, _ = jax.lax.scan(iterate, (m / (size + TINY)).astype(m.dtype), length=STEPS)
  return (m.swapaxes(1, 2) if is_tall else m).reshape(x.shape)


def flops(rows: int, columns: int) -> int:
  """FLOPs to make one matrix orthogonal."""
  short, long = sorted((rows, columns))
  return STEPS * (4 * short * short * long + 2 * short**3)
