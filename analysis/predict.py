"""Predicts a step's memory, FLOPs and memory traffic on each device, by formula, from the layout and the model alone.

tools/explain.py prints the predictions beside the compiler's figures. tools/plan.py ranks layouts by them and compiles
nothing.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from analysis import theory
from analysis.case import Case, weights
from analysis.compilers import COMPILERS
from analysis.links import Links
from analysis.roofline import Roofline
from analysis.saved import bytes_per_example
from models.attention import QUERY_BLOCK
from models.config import ModelConfig
from runtime.hardware import Chip
from strategies.layout import Layout
from strategies.pipeline.part import UNROLL


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device in a training step.

  Attributes:
    saved: activations that the forward pass saves for the backward pass.
    working: everything else at the worst moment: a block's values and their cotangents, gathered weights, the logits.
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
  """Bytes on one device. `saved` is read from JAX's trace (saved.py); `working` is fitted (`compilers.Fitted`)."""
  layout, model = case.layout, case.model
  param = jnp.dtype(model.param_dtype).itemsize
  counts = (case.held, case.kept, case.summed, case.updated)
  held, kept, summed, updated = (sum(map(count, weights(model))) for count in counts)
  shards = _shards(layout)
  layers = model.depth // layout.shards("layers")
  fitted = COMPILERS[case.compiler].fitted
  blocks = fitted.block[model.remat]
  if case.schedule:
    in_unit = layers // case.schedule.chunks
    scanned = in_unit > UNROLL  # a scan stacks its residuals before they are copied to their slot
    copies = case.schedule.slots["residuals"] + (2 if scanned else 1)
    saved = copies * bytes_per_example(model, *shards, in_unit)
    if case.schedule.splits:
      saved += (copies - case.schedule.slots["residuals"] + case.schedule.slots["kept"]) * in_unit * _kept(case)
    blocks += 1.0 if scanned else 0.6
  else:
    saved = bytes_per_example(model, *shards, layers)
  splits_positions = layout.shards("sequence") > 1
  if layout.shards("heads") > 1 and not splits_positions and model.remat == "full":
    blocks += fitted.sums  # an all-reduced activation exists twice: before and after the all-reduce
  block = blocks * case.examples * bytes_per_example(model, *shards, 1, "all")
  if splits_positions:
    block += fitted.whole * case.examples * model.positions * model.width * case.item
  logits = case.examples * _logits(case) * 4
  cast = fitted.cast * held * case.item if model.dtype != model.param_dtype else 0
  if case.by_hand:  # the weights as they are sent, for the whole step
    cast = kept * case.item if kept > held or model.dtype != model.param_dtype else 0
  gathered = [
    case.used(w) * case.item_of(w) for w in weights(model) if "head" in w.roles and case.used(w) > case.held(w)
  ]
  gradients = summed * param
  if case.units > 1:  # the sum so far, and the current part's; by hand this one is in the compute dtype
    gradients += fitted.part * summed * (case.item if case.by_hand and not case.schedule else param)
  working, saved = max(block, logits + fitted.head * sum(gathered)) + cast, case.examples * saved
  if updated < held:  # the new weights are gathered beside the old ones, when all else is free
    working = max(working, held * param - gradients - saved)
  return Memory(held * param, 2 * updated * param, gradients, saved, working)


def _kept(case: Case) -> float:
  """Bytes of one example that a block's backward unit keeps for its weight unit: the cotangents of seven products."""
  model, layout = case.model, case.layout
  heads = (model.heads + 2 * model.kv_heads) * model.head_dim / layout.shards("heads")
  mlp = 2 * model.mlp_width / layout.shards("mlp")
  return case.item * model.positions * (heads + mlp + 2 * model.width / layout.shards("sequence"))


class Product(NamedTuple):
  """Matrix products of a step.

  Attributes:
    flops: FLOPs of one device for each position.
    dims: the dimensions besides `batch` and `layers` whose sharding splits the products.
  """

  flops: float
  dims: tuple[str, ...]


def flops(case: Case) -> float:
  """FLOPs of one device in a step, including what remat repeats. In a pipeline: of the busiest stage."""
  return case.examples * case.units * case.model.positions * sum(product.flops for product in _products(case))


def repeated_flops(case: Case) -> float:
  """The part of `flops` that is redundant: work that several devices do, divided by the devices that do it.

  Devices repeat a product if they differ only along mesh axes that split none of its dimensions. A layout may do so by
  design: if `model` splits only `vocab`, its devices repeat the blocks. Without repetition, all devices together run
  `flops` × devices, and with it they run (`flops` − `repeated_flops`) × devices of different work.
  """
  layout, positions = case.layout, case.examples * case.units * case.model.positions
  repeated = 0.0
  for product in _products(case):
    axes = {axis for dim in ("batch", "layers", *product.dims) for axis in layout.axes(dim)}
    copies = layout.device_count / case.devices(tuple(axes))
    repeated += positions * product.flops * (1 - 1 / copies)
  return repeated


def _products(case: Case) -> list[Product]:
  """The products of one device: forward, backward (two for each of the forward pass), and again with remat."""
  model, layout = case.model, case.layout
  t, d = model.positions, model.width
  layers = model.depth / layout.shards("layers")
  projections = 2 * d * model.head_dim * (2 * model.heads + 2 * model.kv_heads) / layout.shards("heads")
  scores = 4 * t * model.heads * model.head_dim / layout.shards("heads") * _computed(model)
  mlp = 6 * d * model.mlp_width / layout.shards("mlp")
  attention_again = {"minimal": 0.0, "dots": scores, "full": projections + scores}[model.remat]
  mlp_again = mlp * 2 / 3 if model.remat == "full" else 0.0  # gate and up, but not down
  if case.schedule and case.schedule.splits:  # backward and weight units both compute again what they read
    attention_again += {"minimal": 0.0, "dots": scores / 2, "full": projections + scores}[model.remat]
    mlp_again *= 2
  if model.attention == "cudnn":
    attention_again += scores / 2  # its backward pass computes the scores again
  attention_again += COMPILERS[case.compiler].attention_again(case) * (projections + scores)
  (inputs, outputs), head = model.predicts.head(model)
  head_flops = 2 * inputs * outputs / _vocab_shards(case) * model.predicts.predictions(model) / t
  return [
    Product(layers * (3 * (projections + scores) + attention_again), ("heads",)),
    Product(layers * (3 * mlp + mlp_again), ("mlp",)),
    # The input has no gradient, so the embedding's product has no second backward product.
    Product(2 * 2 * model.reads.embedding_products(model) / layout.shards("sequence"), ("sequence",)),
    Product(3 * head_flops, tuple(dim for dim in head if dim == "vocab")),
  ]


def _shards(layout: Layout) -> tuple[int, int, int]:
  """The number of pieces that a block's values are split into, besides the batch: heads, MLP and positions."""
  return layout.shards("heads"), layout.shards("mlp"), layout.shards("sequence")


def _vocab_shards(case: Case) -> int:
  """The number of pieces that the head's outputs are split into; classes are not split."""
  return case.layout.shards("vocab") if "vocab" in case.model.predicts.head(case.model)[1] else 1


def _logits(case: Case) -> float:
  """Logits of one example on one device."""
  (_, outputs), _ = case.model.predicts.head(case.model)
  return case.model.predicts.predictions(case.model) * outputs / _vocab_shards(case)


def _computed(model: ModelConfig) -> float:
  """The share of all pairs of positions that attention computes."""
  t = model.positions
  if not model.predicts.causal or model.attention == "plain":
    return 1.0
  if model.attention == "cudnn":  # skips every masked pair, as calls.py counts it
    return (t + 1) / (2 * t)
  starts = range(0, t, QUERY_BLOCK)
  return sum(min(QUERY_BLOCK, t - start) * min(start + QUERY_BLOCK, t) for start in starts) / t**2


def traffic(case: Case) -> float:
  """Bytes that one device reads from and writes to its memory in a step.

  A block's values pass through memory several times (`compilers.Fitted`). Each pass reads the weights. Gradients are
  written and read, and the optimizer reads and writes three numbers a parameter.
  """
  model, layout = case.model, case.layout
  param = jnp.dtype(model.param_dtype).itemsize
  layers = model.depth // layout.shards("layers")
  block = bytes_per_example(model, *_shards(layout), 1, "all")
  fitted = COMPILERS[case.compiler].fitted
  block_passes = fitted.passes[model.remat]
  whole = fitted.whole_passes * model.positions * model.width * case.item if layout.shards("sequence") > 1 else 0
  logits = _logits(case) * 4
  weight_passes = 4 if model.remat == "full" else 3
  used = sum(map(case.used, weights(model))) * case.item
  summed, updated = (sum(map(count, weights(model))) * param for count in (case.summed, case.updated))
  activations = case.examples * (layers * (block_passes * block + whole) + 6 * logits)
  if case.schedule and case.schedule.splits:  # what is kept is written, put into its slot, taken out of it, and read
    activations += case.examples * 4 * layers * _kept(case)
  return case.units * (activations + weight_passes * used + 2 * summed) + 6 * updated


def times(case: Case, chip: Chip, links: Links) -> Roofline:
  """Seconds of a step at a device's peaks.

  Kernels hide what the blocks' weights and gradients send, for as long as they take, if the compiler can hide this kind
  of collective. All other communication is exposed.
  """
  rows = theory.sent(case)
  compute, memory = flops(case) / chip.flops, traffic(case) / chip.bandwidth
  doubled = lambda row: links.doubles(row.kind, row.axes)
  bandwidth = lambda row: links.bandwidth(row.kind, row.axes) / (2 if doubled(row) else 1)
  compiled = lambda row: "all-reduce" if doubled(row) else row.kind
  can_hide = lambda row: not row.waits and COMPILERS[case.compiler].hides(compiled(row))
  hidden = sum((row.bytes - row.edges) / bandwidth(row) for row in rows if can_hide(row))
  sent = sum(row.bytes / bandwidth(row) for row in rows)
  exposed = sent - min(hidden, max(compute, memory))
  return Roofline(compute, memory, communication=sent, exposed=exposed, idle=case.idle)
