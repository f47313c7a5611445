"""What a step must send, byte by byte, from the layout and the model alone.

The formulas hold for any layout. Where a compiler has a choice, they ask compilers.py. Tests compare them with the
compiled program of every strategy, in tests/analysis: test_communication.py on CPU, test_topology.py for TPUs and
test_gpu_topology.py for GPUs.
"""

from typing import NamedTuple

import jax.numpy as jnp

from analysis.case import Case, Weight, weights
from analysis.compilers import COMPILERS


class Sent(NamedTuple):
  """Bytes that each device sends in a step, by one kind of collective over some mesh axes, for one purpose.

  Attributes:
    what: the purpose.
    waits: whether the next computation needs the result, so that nothing can hide the collective.
    edges: the part of `bytes` that is sent before or after the blocks run, where little can hide it.
  """

  kind: str
  axes: tuple[str, ...]
  bytes: float
  what: str
  waits: bool = False
  edges: float = 0.0


def sent(case: Case) -> list[Sent]:
  """Every collective that the layout makes necessary, with the bytes that each device sends in a step."""
  rows = [*_weights(case), *_gradients(case), *_table_gradients(case), *_activations(case), *_stages(case)]
  return [row for row in rows if row.bytes]


def _weights(case: Case) -> list[Sent]:
  """Gathers along `embed`. Weights are cast before they are gathered."""
  matrices = [weight for weight in weights(case.model) if weight.is_matrix]
  item = COMPILERS[case.compiler].gathered_item
  of = lambda some: sum(_gathers(case, weight) * case.used(weight) * item(case, weight) for weight in some)
  part = _part(case.layout.shards("embed"))
  edges = part * of(weight for weight in matrices if not weight.in_blocks)
  what = "weights, for the forward and for the backward pass"
  return [Sent("all-gather", case.axes("embed"), part * of(matrices), what, edges=edges)]


def _gathers(case: Case, weight: Weight) -> int:
  """How often a step gathers a weight.

  Without a pipeline, weights outside the blocks do not change from part to part, so one gather serves all of them.
  """
  compiler = COMPILERS[case.compiler]
  if weight.in_blocks:
    return compiler.block_gathers(case)
  return compiler.edge_gathers(case, weight) if case.schedule else 1


def _gradients(case: Case) -> list[Sent]:
  """Reductions of gradients over the devices that split the batch; those of looked-up tables come separately.

  Along the axes that split both `batch` and `embed`, a gradient is reduced to the shards of its weight. Along the other
  axes of the batch, the shards are all-reduced.
  """
  compiler = COMPILERS[case.compiler]
  batch = case.axes("batch")
  sharded = tuple(axis for axis in batch if axis in case.axes("embed"))
  whole = tuple(axis for axis in batch if axis not in sharded)
  apart = compiler.reduces_tied_gradients_apart(case)
  tables = compiler.scatters_tables(case)
  as_product = lambda weight: not weight.is_table or tables or (apart and "head" in weight.roles)
  matrices = [weight for weight in weights(case.model) if weight.is_matrix and as_product(weight)]
  scales = [weight for weight in weights(case.model) if not weight.is_matrix]
  scattered = [weight for weight in matrices if compiler.scatters(case, weight)]
  sliced = [weight for weight in matrices if not compiler.scatters(case, weight)]
  n, r, b = map(case.devices, (sharded, whole, batch))
  float32 = 4 * sum(map(case.used, scales))
  times, to_shards = case.reductions, "gradients, to the weight shards"

  def row(kind: str, axes: tuple[str, ...], chosen: list[Weight], each: float, what: str) -> Sent:
    size = lambda some: times * each * sum(case.used(weight) * case.item_of(weight) for weight in some)
    return Sent(kind, axes, size(chosen), what, edges=size(weight for weight in chosen if not weight.in_blocks))

  return [
    row("reduce-scatter", sharded, scattered, _part(n), to_shards),
    row("all-reduce", sharded, sliced, 2 * _part(n), to_shards),
    row("all-reduce", whole, matrices, 2 * _part(r) / n, "gradients of weights"),
    Sent("all-reduce", batch, times * 2 * float32 * _part(b), "gradients of the norms' scales"),
  ]


def _table_gradients(case: Case) -> list[Sent]:
  """The gradient of a lookup consists of rows. Either they are gathered, or added to a table that is reduced.

  A compiler that scatters this table treats it as any other gradient.
  """
  batch, b, times = case.axes("batch"), case.layout.shards("batch"), case.reductions
  tables = [weight for weight in weights(case.model) if weight.is_table]
  if COMPILERS[case.compiler].gathers_rows(case):
    rows = times * (b - 1) * case.examples * case.model.positions * (case.model.width * case.item + 4)  # and ids, int32
    return [Sent("all-gather", batch, rows, "rows of the embedding's gradient", edges=rows) for _ in tables]
  if COMPILERS[case.compiler].scatters_tables(case):
    return []
  table = times * 2 * _part(b) * case.item * sum(map(case.used, tables))
  return [Sent("all-reduce", batch, table, "gradient of the embedding", edges=table)]


def _activations(case: Case) -> list[Sent]:
  """Sums over the devices that share a matrix product. The next computation waits for each of them."""
  compiler, model = COMPILERS[case.compiler], case.model
  stream = case.examples * model.positions * model.width * case.item  # [b, T, D]
  layers = model.depth / case.layout.shards("layers")
  # Once after attention and once after the MLP in the forward pass, and before them in the backward pass, for the
  # cotangents of their inputs. Query, key and value share an input, and so do gate and up. If remat repeats the forward
  # pass, then attention's sum too; the MLP's would only make the block's output, which the backward pass does not need.
  heads = 1 + compiler.cotangent_sums(3) + (1 if model.remat == "full" else 0)
  mlp = 1 + compiler.cotangent_sums(2)
  vocab = _vocabulary(case, stream)
  rows = [
    ("heads", layers * heads * stream, f"activations: {heads} sums a block for the heads"),
    ("mlp", layers * mlp * stream, f"activations: {mlp} sums a block for the mlp"),
    ("vocab", sum(vocab.values()), _listed(list(vocab))),
  ]
  return [
    Sent("all-reduce", case.axes(dim), case.units * 2 * _part(case.layout.shards(dim)) * size, what, waits=True)
    for dim, size, what in rows
  ]


def _vocabulary(case: Case, stream: float) -> dict[str, float]:
  """Bytes that each device adds to all-reduces over `vocab` for one part of the batch: purpose → bytes."""
  found = {}
  numbers = case.examples * case.model.positions  # [b, T]
  if any(weight.is_table for weight in weights(case.model)):
    found["embedding"] = stream  # the rows that a device does not hold are zero
  if "vocab" in case.model.predicts.head(case.model)[1]:
    found["head"] = stream  # the cotangent of its input
    found["loss"] = numbers * (COMPILERS[case.compiler].maximum_bytes(case) + 4 + 4)  # and sum and target's logit
  return found


def _stages(case: Case) -> list[Sent]:
  """What the executor of a pipeline sends between stages (strategies/pipeline/)."""
  if not case.schedule:
    return []
  axes, stages = case.axes("layers"), case.layout.shards("layers")
  stream = case.examples * case.model.positions * case.model.width * case.item
  param = jnp.dtype(case.model.param_dtype).itemsize
  outside = sum(case.held(weight) for weight in weights(case.model) if not weight.in_blocks)
  blocks = sum(case.held(weight) for weight in weights(case.model) if weight.in_blocks)
  ticks = case.accumulation * case.schedule.ticks
  exchanged = "activations to the next stage, cotangents to the one before"
  summed = case.accumulation * 2 * max(param, 4) * outside * _part(stages)  # in float32 at least (pipeline/program.py)
  rows = [
    Sent("collective-permute", axes, ticks * 2 * stream, exchanged, waits=True),
    Sent("all-reduce", axes, summed, "gradients outside the blocks", edges=summed),
  ]
  if case.schedule.chunks > 1:
    moved = case.accumulation * 2 * blocks * param
    rows.append(Sent("collective-permute", axes, moved, "weights to their chunks, gradients back", edges=moved))
  return rows


def _part(n: int) -> float:
  """The part of an array that a device sends or receives in a ring of n devices."""
  return (n - 1) / n


def _listed(words: list[str]) -> str:
  """a; a and b; a, b and c."""
  return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
