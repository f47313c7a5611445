"""Collectives by hand: what code inside a `shard_map` uses to send between devices.

constraints.py is the counterpart for code outside, where the compiler adds the collectives.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models.dimensions import STACKED, Dims, map_dims, resized
from models.ops.float8 import Quantized
from models.ops.gradients import with_gradient
from models.ops.workarounds import cast_before_sending, sum_in_dtype
from strategies.execution.padding import cut, pad
from strategies.layout import Layout

ROWS, LANES = 32, 128  # a tile of a TPU's memory: bytes of a column, and columns

T = TypeVar("T")
Map = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Collectives:
  """Gathers and scatters over mesh axes that are manual.

  Attributes:
    layout: the places on the manual axes.
    rest: the places on the axes that are left to the compiler.
  """

  layout: Layout
  rest: Layout
  width: int  # of the model: gathered weights are cut to it; 0: they have no padding

  def gathered(self, w: jax.Array, dims: Dims) -> jax.Array:
    """A weight gathered along `embed`. Its gradient is reduce-scattered to the pieces that devices hold."""
    scatter = functools.partial(self.reduce_scatter, dims=dims, axes=self.layout.axes_in(dims, "embed"))
    return gathered_by(lambda w: self.all_gather(w, dims), scatter, w)

  def all_gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """Gathers a weight along `embed`. `dims` names its last dimensions."""
    axes = self.layout.axes_in(dims, "embed")

    def gather(w: jax.Array, dims: Dims) -> jax.Array:
      whole = jax.lax.all_gather(w, axes, axis=dims.index("embed"), tiled=True)
      return self._with_width(whole, dims, self.width) if self.width else whole

    return self._along_embed(gather, cast_before_sending(w), dims) if "embed" in dims and axes else w

  def reduce_scatter(self, gradient: jax.Array, dims: Dims, axes: tuple[str, ...]) -> jax.Array:
    """Sums the gradient of a gathered weight over devices, and leaves each device its piece along `embed`."""
    n = math.prod(self.layout.mesh[axis] for axis in axes)

    def scatter(gradient: jax.Array, dims: Dims) -> jax.Array:
      gradient = self._with_width(gradient, dims, -(-gradient.shape[dims.index("embed")] // n) * n)
      if is_small(dims):
        return as_matrices(added_up, gradient, dims)
      one = tuple(None if name == "experts" else name for name in dims)  # a matrix of all experts, side by side
      return sum_in_dtype(lambda g: as_matrices(piece, g, one), gradient)

    def piece(x: jax.Array, at: int) -> jax.Array:
      """Scatters matrices along their rows. Pieces that do not fill tiles take the shape of rows that do."""
      rows = x.shape[at] // n
      whole = x if fills_tiles(rows, x.dtype) else x.reshape(*x.shape[:at], n, -1, math.gcd(rows * x.shape[-1], LANES))
      found = jax.lax.psum_scatter(whole, axes, scatter_dimension=at, tiled=True)
      return found.reshape(*x.shape[:at], rows, x.shape[-1])

    def added_up(x: jax.Array, at: int) -> jax.Array:
      """Scatters small matrices, which the TPU compiler would all-reduce: each device adds up what it is sent."""
      pieces = x.reshape(*x.shape[:at], n, -1, x.shape[-1])
      sent = jax.lax.all_to_all(pieces, axes, split_axis=at, concat_axis=at, tiled=True)
      return jnp.sum(sent, axis=at, dtype=jnp.float32).astype(x.dtype)

    return self._along_embed(scatter, gradient, dims) if "embed" in dims and axes else gradient

  def _with_width(self, x: jax.Array, dims: Dims, width: int) -> jax.Array:
    at = dims.index("embed")
    return resized(x, (*x.shape[:at], width, *x.shape[at + 1 :]))

  def _along_embed(self, collective: Callable[[jax.Array, Dims], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
    """Runs a collective on arrays whose `embed` the compiler must not split while their pieces are put together."""
    dims = (None,) * (x.ndim - len(dims)) + dims
    whole = self.rest.place(embed=None, gradients=None, state=None)
    found = on_own_parts(whole, lambda x: collective(x, dims), pad(whole, x, dims), dims=(dims,), results=dims)
    return cut(whole, found, dims, tuple(found.shape[at] if dims[at] == "embed" else n for at, n in enumerate(x.shape)))


def with_transpose(linear: Map, transpose: Map, x: jax.Array) -> jax.Array:
  """linear(x), where the gradient of x is `transpose` of the gradient of the result."""
  return with_gradient(lambda x: (linear(x), None), lambda _, gradient: (transpose(gradient),), x)


def gathered_by(gather: Map, scatter: Map, w: Any) -> Any:
  """A weight, gathered; its gradient is scattered. Of a weight in float8, the bits are gathered."""
  return w.gathered(gather, scatter) if isinstance(w, Quantized) else with_transpose(gather, scatter, w)


def fills_tiles(rows: int, dtype: Any) -> bool:
  """Whether matrices of so many rows fill the tiles of a TPU's memory. The TPU compiler scatters no others."""
  return rows * jnp.dtype(dtype).itemsize % ROWS == 0


def is_small(dims: Dims) -> bool:
  """Whether only `embed` can split a weight's matrices, as for routers, adapters, patches and classes."""
  return {name for name in dims if name not in (None, *STACKED)} == {"embed"}


def leading(dims: Dims) -> int:
  """How many dimensions of a weight come before its matrices: layers, experts, and what is before them."""
  return 1 + max((dims.index(name) for name in STACKED if name in dims), default=-1)


def as_matrices(scatter: Callable[[jax.Array, int], jax.Array], gradient: jax.Array, dims: Dims) -> jax.Array:
  """Scatters a gradient along `embed` in the shape of matrices: [D, columns], or several of them, by layer and expert.

  The TPU compiler all-reduces other shapes if a piece does not fill its tiles.

  Args:
    scatter: is given the matrices, and the number of the dimension `embed` in them.
  """
  at, lead = dims.index("embed"), leading(dims)
  first = jnp.moveaxis(gradient, at, lead)
  pieces = scatter(first.reshape(*first.shape[: lead + 1], -1), lead)
  return jnp.moveaxis(pieces.reshape(*pieces.shape[: lead + 1], *first.shape[lead + 1 :]), lead, at)


def on_own_parts(layout: Layout, kernel: Callable[..., T], *arrays: jax.Array, dims: Sequence[Dims], results: Any) -> T:
  """Calls a kernel on each device's own part of the arrays, as this layout splits them (`Sharding.local`).

  In a pipeline, `stage` is manual already. There, axes of a single device must become manual too: cuDNN's attention
  cannot be partitioned beside manual axes.

  Along an axis that splits none of the arrays, all devices compute the same. A second `shard_map`, which checks
  this, declares it. Otherwise, the gradients would be summed along that axis.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
  if not axes or (layout.device_count == 1 and not mesh.manual_axes):
    return kernel(*arrays)
  ins = tuple(map(layout.spec, dims))
  outs = map_dims(layout.spec, results)
  split = {axis for array in dims for dim in array if dim for axis in layout.axes_in(array, dim)}
  same = {axis for axis in axes - split if mesh.shape[axis] > 1}
  on_parts = jax.shard_map(kernel, in_specs=ins, out_specs=outs, axis_names=axes - same, check_vma=False)
  return jax.shard_map(on_parts, in_specs=P(), out_specs=P(), axis_names=same)(*arrays) if same else on_parts(*arrays)


class Share(NamedTuple):
  """How devices share the layers of a stacked weight, for optimizers that need whole matrices.

      before   [ 0₀ 1₀ 2₀ 3₀ ] [ 0₁ 1₁ 2₁ 3₁ ] [ 0₂ 1₂ 2₂ 3₂ ] [ 0₃ 1₃ 2₃ 3₃ ]     a piece of each layer
      work on  [ 0           ] [ 1           ] [ 2           ] [ 3           ]     whole layers
      after    as before: every device sends the others their pieces

  So each matrix is worked on once, and a device sends about twice what it holds. Gathering all layers on n devices
  would send n/2 times as much, and every device would repeat all the work.

  Attributes:
    pieces: each dimension that is in pieces, by number, and the mesh axes along which devices exchange these pieces.
    copies: the mesh axes along which devices hold the same pieces, and divide the layers that they have whole.
    layers: how many layers a device works on. If the devices that exchange pieces do not divide them, some get zeros.
  """

  pieces: list[tuple[int, tuple[str, ...]]]
  copies: tuple[str, ...]
  layers: int


def share(layout: Layout, dims: Dims, depth: int) -> Share:
  """How devices share a weight of so many layers, stored as this layout says."""
  found = [(at, layout.axes_in(dims, dim)) for at, dim in enumerate(dims) if at and dim and dim != "experts"]
  pieces = [(at, axes) for at, axes in found if axes]  # each expert is a matrix of its own, so experts stay in pieces
  used = {axis for dim in dims if dim for axis in layout.axes_in(dims, dim)}
  exchange = math.prod(layout.mesh[axis] for _, axes in pieces for axis in axes)
  stages = layout.shards("layers") if "layers" in dims else 1
  layers = math.ceil(depth / stages / exchange)
  copies: tuple[str, ...] = ()
  for axis, size in layout.mesh.items():
    if axis not in used and layers % size == 0:
      copies, layers = (*copies, axis), layers // size
  return Share(pieces, copies, layers)


def by_layer(layout: Layout, work: Map, x: jax.Array, dims: Dims) -> jax.Array:
  """Calls `work` on whole layers of a stacked weight that is stored as this layout says. Stores the result so, too."""
  pieces, copies, layers = share(layout, dims, len(x))
  true = x.shape
  # Pieces that are exchanged make up whole matrices, without padding. Of the experts, a device keeps its own.
  whole = tuple(
    size // (1 if dim is None or at in dict(pieces) else layout.shards_in(dims, dim))
    for at, (size, dim) in enumerate(zip(true, dims, strict=True))
  )

  def on_own_pieces(x: jax.Array) -> jax.Array:
    count, exchange = len(x), math.prod(layout.mesh[axis] for _, axes in pieces for axis in axes)
    # The barrier keeps the dtype in which x travels; see `Constraints.gather`.
    x = jax.lax.optimization_barrier(jnp.pad(x, [(0, -count % exchange), *[(0, 0)] * (x.ndim - 1)]))
    for at, axes in pieces:
      x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=at, tiled=True)
    x, stored = resized(x, (len(x), *whole[1:])), (layers, *x.shape[1:])
    x = work(jax.lax.dynamic_slice_in_dim(x, layers * jax.lax.axis_index(copies), layers))
    x = resized(x, stored)
    x = jax.lax.all_gather(x, copies, tiled=True) if copies else x
    for at, axes in reversed(pieces):
      x = jax.lax.all_to_all(x, axes, split_axis=at, concat_axis=0, tiled=True)
    return x[:count]

  if layout.device_count == 1:
    return work(x)
  if set(jax.sharding.get_abstract_mesh().manual_axes) >= set(layout.mesh):
    return on_own_pieces(x)  # in pmap
  x = jax.shard_map(on_own_pieces, in_specs=layout.spec(dims), out_specs=layout.spec(dims), check_vma=False)(
    pad(layout, x, dims)
  )
  return cut(layout, x, dims, true)
