"""A backward pass in two parts computes the same gradients, and no product twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, equations, in_full

from models.ops.gradients import unsplit
from strategies.execution.stages.split import split_backward

LAYERS, WIDTH, HIDDEN = 3, 4, 6
Weights = dict[str, jax.Array]


def weights() -> Weights:
  shapes = {
    "first": (WIDTH, WIDTH), "up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH),
    "scale": (LAYERS, WIDTH), "shared": (WIDTH, WIDTH),
  }  # fmt: skip
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def model(weights: Weights, x: jax.Array, *, remat: bool, shared: bool) -> jax.Array:
  """A product before a scan over layers. With `shared`, all layers use one more matrix."""

  def layer(x: jax.Array, of_layer: Weights) -> tuple[jax.Array, None]:
    rows = (x * of_layer["scale"]).reshape(-1, WIDTH)
    hidden = jax.jit(jnp.tanh)((rows @ of_layer["up"]).reshape(*x.shape[:-1], HIDDEN))
    return x + hidden @ of_layer["down"] + (jnp.sin(x) @ weights["shared"] if shared else 0), None

  of_layers = {name: weights[name] for name in ("up", "down", "scale")}
  body = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable) if remat else layer
  return jax.lax.scan(body, x @ weights["first"], of_layers, unroll=2)[0]


def products(function: Callable, *arguments: Any) -> int:
  """Matrix products in a function; those in a scan count once."""
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr))


@pytest.mark.parametrize("remat, shared", in_full([(True, False), (False, True)], (False, True)))
def test_both_parts_together_are_the_backward_pass(remat: bool, shared: bool):
  x, cotangent = jax.random.normal(jax.random.key(1), (2, 1, 5, WIDTH))
  _, vjp = jax.vjp(lambda weights, x: model(weights, x, remat=remat, shared=shared), weights(), x)
  residuals, tree = jax.tree.flatten(vjp)
  pullback = lambda residuals, cotangent: jax.tree.unflatten(tree, residuals)(cotangent)
  early, late = split_backward(pullback, residuals, cotangent)
  before, kept = jax.jit(early)(residuals, cotangent)
  found = jax.jit(late)(residuals, kept), before
  assert_trees_close(found, pullback(residuals, cotangent), PARITY)
  parts = (pullback, residuals, cotangent), (early, residuals, cotangent), (late, residuals, kept)
  counts = tuple(products(*part) for part in parts)
  if shared:  # the scan carries the gradient of the shared matrix, so it stays in the chain
    assert counts == (2 + 6, 1 + 4, 1 + 2)
  elif remat:  # both parts compute the hidden values again: one product
    assert counts == (2 + 5, 1 + 3, 1 + 3)
  else:
    assert counts == (2 + 4, 1 + 2, 1 + 2)


def test_a_computation_that_is_not_split_runs_in_both_parts_and_keeps_what_it_reads():
  """As the loops of experts do. Each part needs some of its results. It keeps a cotangent, and nothing made of it."""
  random = np.random.default_rng(0)
  w, x, cotangent = (random.standard_normal((n, WIDTH), np.float32) for n in (WIDTH, 5, 5))

  def pullback(fixed: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    w, x = fixed

    def both(cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
      twice = jnp.concatenate([cotangent, cotangent])
      return (twice @ w)[: len(x)], jnp.concatenate([x, 2 * x]).T @ twice

    of_x, of_w = unsplit(both)(cotangent)
    return of_w, of_x

  early, late = split_backward(pullback, (w, x), cotangent)

  @jax.jit
  def run(fixed: Any, cotangent: jax.Array) -> tuple[Any, Any, Any]:
    before, kept = early(fixed, cotangent)
    return (late(fixed, kept), before), pullback(fixed, cotangent), kept

  ours, expected, kept = run((w, x), cotangent)
  assert_trees_close(ours, expected, PARITY)
  assert [leaf.shape for leaf in jax.tree.leaves(kept)] == [cotangent.shape]


def test_only_what_the_weights_need_is_kept():
  """The cotangents of the three products' results, and one sum; not their reshaped or scaled copies."""
  x, cotangent = jax.random.normal(jax.random.key(1), (2, 1, 5, WIDTH))
  _, vjp = jax.vjp(lambda weights, x: model(weights, x, remat=False, shared=False), weights(), x)
  _, kept = jax.eval_shape(*_early(vjp, cotangent))
  shapes = sorted(leaf.shape for leaf in jax.tree.leaves(kept))
  assert shapes == sorted([(1, 5, WIDTH), (LAYERS, WIDTH), (LAYERS, 1, 5, WIDTH), (LAYERS, 1, 5, HIDDEN)])


def _early(vjp: Callable, cotangent: jax.Array) -> tuple[Callable, Any, jax.Array]:
  residuals, tree = jax.tree.flatten(vjp)
  early, _ = split_backward(lambda residuals, ct: jax.tree.unflatten(tree, residuals)(ct), residuals, cotangent)
  return early, residuals, cotangent
