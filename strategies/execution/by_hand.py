"""ByHand: sums gradients over devices once a step, however many parts the batch runs in.

The code here is manual over the mesh axes that split the batch. Each device runs all parts of its own rows and keeps
its gradients to itself. At the end they are sent once. A pipeline runs in the same way, with `stage` as one more manual
axis. Gradients that each part must scatter are scattered by hand, too, if the compiler would all-reduce them
(options.py).
"""

import functools

import jax
from jax.sharding import PartitionSpec as P

from models.dimensions import Dims
from models.ops.workarounds import in_order, sum_in_dtype
from strategies.execution.collectives import Collectives
from strategies.execution.constraints import Constraints
from strategies.execution.padding import Stored, cut, pad
from strategies.execution.runner import Runner
from training.program import Batch, GradientSums, Params, Sums


class ByHand(Runner):
  """Sums gradients once a step."""

  def gradient_sums(self, params: Params, batch: Batch, step: jax.Array) -> tuple[Sums, Params]:
    return self.summed(self.program.gradient_sums, params, batch, step)

  def eval_sums(self, params: Params, batch: Batch) -> Sums:
    if self.layout.shards("positions") == self.layout.shards("experts") == 1:
      return self.program.loss_sums(params, batch, None, self.sharding)[1]  # by the compiler

    def sums(params: Params, batch: Batch, step: jax.Array | None, sharding: Constraints) -> tuple[Sums, Params]:
      return self.program.loss_sums(params, batch, step, sharding)[1], {}

    return self.summed(sums, params, batch, None)[0]

  def arranged(self, weights: Params, step: jax.Array | None) -> Params:
    """The weights, moved between devices before they are gathered. The move must be linear."""
    return weights

  def summed(self, work: GradientSums, params: Params, batch: Batch, step: jax.Array | None) -> tuple[Sums, Params]:
    """Runs `work` on a device's own rows, and sums what it returns over the mesh axes `Transfers.by_hand`.

    In evaluation `step` is None, and there are no gradients: {}.

    Weights and gradients travel in the dtype in which the model uses the weights. Weights that are gathered for each
    part are gathered by `work`, with `Constraints.gather`; weights that are gathered once, here.
    """
    program, transfers = self.program, self.transfers
    width = program.traits.width
    axes, inside = transfers.by_hand, Constraints.inside(self.layout, transfers, width)
    layout, arrange = self.layout.restricted_to(axes), functools.partial(self.arranged, step=step)
    collectives, result = Collectives(layout, inside.layout, width), layout.stored_as("state")
    dims, dtypes = program.dims(), program.used_dtypes()
    trained, trained_dims, trained_dtypes = map(program.trained, (params, dims, dtypes))
    specs = lambda layout, params, dims: jax.tree.map(lambda _, names: layout.spec(names), params, dims)

    def total(gradient: jax.Array, names: Dims, dtype: str) -> jax.Array:
      split = {axis for dim in names if dim for axis in result.axes_in(names, dim)}
      scattered = tuple(axis for axis in transfers.scattered_once if axis in split)
      gradient = collectives.reduce_scatter(gradient.astype(dtype), names, scattered)
      rest = tuple(axis for axis in layout.mesh if axis not in split)  # along which devices hold the same weight
      return sum_in_dtype(functools.partial(jax.lax.psum, axis_name=rest), gradient) if rest else gradient

    def piece(w: jax.Array, names: Dims) -> jax.ShapeDtypeStruct:
      n = result.shards_in(names, "embed") // layout.shards_in(names, "embed")
      shape = (-(-size // n) if name == "embed" else size for size, name in zip(w.shape, names, strict=True))
      return jax.ShapeDtypeStruct(tuple(shape), w.dtype)

    def own(w: jax.Array, whole: jax.Array, names: Dims) -> jax.Array:
      """Cuts padding along what the compiler splits: in a `shard_map` its pieces need not be equal, but begin equal."""
      pieces = lambda where, name: where.shards_in(names, name) if name else 1
      split = [pieces(inside.layout, name) > 1 and pieces(layout, name) == 1 for name in names]
      shape = [size if cuts else held for cuts, size, held in zip(split, whole.shape, w.shape, strict=True)]
      return cut(inside.layout, w, names, shape)

    def on_own_rows(held: Params, batch: Batch, step: jax.Array | None) -> tuple[Sums, Params]:
      held = jax.tree.map(own, held, params, dims)
      sent = jax.tree.map(lambda w, dtype: w.astype(dtype), held, dtypes)
      weights = arrange(sent)
      if transfers.gathered_once:
        weights = jax.tree.map(collectives.all_gather, weights, dims)
      sums, gradients = work(weights, batch, step, inside)
      sums = in_order((sums, gradients), sums)  # none is summed over devices while the model still sends
      gradients = {} if step is None else stored(gradients, held, sent)
      return jax.tree.map(lambda x: jax.lax.psum(x, axes), sums), gradients

    def stored(gradients: Params, held: Params, sent: Params) -> Params:
      """A device's gradients, summed and in the pieces in which the state stores them."""
      gradients = jax.tree.map(total, gradients, trained_dims, trained_dtypes)
      (gradients,) = jax.linear_transpose(arrange, jax.tree.map(piece, program.trained(sent), trained_dims))(gradients)
      gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, program.trained(held))
      return jax.tree.map(functools.partial(pad, inside.layout), gradients, trained_dims)

    padded = Stored(self.layout, dims, params).pad(params)
    sums, gradients = jax.shard_map(
      on_own_rows,
      in_specs=(specs(layout, padded, dims), layout.spec(("batch",)), P()),
      out_specs=(P(), P() if step is None else specs(result, trained, trained_dims)),
      axis_names=set(axes),
      check_vma=False,  # the outputs are replicated where their specs say so, because they are summed
    )(padded, batch, step)
    return sums, Stored(self.layout.stored_as("state"), trained_dims, trained).cut(gradients) if gradients else {}
