"""A stage's part of the model: the embedding, a chunk of blocks, and the loss, for one microbatch.

A `Row` says which microbatch and which chunk. stage.py runs these functions when the schedule says so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from models.parameters import bind, joined
from models.transformer import Transformer
from strategies.pipeline.split import split
from strategies.pipeline.table import Schedule
from strategies.sharding import MeshSharding
from training.program import Batch, Params, Program, Sums

Row = dict[str, jax.Array]  # a unit in the schedule's table: column → scalar
Fixed = tuple[list[jax.Array], Params]  # what a backward pass reads besides the cotangent: residuals and weights

# How many blocks one iteration of the scan over a chunk's layers runs. A scan stacks its residuals and then copies them
# to their slot. An unrolled scan writes to the slot directly: with 2 blocks a stage, 0.74 → 0.92 of single-device speed
# (measured once, when this was built).
UNROLL = 2


class Pullback(NamedTuple):
  """The backward pass of a chunk.

  Attributes:
    whole: (fixed, cotangent) → the gradients of the trained weights, and the cotangent of the input.
    early, late: the same in two parts (split.py), if the schedule has weight units. (fixed, cotangent) → the cotangent
      of the input, and what it keeps; (fixed, kept) → the gradients of the weights.
  """

  whole: Callable[[Fixed, jax.Array], tuple[Params, jax.Array]]
  early: Any = None
  late: Any = None


@dataclasses.dataclass(frozen=True)
class StageModel:
  """What one stage holds and works on. `step` is None in evaluation, which has no backward units."""

  program: Program
  schedule: Schedule
  sharding: MeshSharding
  index: jax.Array  # the number of the stage
  blocks: Params  # [chunks, layers of a chunk, ...]
  edges: Params  # the weights outside the blocks: every stage holds them, the first and the last stage use them
  batch: Batch  # [microbatches, b, ...]
  step: jax.Array | None

  def embed(self, edges: Params, row: Row) -> jax.Array:
    inputs = self.program.inputs(self.microbatch(row), self.step, self.sharding)
    return self.model(edges, self.weights(row)).embed(inputs, self.sharding)

  def run_chunk(self, weights: Params, x: jax.Array, row: Row) -> jax.Array:
    depth = jax.tree.leaves(weights)[0].shape[0]
    first_layer = (row["chunk"] * self.schedule.stages + self.index) * depth
    microbatch, model = self.microbatch(row), self.model(self.edges, weights)
    segments, keys = self.program.segments(microbatch), self.program.dropout_keys(microbatch, self.step)
    return model.run_blocks(
      x, segments=segments, keys=keys, sharding=self.sharding, first_layer=first_layer, unroll=UNROLL
    )[0]

  def loss(self, edges: Params, y: jax.Array, row: Row) -> tuple[jax.Array, Sums]:
    program, microbatch = self.program, self.microbatch(row)
    targets, segments = program.targets(microbatch), program.segments(microbatch)
    return self.model(edges, self.weights(row)).head_loss_sums(y, targets, self.sharding, segments)

  def model(self, edges: Params, weights: Params) -> Transformer:
    return bind(self.program.model, {"blocks": weights, **edges})

  def edges_with(self, trained: Params) -> Params:
    """The weights outside the blocks, with these of those that are trained."""
    return joined(trained, self.program.frozen(self.edges))

  def weights(self, row: Row) -> Params:
    return jax.tree.map(lambda w: w[row["chunk"]], self.blocks)

  def microbatch(self, row: Row) -> Batch:
    return jax.tree.map(lambda x: x[row["microbatch"]], self.batch)

  def is_first(self, row: Row) -> jax.Array:
    return (self.index == 0) & (row["chunk"] == 0)

  def is_last(self, row: Row) -> jax.Array:
    return (self.index == self.schedule.stages - 1) & (row["chunk"] == self.schedule.chunks - 1)

  def forward_and_residuals(self, x: jax.Array, row: Row) -> tuple[jax.Array, list[jax.Array]]:
    """A chunk's output, and its residuals without the weights."""
    return self._linearize(x, row)[:2]

  def pullback(self, x: jax.Array, row: Row) -> Pullback:
    """The backward pass of a chunk whose input is like `x`."""
    _, residuals, whole = jax.eval_shape(self._linearize, x, row)
    return Pullback(whole, *(split(whole, (residuals, self.weights(row)), x) if self.schedule.splits else ()))

  def _linearize(self, x: jax.Array, row: Row) -> tuple[jax.Array, list[jax.Array], Callable]:
    """A chunk's output, its residuals, and `Pullback.whole`."""
    weights = self.weights(row)
    trained, others = self.program.trained(weights), self.program.frozen(weights)
    y, vjp = jax.vjp(lambda trained, x: self.run_chunk(joined(trained, others), x, row), trained, x)
    leaves, tree = jax.tree.flatten(vjp)
    number = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
    sources = [number.get(id(leaf)) for leaf in leaves]  # which weight a leaf is; None for a residual

    def whole(fixed: Fixed, cotangent: jax.Array) -> tuple[Params, jax.Array]:
      rest, given = iter(fixed[0]), jax.tree.leaves(fixed[1])
      return jax.tree.unflatten(tree, [next(rest) if i is None else given[i] for i in sources])(cotangent)

    residuals = [self.pinned(leaf) for leaf, i in zip(leaves, sources, strict=True) if i is None]
    return y, residuals, jax.tree_util.Partial(whole)

  def pinned(self, x: jax.Array) -> jax.Array:
    """Pins a value of the residual stream, [layers, b, T, D], before it is stored.

    Otherwise the compiler may split it by width, which suits the weights' gradients, and send it between devices at
    every tick.
    """
    model = self.program.model
    return self.pin(x) if x.ndim == 4 and x.shape[2:] == (model.positions, model.width) else x

  def pin(self, x: jax.Array) -> jax.Array:
    """Constrains the sharding of activations [..., b, T, D]."""
    return self.sharding.activation(x, *(None,) * (x.ndim - 3), "batch", "sequence", None)
