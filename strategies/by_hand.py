"""Sums gradients over devices once a step, however many parts the batch runs in.

In automatic sharding mode a gradient is summed over devices as soon as it exists: once for each part. So the code here
is manual over the mesh axes that split the batch. Each device runs all parts of its own rows and keeps its gradients to
itself. At the end they are sent once. A pipeline runs in the same way, with `stage` as one more manual axis.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from models.dimensions import UNSHARDED, Dims, Sharding
from models.parameters import used_dtypes
from strategies.sharding import MeshSharding, sum_in_dtype
from training.program import Batch, Params, Program, Sums

# (weights, a device's own rows, step, sharding inside) → sums over these rows, gradients
Work = Callable[[Params, Batch, Any, Sharding], tuple[Sums, Params]]
Arrange = Callable[[Params], Params]


@dataclasses.dataclass(frozen=True)
class SummedOnce(Program):
  """The same program, with its gradients summed over devices once a step.

  Attributes:
    axes: the mesh axes of the batch (`Layout.axes_by_hand`).
    gathers_once: as for `summed_once`.
  """

  axes: tuple[str, ...]
  gathers_once: bool

  def gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    assert isinstance(sharding, MeshSharding)
    work, once = super().gradient_sums, self.gathers_once
    return summed_once(self, work, params, batch, step, sharding, self.axes, gathers_once=once)


def summed_once(
  program: Program,
  work: Work,
  params: Params,
  batch: Batch,
  step: jax.Array | None,
  sharding: MeshSharding,
  axes: tuple[str, ...],
  *,
  gathers_once: bool = True,
  arrange: Arrange = lambda blocks: blocks,
) -> tuple[Sums, Params]:
  """Runs `work` on each device's own rows, and sums what it returns over devices.

  Weights and gradients travel in the dtype in which the model uses the weights.

  Args:
    axes: the mesh axes along which devices work apart; `work` leaves the others to the compiler.
    gathers_once: whether weights that are split over some of `axes` by `embed` are gathered here, and their gradients
      scattered. Otherwise `work` does so, with `MeshSharding.gather`. In both cases gradients are scattered here along
      the axes that split `embed` only in the optimizer's state.
    arrange: a linear function of the blocks' weights, which moves them between devices before they are gathered.
  """
  inside, layout = sharding.inside(axes), sharding.layout.only(axes)
  result = layout.of("state")
  scattered = () if gathers_once else layout.axes("embed")  # by `work`
  to_scatter = result.axes("embed")[len(scattered) :]
  dims, dtypes = program.dims(), used_dtypes(program.model)
  trained, trained_dims, trained_dtypes = map(program.trained, (params, dims, dtypes))
  specs = lambda layout, params, dims: jax.tree.map(lambda _, names: layout.spec(names), params, dims)

  def summed(gradient: jax.Array, names: Dims, dtype: str) -> jax.Array:
    gradient = inside.reduce_scatter(gradient.astype(dtype), names, to_scatter)
    split = {axis for dim in names if dim for axis in result.axes(dim)}
    rest = tuple(axis for axis in layout.mesh if axis not in split)  # along which devices hold the same weight
    return sum_in_dtype(functools.partial(jax.lax.psum, axis_name=rest), gradient) if rest else gradient

  def piece(w: jax.Array, names: Dims) -> jax.ShapeDtypeStruct:
    n = result.shards("embed") // layout.shards("embed")
    shape = (size // n if name == "embed" else size for size, name in zip(w.shape, names, strict=True))
    return jax.ShapeDtypeStruct(tuple(shape), w.dtype)

  def own(held: Params, batch: Batch, step: jax.Array | None) -> tuple[Sums, Params]:
    sent = jax.tree.map(lambda w, dtype: w.astype(dtype), held, dtypes)
    weights = sent | {"blocks": arrange(sent["blocks"])}
    if gathers_once:
      weights = jax.tree.map(inside.all_gather, weights, dims)
    sums, gradients = work(weights, batch, step, dataclasses.replace(inside, by_hand=None) if gathers_once else inside)
    gradients = jax.tree.map(summed, gradients, trained_dims, trained_dtypes)
    pieces = jax.tree.map(piece, program.trained(sent)["blocks"], trained_dims["blocks"])
    (blocks,) = jax.linear_transpose(arrange, pieces)(gradients["blocks"])
    gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients | {"blocks": blocks}, program.trained(held))
    return jax.tree.map(lambda x: jax.lax.psum(x, axes), sums), gradients

  return jax.shard_map(
    own,
    in_specs=(specs(layout, params, dims), layout.spec(("batch",)), P()),
    out_specs=(P(), specs(result, trained, trained_dims)),
    axis_names=set(axes),
    check_vma=False,  # the outputs are replicated where their specs say so, because they are summed
  )(params, batch, step)
