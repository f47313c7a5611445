"""Constraints: what the model sees of a layout. They say where arrays are, and the compiler sends what that takes.

Runners pass `Constraints` to the model as its `models.dimensions.Sharding`. Use them under `jax.set_mesh`, in automatic
sharding mode: the layout constrains some arrays, and the compiler chooses the sharding of the rest (docs/why.md
explains why not explicit mode). Code inside a `shard_map` sends by itself: collectives.py.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import PartitionSpec as P

from models.dimensions import Dims, Sharding
from models.ops.workarounds import cast_before_sending
from strategies.execution.collectives import (
  Collectives,
  as_matrices,
  by_layer,
  gathered_by,
  leading,
  on_own_parts,
  with_transpose,
)
from strategies.execution.transfers import Transfers
from strategies.layout import Layout, Place, axes_of, place_of

T = TypeVar("T")
NOTHING = Layout({})  # splits nothing


@dataclasses.dataclass(frozen=True)
class Constraints(Sharding):
  """The sharding operations of a resolved layout.

  Attributes:
    layout: the places on the mesh axes that are left to the compiler. Inside a `shard_map` these are not all axes.
      `gradients` is where the compiler leaves gradients after each part of the batch.
    by_hand: the collectives by which weights are gathered; None if the compiler gathers them.
    own: the places on the axes that are not left to the compiler. Outside a `shard_map` there are none: a device has
      every position.
  """

  layout: Layout
  by_hand: Collectives | None = None
  own: Layout = NOTHING

  @staticmethod
  def outside(layout: Layout, transfers: Transfers) -> "Constraints":
    """The operations for code outside a `shard_map`."""
    scattered, layout = place_of(transfers.scattered_each_part), layout.place(positions=None)
    return Constraints(layout if transfers.by_hand else layout.place(gradients=scattered))

  @staticmethod
  def inside(layout: Layout, transfers: Transfers, width: int) -> "Constraints":
    """The operations inside a `shard_map` that is manual over the axes `Transfers.by_hand`."""
    rest = layout.restricted_to([axis for axis in layout.mesh if axis not in transfers.by_hand])
    rest = rest.place(gradients=place_of(tuple(axis for axis in transfers.scattered_each_part if axis in rest.mesh)))
    gathers = set(transfers.gathered_each_part) & set(transfers.by_hand)
    own = layout.restricted_to(transfers.by_hand)
    return Constraints(rest, Collectives(own, rest, width) if gathers else None, own)

  def place(self, **places: Place) -> "Constraints":
    """The same operations with some dimensions placed elsewhere."""
    return dataclasses.replace(self, layout=self.layout.place(**places))

  def activation(self, x: jax.Array, *dims: str | None) -> jax.Array:
    return x if self.layout.device_count == 1 else constrain(x, self.layout.spec(dims))

  def shards(self, dim: str, among: str | None = None) -> int:
    if among is None:
      return self._of(dim).shards(dim)
    shared, axes = self._of(among), {*self.layout.axes(dim), *self.own.axes(dim)}
    return math.prod(shared.mesh[axis] for axis in shared.axes(among) if axis in axes)

  def _of(self, dim: str) -> Layout:
    """The layout that says how a dimension is split. Positions, and experts in training, are split by hand."""
    by_hand = dim == "positions" or (dim == "experts" and self.own.shards("experts") > 1)
    return self.own if by_hand else self.layout

  def gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """All-gathers a weight along `embed`. Its gradient is reduce-scattered to where sums of gradients are stored."""
    if "embed" not in dims:
      return w
    if self.by_hand:
      return self.by_hand.gathered(w, dims)
    if self.layout.shards("gradients") == 1:
      return w
    gathered = self.layout.spec(None if dim == "embed" else dim for dim in dims)
    is_whole = self.layout.shards("embed") == 1
    whole = lambda w: w if is_whole else constrain(cast_before_sending(w), gathered)
    return gathered_by(whole, lambda gradient: self._scatter(gradient, dims, gathered), w)

  def _scatter(self, gradient: jax.Array, dims: Dims, gathered: P) -> jax.Array:
    """Constrains a gathered weight's gradient to the sharding of the sums, with two compiler workarounds."""
    layout, mesh = self.layout.stored_as("gradients"), self.layout.mesh
    busy = {axis for dim in ("layers", "gradients", "batch", "sequence") for axis in self.layout.axes(dim)}
    if not any(gathered) and any(size > 1 for axis, size in mesh.items() if axis not in busy):
      # The compiler would split the product over the idle axis and then move the gradient by a collective-permute,
      # which a single stage of a pipeline cannot do. All-reduce the gradient instead; such weights are small.
      gradient = constrain(gradient, gathered)
    lead = leading(dims)
    matrix = layout.spec((*dims[:lead], "embed", *(dim for dim in dims[lead:] if dim not in (None, "embed"))))
    return constrain(as_matrices(lambda x, _: constrain(x, matrix), gradient, dims), layout.spec(dims))

  def largest(self, x: jax.Array, *dims: str | None) -> jax.Array:
    axes = {axis for dim in dims if dim for axis in self.own.axes_in(dims, dim) if self.own.mesh[axis] > 1}
    return jax.lax.pmax(x, tuple(axis for axis in self.own.mesh if axis in axes)) if axes else x

  def by_layer(self, work: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
    return by_layer(self.layout.stored_as("state"), work, x, dims)

  def whole_sequence(self, x: jax.Array) -> jax.Array:
    """All-gathers the positions of the residual stream [B, T, D]. Its gradient is reduce-scattered."""
    return self._between("sequence", None, x)

  def split_sequence(self, x: jax.Array) -> jax.Array:
    """Reduce-scatters a product's result [B, T, D] over positions. Its gradient is all-gathered."""
    return self._between(None, "sequence", x)

  def _between(self, before: str | None, after: str | None, x: jax.Array) -> jax.Array:
    """Moves the stream from one sharding of its positions to another; its gradient moves back.

    Differentiating a constraint would constrain the gradient to the same sharding, so this moves it by hand.
    """
    if self.layout.shards("sequence") == 1:
      return self.activation(x, "batch", None, None)
    here, there = (self.layout.spec(("batch", positions, None)) for positions in (before, after))
    # A product's result must not be constrained before it is split: that would all-reduce it.
    split = self.layout.spec(("batch", "sequence", None))
    move = lambda x, start, end: constrain(constrain(x, start) if start == split else x, end)
    return with_transpose(lambda x: move(x, here, there), lambda g: move(g, there, here), x)

  def local(self, kernel: Callable[..., T], *arrays: jax.Array, dims: Sequence[Dims], results: Any) -> T:
    return on_own_parts(self.layout, kernel, *arrays, dims=dims, results=results)

  def index(self, dim: str) -> jax.Array:
    return jax.lax.axis_index(self._of(dim).axes(dim)) if self.shards(dim) > 1 else super().index(dim)

  def across(self, collective: Callable[..., jax.Array], x: jax.Array, dim: str) -> jax.Array:
    return collective(x, self._of(dim).axes(dim)) if self.shards(dim) > 1 else x

  def sum_pieces(self, parts: jax.Array, dim: str, dims: Dims) -> jax.Array:
    """Adds up over one mesh axis after the other, first the axes that split the result.

    With axes a and b, of which b splits the result:

        parts [a·b, D, F] → [a, b, D, F] → sum over b, scattered along b → [a, D/b, F] → sum over a of pieces → [D/b, F]

    So along a only pieces are sent. The sums are of matrices, for the reason that `as_matrices` gives.
    """
    gradient, mesh = self.layout.stored_as("gradients"), self.layout.mesh
    axes = [axis for axis in self.layout.axes(dim) if mesh[axis] > 1]
    parts = parts.reshape(*(mesh[axis] for axis in axes), *parts.shape[1:])
    splitting = {axis for name in dims if name for axis in gradient.axes_in(dims, name)}
    add = lambda x: jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,))
    left = list(axes)
    for axis in sorted(axes, key=lambda axis: axis not in splitting):
      parts = jnp.moveaxis(parts, left.index(axis), 0)
      left.remove(axis)
      if not left:
        return add(parts)
      count, spec = len(left), gradient.restricted_to([axis for axis in mesh if axis not in left]).spec(dims)
      first = jnp.moveaxis(parts, range(1, count + 1), range(2, count + 2))  # [axis, D, *left, ...]
      matrices = jax.lax.optimization_barrier(first.reshape(*first.shape[:2], -1))  # or the compiler undoes this
      columns = (*left, *(axis for place in spec[1:] for axis in axes_of(place)))
      summed = constrain(add(matrices), P(spec[0], columns)).reshape(first.shape[1:])
      parts = jnp.moveaxis(summed, range(1, count + 1), range(count))
    return parts
