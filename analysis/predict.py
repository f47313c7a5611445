"""What a step keeps in memory and computes on each device, by formula: from the layout and the model alone.

explain shows it beside what the compiler made; plan ranks layouts by it, without compiling any.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from analysis.case import Case, weights
from analysis.saved import bytes_per_example


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device in a training step.

  `saved` is what the backward pass needs of the forward pass; `working` what else is there at the worst moment: a
  block's values and their cotangents, gathered weights, the logits.
  """

  parameters: float
  optimizer: float
  gradients: float
  saved: float
  working: float

  @property
  def total(self) -> float:
    return sum(dataclasses.astuple(self))


def memory(case: Case) -> Memory:
  """Bytes of one device. `saved` is JAX's own trace (saved.py); `working` is fitted to compilers (`FITTED`)."""
  layout, model = case.layout, case.model
  param = jnp.dtype(model.param_dtype).itemsize
  held = sum(map(case.held, weights(model)))
  shards = (layout.shards("heads"), layout.shards("mlp"))
  layers = model.depth // layout.shards("layers")
  if case.schedule:
    kept = (case.schedule.slots["residuals"] + 1) * bytes_per_example(model, *shards, layers // case.schedule.chunks)
  else:
    kept = bytes_per_example(model, *shards, layers)
  fitted = FITTED[case.joins]
  block = fitted.block[model.remat] * case.examples * bytes_per_example(model, *shards, 1, "none")
  logits = case.examples * (1 if model.is_image else model.positions * model.vocab_size / layout.shards("vocab")) * 4
  cast = sum(map(case.held, weights(model))) * case.item * (model.dtype != model.param_dtype)
  gathered = max(case.used(weight) / (model.depth if weight.in_blocks else 1) for weight in weights(model)) * case.item
  return Memory(
    parameters=held * param,
    optimizer=2 * held * param,
    gradients=held * param * (2 if case.units > 1 else 1),
    saved=case.examples * kept * (fitted.saved if model.remat == "none" else 1),
    working=max(block, 2 * logits) + cast + (gathered if layout.shards("embed") > 1 else 0),
  )


class Fitted(NamedTuple):
  """What `memory_analysis` shows of XLA's compilers, the CPU's and the accelerators' (measured on TPU).

  `block` is how many times the values of one block are there at once in its backward pass, by remat policy: these,
  their cotangents, and copies. `saved` is the share of what JAX hands to the backward pass that is left where all of it
  is kept: some of it is the same number in two precisions.
  """

  saved: float
  block: dict[str, float]


FITTED = {
  False: Fitted(saved=1.0, block={"none": 1.85, "dots": 1.95, "full": 1.16}),
  True: Fitted(saved=0.8, block={"none": 1.5, "dots": 1.7, "full": 1.0}),
}


def flops(case: Case) -> float:
  """Floating-point operations of one device in a step, with what remat does again; of a pipeline, the busiest stage."""
  model, layout = case.model, case.layout
  examples = case.examples * case.units
  t, d = model.positions, model.width
  split = {"heads": layout.shards("heads"), "mlp": layout.shards("mlp"), "vocab": layout.shards("vocab")}
  projections = 2 * d * model.head_size * (2 * model.heads + 2 * model.kv_heads) / split["heads"]
  scores = 4 * t * d / split["heads"]
  mlp = 6 * d * model.mlp_width / split["mlp"]
  again = {"none": 0.0, "dots": scores, "full": projections + scores + mlp * 2 / 3}[model.remat]
  edge = 2 * model.patch_size**2 * 3 * d if model.is_image else 2 * d * model.vocab_size / split["vocab"]
  layers = model.depth / layout.shards("layers")
  return examples * t * (layers * (3 * (projections + scores + mlp) + again) + 3 * edge)
