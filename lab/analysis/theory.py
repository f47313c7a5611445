"""What a step must send, byte by byte, from the layout and the model alone.

The formulas hold for any layout. Where a compiler has a choice, they ask compilers.py. Tests compare them with the
compiled program of every strategy, in tests/analysis: test_communication.py on CPU, test_topology.py for TPUs and
test_gpu_topology.py for GPUs.
"""

import collections
import functools
from typing import Any

import jax.numpy as jnp

from lab.analysis import experts, update
from lab.analysis.activations import activations, adapters
from lab.analysis.case import Case, ring_share
from lab.analysis.compilers import COMPILERS
from lab.analysis.sent import Sent
from lab.analysis.weights import Weight, trained, weights
from strategies.execution.collectives import is_small
from strategies.execution.stages.schedule import BACKWARD, FORWARD


def sent(case: Case) -> list[Sent]:
  """Every collective that the layout makes necessary, with the bytes that each device sends in a step."""
  by_purpose = (_weights, _updates, _update, _gradients, _table_gradients, activations, adapters, experts.sent, _stages)
  return [row for find in by_purpose for row in find(case) if row.bytes]


def _weights(case: Case) -> list[Sent]:
  """Gathers along `embed`. Weights are cast before they are gathered, for each part also to float8."""
  compiler, matrices = COMPILERS[case.compiler], [weight for weight in weights(case.sizes) if weight.is_matrix]
  times = lambda weight: 2 * case.batch_parts if weight.in_blocks else compiler.edge_gathers(case)
  item = functools.partial(compiler.gathered_item, case)
  of_part, edges, of_step = (collections.Counter[tuple[str, ...]]() for _ in range(3))
  for weight in matrices:
    each, once = (
      case.along(weight, axes) for axes in (case.transfers.gathered_each_part, case.transfers.gathered_once)
    )
    each_item = case.sent_item(weight) if weight.in_blocks else item(weight)
    size = ring_share(case.devices(each)) * times(weight) * case.used(weight) * each_item
    of_part[each] += size
    edges[each] += 0 if weight.in_blocks else size
    of_step[once] += ring_share(case.devices(once)) * case.resident(weight) * item(weight)
  both = "weights, for the forward and for the backward pass"
  return [Sent("all-gather", axes, size, both, edges=edges[axes]) for axes, size in of_part.items()] + [
    Sent("all-gather", axes, size, "weights, once a step", edges=size) for axes, size in of_step.items()
  ]


def _updates(case: Case) -> list[Sent]:
  """Gathers of the new weights, in the dtype in which they are stored, where a device updates only a piece of them."""
  item = jnp.dtype(case.sizes.param_dtype).itemsize
  sizes: collections.Counter[tuple[str, ...]] = collections.Counter()
  for weight in trained(case.sizes):
    axes = case.along(weight, case.transfers.gathered_updated)
    sizes[axes] += (case.devices(axes) - 1) * item * case.updated(weight)
  what = "new weights, from the pieces that devices update"
  return [Sent("all-gather", axes, size, what, waits=True, edges=size) for axes, size in sizes.items()]


def _update(case: Case) -> list[Sent]:
  """What an optimizer sends to update weights in pieces, if it is not elementwise."""
  what = {
    "all-to-all": "for the optimizer: whole layers, and back",
    "all-gather": "for the optimizer: updates by layer",
  }
  rows = [Sent(*found, size, what[found[0]], waits=True, edges=size) for found, size in update.shared(case).items()]
  sums = update.summed(case).items()
  return rows + [
    Sent("all-reduce", axes, size, "for the optimizer: means", waits=True, edges=size) for axes, size in sums
  ]


def _gradients(case: Case) -> list[Sent]:
  """Reductions of gradients over the devices that split the batch; those of looked-up tables come separately.

  Along the axes that split both `batch` and `embed`, a gradient is reduced to the pieces that are kept of it. Along the
  other axes of the batch, the pieces are all-reduced.
  """
  transfers = case.transfers
  if transfers.by_hand:
    return [*_sums_by_hand(case), *_over_positions(case)]
  compiler = COMPILERS[case.compiler]
  sharded = tuple(axis for axis in case.axes("batch") if axis in transfers.scattered_each_part)
  whole = transfers.reduced_each_part
  apart = compiler.reduces_tied_gradients_apart(case)
  tables = compiler.scatters_tables(case)
  as_product = lambda weight: not weight.is_table or tables or (apart and "head" in weight.roles)
  matrices = [weight for weight in trained(case.sizes) if weight.is_matrix and as_product(weight)]
  scattered = [weight for weight in matrices if compiler.scatters(case, weight)]
  sliced = [weight for weight in matrices if not compiler.scatters(case, weight)]
  n, r = map(case.devices, (sharded, whole))
  times = case.batch_parts
  as_weights = set(transfers.scattered_each_part) == set(case.axes("embed"))
  to_shards = f"gradients, to {'the weight shards' if as_weights else 'pieces'}"

  def row(
    kind: str, axes: tuple[str, ...], chosen: list[Weight], each: float, what: str, elements: Any = case.used
  ) -> Sent:
    size = lambda some: times * each * sum(elements(weight) * case.item_of(weight) for weight in some)
    return Sent(kind, axes, size(chosen), what, edges=size(weight for weight in chosen if not weight.in_blocks))

  return [
    row("reduce-scatter", sharded, scattered, ring_share(n), to_shards),
    row("all-reduce", sharded, sliced, 2 * ring_share(n), to_shards, case.whole),  # only pieces have padding
    row("all-reduce", whole, matrices, 2 * ring_share(r) / n, "gradients of weights"),
    *_over_positions(case),
  ]


def _over_positions(case: Case) -> list[Sent]:
  """All-reduces of the gradients of scales and biases, and of those that devices compute from their own positions only.

  Devices compute parts of the gradient of a scale: from their own positions, or from their own heads.
  """
  batch, positions = () if case.transfers.by_hand else case.axes("batch"), case.axes("sequence")
  sizes: collections.Counter[tuple[str, ...]] = collections.Counter()
  compiler = COMPILERS[case.compiler]
  for weight in trained(case.sizes):
    if not weight.is_matrix:
      dim = weight.in_parts_along
      others = case.axes(dim) if dim else ()
      item = 4 if dim else case.item_of(weight)  # scales are used in float32
      for axes in [case.ordered(batch + others)] if compiler.sums_positions_together and others else [batch, others]:
        sizes[axes] += item * case.used(weight)
    elif positions and (weight.is_beside_stream or ("embedding" in weight.roles and not weight.is_table)):
      # Of patches, and of adapters on the side of the stream: summed over the batch, then over positions.
      is_whole = case.transfers.by_hand or compiler.sums_positions_first(case, weight)
      sizes[positions] += case.item * (case.used if is_whole else case.summed)(weight)
  has_biases = any(weight.name.endswith("_bias") for weight in trained(case.sizes))
  what = "gradients of the norms' scales" + (" and of biases" if has_biases else "")
  what += ", and sums over positions" if positions else ""
  sent = lambda axes, size: case.batch_parts * 2 * size * ring_share(case.devices(axes))
  return [Sent("all-reduce", axes, sent(axes, size), what) for axes, size in sizes.items()]


def _sums_by_hand(case: Case) -> list[Sent]:
  """Gradients that are summed by hand (strategies/execution/by_hand.py), in the dtype in which weights are gathered.

  Along `embed` they are scattered, after each part or once, and along the other axes of the optimizer's state once.
  Along all other axes they are all-reduced once. Stages share the weights outside the blocks, so those are summed over
  stages too.
  """
  transfers = case.transfers
  each_part = tuple(axis for axis in case.ordered(transfers.scattered_each_part) if axis in transfers.by_hand)
  once = case.ordered(transfers.scattered_once)
  stages = case.axes("layers") if case.schedule else ()
  total: collections.Counter[tuple[str, tuple[str, ...], str]] = collections.Counter()
  edges: collections.Counter[tuple[str, tuple[str, ...], str]] = collections.Counter()

  def add(weight: Weight, kind: str, axes: tuple[str, ...], size: float, what: str) -> None:
    total[kind, axes, what] += size
    edges[kind, axes, what] += 0 if weight.in_blocks and axes == each_part else size

  for weight in trained(case.sizes):
    left = case.ordered(set(case.axes("embed")) - {*each_part, *transfers.gathered_once})  # to the compiler
    # Before it is scattered, with the padding of its pieces.
    size = case.updated(weight) * case.item_of(weight) * case.devices(case.along(weight, case.axes("state")))
    size /= case.devices(case.along(weight, left))
    pieces: tuple[str, ...] = ()
    for axes, times in ((case.along(weight, each_part), case.batch_parts), (case.along(weight, once), 1)):
      n, pieces = case.devices(axes), (*pieces, *axes)
      kind = "all-to-all" if is_small(weight.dims) else "reduce-scatter"
      add(weight, kind, axes, times * size * ring_share(n), "gradients, to the weight shards")
      size /= n
    rest, own = () if weight.in_stages else stages, case.own_axes(weight)
    whole = case.ordered([*rest, *(axis for axis in transfers.by_hand if axis not in (*pieces, *stages, *own))])
    add(weight, "all-reduce", whole, 2 * size * ring_share(case.devices(whole)), "gradients, once a step")
  return [Sent(*row[:2], total[row], row[2], edges=edges[row]) for row in total]


def _table_gradients(case: Case) -> list[Sent]:
  """The gradient of a lookup consists of rows, which are added to a table that is reduced.

  A compiler that scatters this table treats it as any other gradient, and so do sums by hand.
  """
  if case.transfers.by_hand or COMPILERS[case.compiler].scatters_tables(case):
    return []
  batch = case.axes("batch")
  tables = sum(case.whole(weight) for weight in trained(case.sizes) if weight.is_table)
  size = case.batch_parts * 2 * ring_share(case.devices(batch)) * case.item * tables
  return [Sent("all-reduce", batch, size, "gradient of the embedding", edges=size)]


def _stages(case: Case) -> list[Sent]:
  """What the executor of a pipeline sends between stages (strategies/execution/stages/)."""
  if not case.schedule:
    return []
  axes = case.axes("layers")
  stream = case.examples * case.sizes.positions * case.sizes.width * case.item / case.layout.shards("sequence")
  blocks = [weight for weight in weights(case.sizes) if weight.in_stages]
  moved = sum((case.held(weight) + weight.trained * case.updated(weight)) * case.item_of(weight) for weight in blocks)
  # A phase exchanges at each of its ticks, also where a stage in the bubble has nothing to send. If both kinds of units
  # run in a phase, one kind can hide what the other exchanges.
  exchanges = [phase for phase in case.schedule.phases for _ in phase.routes]
  ticks = lambda phases: case.accumulation * sum(phase.ticks for phase in phases)
  hides = COMPILERS[case.compiler].hides_exchanges(case)
  alone = [phase for phase in exchanges if not hides or not {FORWARD, BACKWARD} <= set(phase.units)]
  exchanged = "activations to the next stage, cotangents to the one before"
  rows = [Sent("collective-permute", axes, ticks(exchanges) * stream, exchanged, edges=ticks(alone) * stream)]
  if case.schedule.chunks > 1:
    rows.append(Sent("collective-permute", axes, moved, "weights to their chunks, gradients back", edges=moved))
  return rows
