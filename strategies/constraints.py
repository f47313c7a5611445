"""Applies a layout to arrays: constrains activations, gathers weights, looks up embeddings, and splits batches.

Strategies pass a `MeshSharding` to the model as its `models.dimensions.Sharding`. Use it under `jax.set_mesh`, in
automatic sharding mode: the layout constrains some arrays, and the compiler chooses the sharding of the rest
(WORKSPACE.md explains why not explicit mode).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import PartitionSpec as P

from models.dimensions import Dims, map_dims
from strategies.by_layer import by_layer
from strategies.layout import Layout, Place, axes_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MeshSharding:
  """The sharding operations of a resolved layout.

  Attributes:
    layout: that of the mesh axes which are left to the compiler. Inside a `shard_map` these are not all of them.
    by_hand: that of the other mesh axes, over which weights are gathered by hand; None if there are none.
  """

  layout: Layout
  by_hand: Layout | None = None

  def place(self, **places: Place) -> "MeshSharding":
    """The same operations with some dimensions placed elsewhere."""
    return dataclasses.replace(self, layout=self.layout.place(**places))

  def inside(self, axes: Collection[str]) -> "MeshSharding":
    """The same operations inside a `shard_map` that is manual over these mesh axes."""
    rest = [axis for axis in self.layout.mesh if axis not in axes]
    return MeshSharding(self.layout.only(rest), self.layout.only(axes))

  def activation(self, x: jax.Array, *dims: str | None) -> jax.Array:
    """Constrains the sharding of an activation; `dims` names its dimensions."""
    return x if self.layout.device_count == 1 else constrain(x, self.layout.spec(dims))

  @property
  def splits_products(self) -> bool:
    """Whether devices compute parts of a product and sum them."""
    return self.layout.shards("heads") > 1 or self.layout.shards("mlp") > 1

  @property
  def scatters_gradients(self) -> bool:
    """Whether the compiler scatters the gradients of weights."""
    return self.layout.shards("gradients") > 1

  @property
  def layer_pieces(self) -> int:
    """The number of pieces into which devices split the stacked blocks."""
    return self.layout.shards("layers")

  def gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """All-gathers a weight along `embed`. Its gradient is reduce-scattered to where sums of gradients are stored."""
    if "embed" not in dims:
      return w
    if self.by_hand and self.by_hand.axes("embed"):
      use = jax.custom_vjp(lambda w: self.all_gather(w, dims))
      scatter = functools.partial(self.reduce_scatter, dims=dims, axes=self.by_hand.axes("embed"))
      use.defvjp(lambda w: (self.all_gather(w, dims), None), lambda _, gradient: (scatter(gradient),))
      return use(w)
    if self.layout.shards("gradients") == 1:
      return w
    gathered = self.layout.spec(None if dim == "embed" else dim for dim in dims)
    # Without the barrier, the GPU compiler gathers the head in float32 and casts it afterwards: twice the bytes.
    is_whole = self.layout.shards("embed") == 1
    whole = lambda w: w if is_whole else constrain(jax.lax.optimization_barrier(w), gathered)
    use = jax.custom_vjp(whole)
    use.defvjp(lambda w: (whole(w), None), lambda _, gradient: (self._scatter(gradient, dims, gathered),))
    return use(w)

  def _scatter(self, gradient: jax.Array, dims: Dims, gathered: P) -> jax.Array:
    """Constrains a gathered weight's gradient to the sharding of the sums, with two compiler workarounds."""
    layout = self.layout.of("gradients")
    if not any(gathered) and self._has_idle_axis():
      # The compiler would split the product over the idle axis and then move the gradient by a collective-permute,
      # which a single stage of a pipeline cannot do. All-reduce the gradient instead; such weights are small.
      gradient = constrain(gradient, gathered)
    # A matrix with `embed` first: the TPU compiler all-reduces other shapes if a piece does not fill its tiles.
    at, others = dims.index("embed"), [dim for dim in dims if dim not in (None, "embed")]
    first = jnp.moveaxis(gradient, at, 0)
    matrix = constrain(first.reshape(first.shape[0], -1), layout.spec(("embed", *others)))
    return constrain(jnp.moveaxis(matrix.reshape(first.shape), 0, at), layout.spec(dims))

  def by_layer(self, work: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
    """Calls `work` on whole layers of a stacked weight, stored as in the optimizer's state."""
    return by_layer(self.layout.of("state"), work, x, dims)

  def whole_sequence(self, x: jax.Array) -> jax.Array:
    """All-gathers the positions of the residual stream [B, T, D]. Its gradient is reduce-scattered."""
    return self._between("sequence", None, x)

  def split_sequence(self, x: jax.Array) -> jax.Array:
    """Reduce-scatters a product's result [B, T, D] over positions. Its gradient is all-gathered."""
    return self._between(None, "sequence", x)

  def _between(self, before: str | None, after: str | None, x: jax.Array) -> jax.Array:
    """Moves the stream from one sharding of its positions to another; its gradient moves back.

    Differentiating a constraint would constrain the gradient to the same sharding, so this does it by hand.
    """
    if self.layout.shards("sequence") == 1:
      return self.activation(x, "batch", None, None)
    here, there = (self.layout.spec(("batch", positions, None)) for positions in (before, after))
    # A product's result must not be constrained before it is split: that would all-reduce it.
    split = self.layout.spec(("batch", "sequence", None))
    move = lambda x, start, end: constrain(constrain(x, start) if start == split else x, end)
    use = jax.custom_vjp(lambda x: move(x, here, there))
    use.defvjp(lambda x: (move(x, here, there), None), lambda _, g: (move(g, there, here),))
    return use(x)

  def _has_idle_axis(self) -> bool:
    """Whether some mesh axis splits neither weights by layer or width nor activations by example or position."""
    busy = {axis for dim in ("layers", "gradients", "batch", "sequence") for axis in self.layout.axes(dim)}
    return any(size > 1 for axis, size in self.layout.mesh.items() if axis not in busy)

  def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table [V, D] split over `vocab`, for token ids [B, T] → [B, T, D].

    Every device looks up the ids that its part of the table holds, and the results are summed. This is written out
    because XLA's partitioner aborts the process on a sharded lookup inside a pipeline's shard_map (jax 0.12.0.1).
    """
    parts = self.layout.shards("vocab")
    if parts == 1:
      # Pinned, or the compiler splits the ids as the positions that are kept of the result, with permutes.
      return table[self.activation(ids, "batch", None)]
    rows = table.shape[0] // parts
    tables = self.activation(table.reshape(parts, rows, -1), "vocab", None, None)
    local = self.activation(ids - rows * jnp.arange(parts).reshape(-1, 1, 1), "vocab", "batch", None)  # [parts, B, T]
    found = jax.vmap(lambda part, i: part[i])(tables, jnp.clip(local, 0, rows - 1))
    found = self.activation(found, "vocab", "batch", None, None)
    found = jnp.where(((local >= 0) & (local < rows))[..., None], found, 0)
    return jax.lax.reduce(found, np.zeros((), found.dtype), jax.lax.add, (0,))  # jnp.sum would send float32

  def all_gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """Gathers a weight along `embed` by hand. `dims` names its last dimensions."""
    assert self.by_hand
    if "embed" not in dims or not self.by_hand.axes("embed"):
      return w
    dims, axes = (None,) * (w.ndim - len(dims)) + dims, self.by_hand.axes("embed")
    collective = lambda w: jax.lax.all_gather(w, axes, axis=dims.index("embed"), tiled=True)
    w = jax.lax.optimization_barrier(w)  # as in `gather`
    return self._with_whole_embed().local(collective, w, dims=(dims,), results=dims)

  def reduce_scatter(self, gradient: jax.Array, dims: Dims, axes: tuple[str, ...]) -> jax.Array:
    """Sums the gradient of such a weight over devices by hand, and leaves each device its piece along `embed`."""
    if "embed" not in dims or not axes:
      return gradient
    dims = (None,) * (gradient.ndim - len(dims)) + dims
    at, lead = dims.index("embed"), dims.index("layers") + 1 if "layers" in dims else 0

    def collective(g: jax.Array) -> jax.Array:
      first = jnp.moveaxis(g, at, lead)
      matrices = first.reshape(*first.shape[: lead + 1], -1)  # as in `_scatter`
      piece = jax.lax.psum_scatter(matrices, axes, scatter_dimension=lead, tiled=True)
      return jnp.moveaxis(piece.reshape(*piece.shape[: lead + 1], *first.shape[lead + 1 :]), lead, at)

    work = functools.partial(sum_in_dtype, collective)
    return self._with_whole_embed().local(work, gradient, dims=(dims,), results=dims)

  def _with_whole_embed(self) -> "MeshSharding":
    """Where other mesh axes split `embed`, too, their pieces must not be split again while they are put together."""
    return self.place(embed=None, gradients=None, state=None)

  def local(self, kernel: Callable[..., T], *arrays: jax.Array, dims: Sequence[Dims], results: Any) -> T:
    """Calls a kernel on each device's own part of the arrays. In a pipeline, `stage` is manual already.

    There, axes of a single device must become manual too: cuDNN's attention cannot be partitioned beside manual axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    if not axes or (self.layout.device_count == 1 and not mesh.manual_axes):
      return kernel(*arrays)
    ins = tuple(map(self.layout.spec, dims))
    outs = map_dims(self.layout.spec, results)
    return jax.shard_map(kernel, in_specs=ins, out_specs=outs, axis_names=axes, check_vma=False)(*arrays)

  def add_up(self, parts: jax.Array, dim: str, dims: Dims) -> jax.Array:
    """Sums over the first dimension of an array [n, ...], which has an entry for each piece of `dim`.

    First along the mesh axes that split the gradient of `dims`, so that along the others only pieces are sent. They are
    added up as matrices, for the reason that `_scatter` gives.
    """
    gradient = self.layout.of("gradients")
    left = [axis for axis in self.layout.axes(dim) if self.layout.mesh[axis] > 1]
    parts = parts.reshape(*(self.layout.mesh[axis] for axis in left), *parts.shape[1:])
    split = {axis for name in dims if name for axis in gradient.axes(name)}
    add = lambda x: jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,))
    for axis in sorted(left, key=lambda axis: axis not in split):
      parts = jnp.moveaxis(parts, left.index(axis), 0)
      left.remove(axis)
      if not left:
        return add(parts)
      count, spec = len(left), gradient.only([axis for axis in gradient.mesh if axis not in left]).spec(dims)
      first = jnp.moveaxis(parts, range(1, count + 1), range(2, count + 2))  # [axis, D, *left, ...]
      matrices = jax.lax.optimization_barrier(first.reshape(*first.shape[:2], -1))  # or the compiler undoes this
      columns = (*left, *(axis for place in spec[1:] for axis in axes_of(place)))
      summed = constrain(add(matrices), P(spec[0], columns)).reshape(first.shape[1:])
      parts = jnp.moveaxis(summed, range(1, count + 1), range(count))
    return parts

  def in_order(self, first: jax.Array, then: jax.Array) -> jax.Array:
    """`then`, unchanged, but not before devices have computed `first` together."""
    return then if self.layout.device_count == 1 else in_order(first, then)

  def total(self, x: jax.Array, dim: str) -> jax.Array:
    """In a kernel: the sum of x over the devices that split a dimension."""
    return jax.lax.psum(x, self.layout.axes(dim)) if self.layout.shards(dim) > 1 else x

  def largest(self, x: jax.Array, dim: str) -> jax.Array:
    """In a kernel: the elementwise maximum of x over the devices that split a dimension."""
    return jax.lax.pmax(x, self.layout.axes(dim)) if self.layout.shards(dim) > 1 else x


def sum_in_dtype(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """Applies a sum over devices. On CPUs in float32 at least: XLA's CPU backend fails on bfloat16 (jax 0.10.2)."""
  if x.dtype != jnp.bfloat16:
    return collective(x)
  in_float32 = lambda x: collective(x.astype(jnp.float32)).astype(x.dtype)
  return jax.lax.platform_dependent(x, cpu=in_float32, default=collective)


def in_order(first: Any, then: T) -> T:
  """`then`, unchanged, but not before `first` is computed.

  XLA's CPU backend runs what is independent in any order: also a gather or sum over devices, and a phase that neither
  reads nor writes the same values. If devices choose different orders, they wait for each other forever. So `then`
  must depend on `first` in the compiled program, from which a barrier would be gone. Other backends keep one order.
  """

  def tied(first: Any, then: T) -> T:
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in jax.tree.leaves(first)])
    zero = largest < -1  # always false, but the compiler does not know
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), then)

  return jax.lax.platform_dependent(first, then, cpu=tied, default=lambda first, then: then)
