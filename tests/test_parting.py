"""What a failed comparison of two runs says: on a small model in NumPy, with one mistake in each place."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from parting import blocks_of, explained, first_parting

from training.program import Params

WIDTH = 4
ALIKE, MIXED = ("blocks",) * 3, ("blocks", "dense_blocks", "blocks")  # the stacks of a model's three blocks


def params(order: Sequence[str] = ALIKE) -> Params:
  random = np.random.default_rng(0)
  draw = lambda *shape: random.standard_normal(shape)
  blocks = lambda n: {"attention": {"out": draw(n, WIDTH), "query": draw(n, WIDTH)}, "mlp": {"down": draw(n, WIDTH)}}
  stacks = {stack: blocks(order.count(stack)) for stack in dict.fromkeys(order)}
  return {"embedding": draw(WIDTH), **stacks, "head": draw(WIDTH), "norm": {"scale": np.ones(WIDTH)}}


def run(
  wrong: str = "", block: int = -1, gradient: str = "", order: Sequence[str] = ALIKE
) -> Callable[[Params], tuple[float, Params]]:
  """A model whose blocks add two terms to a stream; with a mistake of a thousandth in one of its numbers."""
  places = [(stack, order[:at].count(stack)) for at, stack in enumerate(order)]

  def of(w: Params) -> tuple[float, Params]:
    off = lambda name, layer=-1: 1.001 if (name, layer) == (wrong, block) else 1.0
    x = w["embedding"] * off("embedding")
    for i, (stack, at) in enumerate(places):
      attention, mlp = ({name: x[at] for name, x in w[stack][half].items()} for half in ("attention", "mlp"))
      x = x + attention["out"] * np.tanh(x * attention["query"]) * off("attention", i)
      x = x + mlp["down"] * np.sin(x) * off("mlp", i)
    ones = {"embedding": np.ones(WIDTH), "head": np.ones(WIDTH), "norm": {"scale": x * w["head"]}}
    like = lambda half: {name: np.ones_like(x) for name, x in half.items()}
    of_blocks = {stack: {half: like(names) for half, names in w[stack].items()} for stack in dict.fromkeys(order)}
    if gradient in ones:
      ones[gradient][2] += 1e-3
    elif gradient:
      half, name = gradient.split("/")
      for stack, at in places[: block + 1]:
        of_blocks[stack][half][name][at, 2] += 1e-3  # and of all blocks before
    return float(x @ w["head"] * off("head")), ones | of_blocks

  return of


def parted(mistake: Callable[[Params], Any], order: Sequence[str] = ALIKE, w: Params | None = None) -> str:
  return first_parting(mistake, run(order=order), w or params(order), blocks_of(order))


@pytest.mark.parametrize(
  "mistake, said",
  [
    ({"wrong": "embedding"}, "forward pass, in what is outside of the blocks: embedding, head or loss"),
    ({"wrong": "attention", "block": 0}, "forward pass, in the activations of block 0, after its attention"),
    ({"wrong": "attention", "block": 2}, "forward pass, in the activations of block 2, after its attention"),
    ({"wrong": "mlp", "block": 1}, "forward pass, in the activations of block 1, after its MLP"),
    ({"gradient": "head"}, "backward pass, in the gradient of head by 1.0e-03; the losses are equal"),
    ({"gradient": "attention/query", "block": 1}, "in the gradient of attention/query of block 1 by 1.0e-03; 1 others"),
    ({"gradient": "mlp/down", "block": 2}, "in the gradient of mlp/down of block 2 by 1.0e-03; 2 others differ"),
    ({"gradient": "embedding"}, "in the gradient of embedding by 1.0e-03; the losses are equal"),
  ],
)
@pytest.mark.parametrize("order", [ALIKE, MIXED])
def test_the_first_difference_is_where_the_mistake_is(order: Sequence[str], mistake: dict[str, Any], said: str):
  assert said in parted(run(**mistake, order=order), order)


def test_a_difference_that_the_loss_does_not_see_is_seen():
  """Of activations that change by as much up as down."""
  w = params() | {"head": np.ones(WIDTH)}

  def wrong(given: Params) -> tuple[float, Params]:
    loss, gradients = run()(given)
    changed = gradients["norm"]["scale"] + np.array([1e-3, -1e-3, 0, 0]) * np.any(given["blocks"]["mlp"]["down"][1])
    return loss, gradients | {"norm": {"scale": changed}}

  assert "in the activations of block 1, after its MLP" in parted(wrong, w=w)


def test_what_is_not_a_number_is_a_difference():
  nowhere = lambda w: (float("nan"), run()(w)[1])
  assert "outside of the blocks" in parted(nowhere)


def test_equal_runs_do_not_part():
  assert parted(run()) == ""


def test_nothing_is_computed_where_nothing_fails():
  with explained(None, None, 0):  # of which every use would fail
    pass
