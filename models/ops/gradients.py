"""Gradients that the model gives by itself, in place of those that JAX derives."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def with_gradient(forward: Callable, backward: Callable, *args: Any) -> Any:
  """The first result of `forward(*args)`. `backward` gets the second and a cotangent, and returns the gradients."""
  use = jax.custom_vjp(lambda *args: forward(*args)[0])
  use.defvjp(forward, backward)
  return use(*args)


UNSPLIT = "unsplit"  # the name of a call of `unsplit` in a program


def unsplit(work: Callable[..., T]) -> Callable[..., T]:
  """`work`, which computes gradients of activations and of weights together, as in one loop.

  A pipeline that wants the gradients of weights later runs `work` twice (strategies/execution/stages/split.py). Each
  time, compilers leave out what only the other results need. Nothing inside `work` is kept.
  """

  def call(*given: Any) -> T:
    return work(*given)

  call.__name__ = UNSPLIT
  return jax.jit(call)
