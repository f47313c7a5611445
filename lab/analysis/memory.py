"""Predicts the memory of a step on each device, by formula, from the layout and the model alone.

Sizes of arrays are exact. What the forward pass saves is read from JAX's trace (saved.py). The rest is fitted to the
compilers' figures (compilers.py).
"""

import dataclasses
import math

import jax.numpy as jnp

from lab.analysis import experts, update
from lab.analysis.case import Case
from lab.analysis.compilers import COMPILERS
from lab.analysis.host import IN_FLIGHT, offloaded, to_host
from lab.analysis.saved import block_values, bytes_per_example
from lab.analysis.weights import trained, weights
from models.dimensions import FIRST_LAYERS
from models.mlps import MLPS
from models.ops.loss import chunk_count
from models.stacks import Stack
from strategies.execution.stages.stage import REMAT_OF_FIRST, UNROLL
from training.loop import MEMORY_SAVES


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device in a training step.

  Attributes:
    host: bytes in the memory of its host instead: saved activations, and the optimizer's state.
    saved: activations that the forward pass saves for the backward pass.
    working: everything else at the worst moment: a block's values and their cotangents, gathered weights, the logits.
  """

  parameters: float
  optimizer: float
  gradients: float
  saved: float
  working: float
  host: float = 0.0

  @property
  def state(self) -> float:
    return self.parameters + self.optimizer

  @property
  def total(self) -> float:
    """Bytes on the device."""
    return self.state + self.gradients + self.saved + self.working


def of(case: Case) -> Memory:
  """Bytes on one device. The backward pass of a block is the worst moment, or the loss, before there are gradients."""
  sizes = case.sizes
  param = jnp.dtype(sizes.param_dtype).itemsize
  held, resident = (sum(map(count, weights(sizes))) for count in (case.held, case.resident))
  changed, summed, updated = (sum(map(count, trained(sizes))) for count in (case.held, case.summed, case.updated))
  stored = sum(case.held(weight) * case.stored_item(weight) for weight in weights(sizes))
  fitted = COMPILERS[case.compiler].fitted
  cast = fitted.cast * held * case.item if sizes.dtype != sizes.param_dtype else 0
  if case.transfers.by_hand:  # the weights as they are sent, for the whole step
    cast = resident * case.item if resident > held or sizes.dtype != sizes.param_dtype else 0
  gradients, saved, loss = summed * case.sum_item, case.examples * _saved(case), _loss(case)
  if case.batch_parts > 1:  # the sum so far, and the current part's; by hand this one is in the compute dtype
    gradients += fitted.part * summed * (case.item if case.transfers.by_hand and not case.schedule else param)
  else:
    loss -= gradients
  if sizes.unroll == "all":  # without stacks, a block's gradients take the place of what it has saved
    gradients = max(0.0, gradients - saved)
  working = max(*(_block(case, group) for group in sizes.groups.values()), loss) + cast
  if updated < changed:  # the new weights are gathered beside the old ones, when all else is free
    working = max(working, changed * param - gradients - saved)
  on_host, state = to_host(case)
  if case.optimizer.on_host:  # a part of the update comes while another goes, when all activations are free
    stages = case.layout.shards("layers")
    largest = max(case.updated(w) / -(-w.layers // (stages if w.in_stages else 1)) for w in trained(sizes))
    working = max(working, 4 * largest * 4 - saved)  # two moments come and two go, in float32
  return Memory(stored, update.state_bytes(case) - state, gradients, saved, working, on_host / case.batch_parts + state)


def in_hosts(case: Case) -> float:
  """Bytes in the memory of the hosts for each device, if checkpoints are saved there (`checkpoint.memory_every`).

  Each piece of what is trained is kept once by its owner, and once by a neighbour, whatever the layout.
  """
  params = sum(weight.size * case.stored_item(weight) for weight in trained(case.sizes))
  state = params + sum(math.prod(x.shape) * x.item for x in update.state(case.sizes, case.optimizer))
  return 2 * MEMORY_SAVES * state / case.layout.device_count


def _saved(case: Case) -> float:
  """Bytes of one example that the blocks save for the backward pass."""
  schedule, layers = case.schedule, case.layers
  if not schedule:
    return bytes_per_example(case.sizes, *case.pieces, layers, sharers=case.sharers) + IN_FLIGHT * offloaded(case, 1)
  in_unit = layers // schedule.chunks
  copies = 2 if in_unit > UNROLL else 1  # a scan stacks its residuals before they are copied to their slot
  of_unit = bytes_per_example(case.sizes, *case.pieces, in_unit, sharers=case.sharers)
  saved = (schedule.slots["residuals"] + copies) * of_unit
  return saved + (copies + schedule.slots["kept"]) * in_unit * cotangents(case) * case.splits


def _block(case: Case, stack: Stack) -> float:
  """Bytes of the backward pass of a block: its values, their cotangents, its gathered weights and their gradients."""
  sizes, layout, fitted = case.sizes, case.layout, COMPILERS[case.compiler].fitted
  splits_positions, whole = layout.shards("sequence") > 1, next(s for s in sizes.stacks if s.name == stack.name)
  layers = -(-whole.layers // layout.shards(whole.dim))
  copies = fitted.block[case.policy]
  if case.schedule:
    copies += 1.0 if layers // case.schedule.chunks > UNROLL else 0.6
  if layout.shards("heads") > 1 and not splits_positions and case.repeats:
    copies += fitted.sums  # an all-reduced activation exists twice: before and after the all-reduce
  values, scores = block_values(stack.sizes, *case.pieces, case.sharers)
  total = case.examples * (copies * values + (fitted.scores or copies) * scores)
  if splits_positions:
    total += fitted.whole * case.examples * sizes.positions * sizes.width * case.item
  gathered = sum(
    case.used(w) * case.item_of(w) for w in weights(sizes) if w.entry == stack.name and case.used(w) > case.resident(w)
  )
  total += experts.working(case) if stack.sizes.experts else 0.0
  if case.first and stack.dim == FIRST_LAYERS:  # what their forward pass saves just before
    found = bytes_per_example(stack.sizes, *case.pieces, layers, remat=REMAT_OF_FIRST, sharers=case.sharers)
    total += case.examples * found
  return total + fitted.gathered * gathered / layers + fitted.head_later * _gathered_head(case)


def cotangents(case: Case) -> float:
  """Bytes of one example that a block's backward unit keeps for its weight unit: the cotangents of seven products.

  Experts keep that of their result, as the last product of a dense block, and that of the router's scores in float32.
  """
  sizes, layout = case.sizes, case.layout
  products = sizes.mixes.products(sizes)
  heads = (sum(products.values()) - products["out"]) / sizes.width / layout.shards("heads")
  mlp = (len(MLPS[sizes.mlp].products) - 1) * sizes.dense_width / layout.shards("mlp")
  scores = 4 * (sizes.experts.count if sizes.experts else 0)
  return sizes.positions * (case.item * (heads + mlp + 2 * sizes.width / layout.shards("sequence")) + scores)


def _loss(case: Case) -> float:
  """Bytes of the logits of one chunk and of the gathered head; with several chunks, also of the head's gradient.

  That is summed in float32, and then cast to be sent.
  """
  sizes, (inputs, _) = case.sizes, case.sizes.predicts.head()[0]
  head = COMPILERS[case.compiler].fitted.head * _gathered_head(case)
  logits = case.examples * case.logits
  if sizes.predicts.predictions() == 1:
    return head + 4 * logits
  count = chunk_count(int(logits / case.outputs), inputs, int(case.outputs), sizes.loss_chunk)
  return head + 4 * logits / count + ((4 + case.item) * inputs * case.outputs if count > 1 else 0)


def _gathered_head(case: Case) -> float:
  """Bytes of the head if a device holds only a piece of it, and has to gather it."""
  heads = (w for w in weights(case.sizes) if "head" in w.roles and case.used(w) > case.held(w))
  return sum(case.used(w) * case.item_of(w) for w in heads)
