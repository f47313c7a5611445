"""Where two runs part first: in which block, and in which quantity. Computed only if a comparison of them has failed.

A wrong number spreads: one mistake in a block changes all gradients, and the weight that differs most may be far from
it. So the first step is followed in the order of its computation: the loss of the first blocks alone, with one half of
a block more each time; then the gradients, from the last block to the first; then the updated weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from helpers import PARITY, placed, random_batch, random_params, unpadded

from models.stacks import STACKS
from strategies import Strategy
from training.program import Params, TrainState

# The weights that end the halves of a block. Where they are zero, the half adds nothing to the residual stream.
ENDS = {"out": "attention", "down": "MLP"}
Run = Callable[[Params], tuple[float, Params]]  # parameters → the loss and its gradients
Blocks = Mapping[str, Sequence[int]]  # the numbers of the blocks of each stack


@contextlib.contextmanager
def explained(ours: Strategy, theirs: Strategy, size: int) -> Iterator[None]:
  """Adds to an AssertionError where the first step of a strategy, with so many examples, parts from another's."""
  try:
    yield
  except AssertionError as error:
    raise AssertionError(f"{first_difference(ours, theirs, size)}\n{error}") from error


def first_difference(ours: Strategy, theirs: Strategy, size: int) -> str:
  """Where the first step of two strategies with the same program differs first, in a sentence."""
  start, runs = random_params(theirs.program.sizes), (ours, theirs)
  blocks = blocks_of([kind.stack for kind in theirs.program.sizes.kinds])
  run = lambda runner: lambda params: _gradients(runner, params, size)
  if where := first_parting(run(ours), run(theirs), start, blocks):
    return where
  if differing := _differing(*(_updated(runner, start, size) for runner in runs), blocks):
    return f"the runs part first in the update of {differing[0]}; the gradients of the first step are equal"
  return "the first step is the same in both runs, so they part in a later one"


def blocks_of(stacks: Sequence[str]) -> Blocks:
  """By the stacks of a model's blocks, in order."""
  return {stack: [block for block, name in enumerate(stacks) if name == stack] for stack in STACKS}


def first_parting(ours: Run, theirs: Run, params: Params, blocks: Blocks, tolerance: float = PARITY) -> str:
  """Where the losses, or else the gradients, of two runs differ first; "" if they are equal."""
  depth = sum(map(len, blocks.values()))
  halves = [(block, half) for block in range(depth) for half in range(len(ENDS))]
  for block, half in [(-1, 1), *halves]:
    cut = _without_what_follows(params, blocks, block, half)
    # The gradient of the last norm's scale follows from the activations before it, and sees more than the loss does.
    (a, of_a), (b, of_b) = ((loss, gradients.get("norm", {})) for loss, gradients in (ours(cut), theirs(cut)))
    if not abs(a - b) <= tolerance * abs(b) or _differing(of_a, of_b, blocks, tolerance):
      what = f"the activations of block {block}, after its {[*ENDS.values()][half]}"
      what = "what is outside of the blocks: embedding, head or loss" if block < 0 else what
      return f"the runs part first in the forward pass, in {what}; the loss until there is {a:.8g} and {b:.8g}"
  if differing := _differing(ours(params)[1], theirs(params)[1], blocks, tolerance):
    more = f"; {len(differing) - 1} others differ" if differing[1:] else ""
    return f"the runs part first in the backward pass, in the gradient of {differing[0]}{more}; the losses are equal"
  return ""


def _without_what_follows(params: Params, blocks: Blocks, block: int, half: int) -> Params:
  """The parameters with zeros for the last weights of all halves after this one; a block of -1 is before all."""
  changed = dict(params)
  for stack in (stack for stack in STACKS if stack in params):
    numbers = np.array(blocks[stack])

    def change(path: tuple[Any, ...], w: np.ndarray, numbers: np.ndarray = numbers) -> np.ndarray:
      ends = [at for at, name in enumerate(ENDS) if name in [key.key for key in path]]
      stays = numbers < (block + 1 if ends and ends[0] <= half else block)
      return np.where(stays.reshape(-1, *(1,) * (w.ndim - 1)), w, 0) if ends else w

    changed[stack] = jax.tree.map_with_path(change, params[stack])
  return changed


def _differing(ours: Params, theirs: Params, blocks: Blocks, tolerance: float = PARITY) -> list[str]:
  """The weights that differ, in the order of the backward pass: the head, the last block, ..., the embedding."""
  found = []
  for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
    names, largest = [str(key.key) for key in path], np.abs(y).max()
    layers = (
      [(np.float64(x), np.float64(y))] if names[0] not in STACKS else zip(np.float64(x), np.float64(y), strict=True)
    )
    for layer, (a, b) in enumerate(layers):
      if not np.abs(a - b).max() <= tolerance * largest:
        share, name = np.abs(a - b).max() / max(largest, np.finfo(np.float32).tiny), "/".join(names)
        if names[0] in STACKS:
          block = blocks[names[0]][layer]
          place = (1, -block, not names[1].startswith("mlp"), not set(names) & ENDS.keys())
          found.append((place, f"{'/'.join(names[1:])} of block {block} by {share:.1e}"))
        else:
          found.append(((2 * ("embedding" in names), 0, False, False), f"{name} by {share:.1e}"))
  return [what for _, what in sorted(found)]


def _state(runner: Strategy, params: Params) -> TrainState:
  moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), runner.program.abstract_state().opt_state)
  return placed(TrainState(np.zeros((), np.int32), params, moments), runner)


def _gradients(runner: Strategy, params: Params, size: int) -> tuple[float, Params]:
  batch = runner.shard(random_batch(runner.program, size), size)
  metrics, gradients = runner.gradients(_state(runner, params), batch)
  return float(metrics["loss"]), unpadded(gradients, runner.program.trained(runner.shapes.params))


def _updated(runner: Strategy, params: Params, size: int) -> Params:
  batch = runner.shard(random_batch(runner.program, size), size)
  return unpadded(runner.train_step(_state(runner, params), batch)[0].params, runner.shapes.params)
