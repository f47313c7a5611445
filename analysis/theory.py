"""What a step sends by theory: from the layout and the model alone, byte by byte.

Tests hold the compiled program of every strategy to these formulas, on CPU (tests/analysis/test_communication.py) and
for TPUs (test_topology.py). They know no strategy by name: they hold for any layout.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from analysis.case import Case, Weight, weights
from strategies.pipeline.stage import UNROLL

LANES = 128  # numbers side by side in a tile of a TPU's memory


class Sent(NamedTuple):
  """Bytes that each device sends in a step, in collectives of a kind over some mesh axes, and what for.

  `waits` is true where the arithmetic that comes next needs the result, so that nothing can hide the message.
  """

  kind: str
  axes: tuple[str, ...]
  bytes: float
  what: str
  waits: bool = False


def sent(case: Case) -> list[Sent]:
  """Every kind of message that the layout makes necessary, with the bytes each device sends in a step."""
  return [row for row in (*_weights_and_gradients(case), *_activations(case), *_stages(case)) if row.bytes]


def _weights_and_gradients(case: Case) -> list[Sent]:
  layout, item = case.layout, case.item
  embed, batch = layout.axes("embed"), layout.axes("batch")
  across = tuple(axis for axis in batch if axis not in embed)  # the batch's axes over which weights are whole
  n, r, b = layout.shards("embed"), math.prod(layout.mesh[axis] for axis in across), layout.shards("batch")
  gathered = scattered = sliced = across_pieces = whole = lookup = 0.0
  for weight in weights(case.model):
    used = case.used(weight)
    gathered += _gathers(case, weight) * used * item * _part(n) * weight.is_matrix
    if not weight.is_matrix:
      whole += used * 4  # in float32
    elif weight.is_table:
      lookup = used * item
    # Of a tied embedding the CPU's compiler sums the gradient as a table and that as a head apart.
    twice = case.model.tied_embedding and not (case.joins or case.reduces_once)
    if weight.is_matrix and (not weight.is_table or twice):
      size = used * case.item_of(weight)
      if _scatters(case, weight):
        scattered += size * _part(n)
      else:
        sliced += 2 * size * _part(n)
      across_pieces += 2 * size / n * _part(r)
  # The gradient of a lookup is made of rows: the compiler sums the table, or gathers the rows where they are fewer. For
  # TPUs it does not weigh them: it gathers them in the units of a pipeline, elsewhere it sums the table.
  rows = case.examples * case.model.positions * (case.model.width * item + 4)
  summed = not case.schedule if case.joins else lookup * layout.shards("vocab") <= b * rows
  units = case.sums
  return [
    Sent("all-gather", embed, gathered, "weights, for the forward and for the backward pass"),
    Sent("reduce-scatter", embed, units * scattered, "gradients, to where weights are"),
    Sent("all-reduce", embed, units * sliced, "gradients, to where weights are"),
    Sent("all-reduce", across, units * across_pieces, "gradients of weights"),
    Sent("all-reduce", batch, units * 2 * whole * _part(b), "gradients of the norms' scales"),
    Sent("all-reduce", batch, units * 2 * lookup * _part(b) * summed, "gradient of the embedding"),
    Sent("all-gather", batch, units * (b - 1) * rows * (not summed and lookup > 0), "rows of the embedding's gradient"),
  ]


def _scatters(case: Case, weight: Weight) -> bool:
  """Whether the compiler sums a weight's gradient straight into its pieces; else it sums it whole and slices.

  The TPU compiler (libtpu 0.0.42) may not for the small weights that nothing but `embed` splits, an image's patches and
  classes. And it does not scatter along the lanes where a piece is one tile wide. Elsewhere it turns such a gradient
  (Layout.gather), but not in the units of a pipeline, where that of a weight that begins with `embed` ends with it.
  """
  axes = [axis for axis in weight.dims if axis != "layers"]
  if not case.joins or set(axes) == {"embed", None}:
    return False
  piece = weight.shape[weight.dims.index("embed")] / case.layout.shards("embed") if "embed" in axes else 0
  return not (case.schedule and axes[0] == "embed" and piece == LANES)


def _gathers(case: Case, weight: Weight) -> int:
  """How often a weight is gathered in a step.

  A block's weights are gathered for the forward and again for the backward pass of each part of the batch. What no
  round of a loop changes the compiler gathers before it: the weights outside the blocks, though not the embedding of a
  pipeline, which one stage alone needs, nor for TPUs its head; and on CPU the blocks of a pipeline that no scan slices.
  """
  if weight.in_blocks:
    layers = case.model.depth / case.layout.shards("layers") / (case.schedule.chunks if case.schedule else 1)
    return 2 * (1 if case.schedule and layers <= UNROLL and not case.joins else case.units)
  if case.schedule and weight.name == "embedding":
    return case.units + case.model.tied_embedding * (case.units if case.joins else 1)
  return case.units if case.schedule and case.joins else 1


def _activations(case: Case) -> list[Sent]:
  layout, model = case.layout, case.model
  stream = case.examples * model.positions * model.width * case.item  # [b, T, D]
  numbers = case.examples * model.positions * 4  # [b, T], float32
  layers = model.depth / layout.shards("layers")
  # Sums a block and unit: at the end of each part in the forward pass, before it in the backward pass (query, key and
  # value, gate and up each have a cotangent of their input), and again where the forward pass is repeated.
  sums = {
    "heads": 1 + (1 if case.joins else 3) + (model.remat == "full"),
    "mlp": 1 + (1 if case.joins else 2),
  }
  sent = [
    (name, layers * count * stream, f"activations: {count} sums a block for the {name}") for name, count in sums.items()
  ]
  if (
    "vocab" in model.predicts.head(model)[1]
  ):  # the embedding's output and the head's cotangent; maximum, sum and the target's logit
    # Of the two maxima, which are equal where a prediction is right, a pipeline's unit sums both. The TPU compiler
    # sends the one in the precision that the logits had.
    maxima = 2 if case.schedule else case.item / 4 if case.joins else 1
    sent.append(("vocab", 2 * stream + (maxima + 2) * numbers, "embedding, head and loss"))
  return [
    Sent("all-reduce", layout.axes(name), case.units * 2 * _part(layout.shards(name)) * size, what, waits=True)
    for name, size, what in sent
  ]


def _stages(case: Case) -> list[Sent]:
  if not case.schedule:
    return []
  stages = case.layout.shards("layers")
  stream = case.examples * case.model.positions * case.model.width * case.item
  outside = [weight for weight in weights(case.model) if not weight.in_blocks]
  blocks = [weight for weight in weights(case.model) if weight.in_blocks]
  param = jnp.dtype(case.model.param_dtype).itemsize
  summed = max(param, 4)  # sums over stages are in float32 (pipeline.py)
  regrouped = sum(case.held(weight) for weight in blocks) * param * 2 if case.schedule.chunks > 1 else 0
  ticks = case.accumulation * case.schedule.ticks
  return [
    Sent(
      "collective-permute",
      ("stage",),
      ticks * 2 * stream,
      "activations to the next stage, cotangents to the one before",
      waits=True,
    ),
    Sent(
      "all-reduce",
      ("stage",),
      2 * _part(stages) * summed * sum(map(case.held, outside)) * case.accumulation,
      "gradients outside the blocks",
    ),
    Sent("collective-permute", ("stage",), case.accumulation * regrouped, "weights to their chunks, gradients back"),
  ]


def _part(n: int) -> float:
  return (n - 1) / n
