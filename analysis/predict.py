"""What a step keeps in memory and computes on each device, by formula: from the layout and the model alone.

explain shows it beside what the compiler made; plan ranks layouts by it, without compiling any.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from analysis import theory
from analysis.case import Case, weights
from analysis.roofline import Roofline
from analysis.saved import bytes_per_example
from models.attention import QUERY_BLOCK
from models.config import ModelConfig
from runtime.hardware import Chip
from strategies.pipeline.stage import UNROLL


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
  def state(self) -> float:
    return self.parameters + self.optimizer

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
  fitted = FITTED[case.joins]
  blocks = fitted.block[model.remat]
  if case.schedule:
    in_unit = layers // case.schedule.chunks
    scanned = in_unit > UNROLL  # then a unit's residuals are stacked first and copied to their slot
    kept = (case.schedule.slots["residuals"] + 1 + scanned) * bytes_per_example(model, *shards, in_unit)
    blocks += 1.0 if scanned else 0.6  # UNROLL blocks are written out
  else:
    kept = bytes_per_example(model, *shards, layers)
  if layout.shards("heads") > 1 and model.remat == "full":
    blocks += fitted.sums  # what is summed over `model` is there in parts and as a whole
  block = blocks * case.examples * bytes_per_example(model, *shards, 1, "all")
  logits = case.examples * _logits(case) * 4
  cast = sum(map(case.held, weights(model))) * case.item * (model.dtype != model.param_dtype)
  return Memory(
    parameters=held * param,
    optimizer=2 * held * param,
    gradients=held * param * (2 if case.units > 1 else 1),
    saved=case.examples * kept,
    working=max(block, logits) + cast,
  )


class Fitted(NamedTuple):
  """What `memory_analysis` and the text of programs show of XLA's compilers: the CPU's, and the accelerators' (TPU).

  Attributes:
    block: how many times the values of one block are there at once in its backward pass, by remat policy: these, their
      cotangents, and copies, less what never leaves a kernel.
    sums: how many more where tensor parallelism sums activations.
    passes: how often a block's values are read or written.
  """

  block: dict[str, float]
  sums: float
  passes: dict[str, float]


FITTED = {
  False: Fitted({"minimal": 0.85, "dots": 0.85, "full": 1.0}, 0.0, {"minimal": 10.2, "dots": 10.0, "full": 9.5}),
  True: Fitted({"minimal": 1.15, "dots": 1.4, "full": 0.8}, 0.4, {"minimal": 5.5, "dots": 4.7, "full": 4.2}),
}


def flops(case: Case) -> float:
  """Floating-point operations of one device in a step, with what remat does again; of a pipeline, the busiest stage."""
  model, layout = case.model, case.layout
  examples = case.examples * case.units
  t, d = model.positions, model.width
  split = {"heads": layout.shards("heads"), "mlp": layout.shards("mlp"), "vocab": layout.shards("vocab")}
  projections = 2 * d * model.head_dim * (2 * model.heads + 2 * model.kv_heads) / split["heads"]
  scores = 4 * t * d / split["heads"] * _computed(model)
  mlp = 6 * d * model.mlp_width / split["mlp"]
  again = {"minimal": 0.0, "dots": scores, "full": projections + scores + mlp * 2 / 3}[model.remat]
  again += scores / 2 * (model.attention == "cudnn")  # its backward pass makes the scores anew
  head = math.prod(model.predicts.head(model)[0]) / split.get(
    "vocab" if "vocab" in model.predicts.head(model)[1] else "", 1
  )
  # The embedding's input has no gradient, so its product runs twice; the head's runs three times.
  edges = 2 * 2 * model.reads.embedding_products(model) + 3 * 2 * head * model.predicts.predictions(model) / t
  layers = model.depth / layout.shards("layers")
  return examples * t * (layers * (3 * (projections + scores + mlp) + again) + edges)


def _logits(case: Case) -> float:
  """Logits of an example on one device."""
  model = case.model
  shape, dims = model.predicts.head(model)
  return model.predicts.predictions(model) * shape[1] / (case.layout.shards("vocab") if "vocab" in dims else 1)


def _computed(model: ModelConfig) -> float:
  """The share of all pairs of positions that attention computes."""
  t = model.positions
  if not model.predicts.causal or model.attention == "plain":
    return 1.0
  if model.attention == "cudnn":  # leaves out every pair that a causal mask hides, as calls.py counts it
    return (t + 1) / (2 * t)
  starts = range(0, t, QUERY_BLOCK)
  return sum(min(QUERY_BLOCK, t - start) * min(start + QUERY_BLOCK, t) for start in starts) / t**2


def traffic(case: Case) -> float:
  """Bytes that one device reads from and writes to its memory in a step.

  A block's own values pass through memory several times (`FITTED`); weights are read in each pass, gradients written
  and read, and the optimizer reads and writes three numbers a parameter.
  """
  model, layout = case.model, case.layout
  param = jnp.dtype(model.param_dtype).itemsize
  layers = model.depth // layout.shards("layers")
  block = bytes_per_example(model, layout.shards("heads"), layout.shards("mlp"), 1, "all")
  fitted = FITTED[case.joins].passes[model.remat]
  logits = _logits(case) * 4
  passes = 4 if model.remat == "full" else 3
  used = sum(map(case.used, weights(model))) * case.item
  held = sum(map(case.held, weights(model))) * param
  return case.units * (case.examples * (fitted * layers * block + 6 * logits) + passes * used + 2 * held) + 6 * held


def times(case: Case, chip: Chip, to_send: Callable[[theory.Sent], float]) -> Roofline:
  """Seconds of a step at the peaks of a device; `to_send` says how long the messages of a row of theory take."""
  seconds = {False: 0.0, True: 0.0}
  for row in theory.sent(case):
    seconds[row.waits] += to_send(row)
  return Roofline(
    compute=flops(case) / chip.flops,
    memory=traffic(case) / chip.bandwidth,
    communication=seconds[False],
    waiting=seconds[True],
    idle=case.idle,
  )
