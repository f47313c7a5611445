"""The registry of optimizers. Each is a function of the settings (optimizer.py) that returns a `Rule` (rule.py).

Its arguments are the settings, the logical dimensions of the weights, and the dtype in which the model computes. A new
optimizer is one such function and one entry of `OPTIMIZERS`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import optax

from training.optimizers.adafactor import adafactor
from training.optimizers.muon import muon
from training.optimizers.rule import Rule as Rule
from training.optimizers.rule import Tree

if TYPE_CHECKING:
  from training.optimizer import Optimizer


def adamw(settings: "Optimizer", dims: Tree, dtype: str) -> Rule:
  """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv:1711.05101)."""
  return Rule(optax.scale_by_adam(settings.b1, settings.b2, settings.eps), optax.ScaleByAdamState((), mu=dims, nu=dims))


def lion(settings: "Optimizer", dims: Tree, dtype: str) -> Rule:
  """The sign of momentum (Chen et al. 2023, arXiv:2302.06675)."""
  return Rule(optax.scale_by_lion(settings.b1, settings.b2), optax.ScaleByLionState((), mu=dims))


def sgd(settings: "Optimizer", dims: Tree, dtype: str) -> Rule:
  """Gradient descent with momentum: the update is the gradient plus `momentum` times the update before."""
  return Rule(optax.trace(settings.momentum), optax.TraceState(dims))


OPTIMIZERS: dict[str, Callable[["Optimizer", Tree, str], Rule]] = {
  optimizer.__name__: optimizer for optimizer in (adamw, muon, adafactor, lion, sgd)
}
ELEMENTWISE = ("adamw", "lion", "sgd")  # they update each number by itself, so a weight can be updated in parts
