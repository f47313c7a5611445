"""Shares stacked weights among devices by layer, for optimizers that need whole matrices.

    before   [ 0₀ 1₀ 2₀ 3₀ ] [ 0₁ 1₁ 2₁ 3₁ ] [ 0₂ 1₂ 2₂ 3₂ ] [ 0₃ 1₃ 2₃ 3₃ ]     a piece of each layer
    work on  [ 0           ] [ 1           ] [ 2           ] [ 3           ]     whole layers
    after    as before: every device sends the others their pieces

So each matrix is worked on once, and a device sends about twice what it holds. Gathering all layers on n devices would
send n/2 times as much, and every device would repeat all the work.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.dimensions import Dims
from strategies.layout import Layout


class Share(NamedTuple):
  """How devices share the layers of a weight.

  Attributes:
    pieces: each dimension that is in pieces, by number, and the mesh axes along which devices exchange these pieces.
    copies: the mesh axes along which devices hold the same pieces, and divide the layers that they have whole.
    layers: how many a device works on. If the devices that exchange pieces do not divide the layers, some get zeros.
  """

  pieces: list[tuple[int, tuple[str, ...]]]
  copies: tuple[str, ...]
  layers: int


def share(layout: Layout, dims: Dims, depth: int) -> Share:
  """How devices share a weight of so many layers, stored as this layout says."""
  pieces = [(at, axes) for at, dim in enumerate(dims) if at and dim and (axes := layout.axes(dim))]
  used = {axis for dim in dims if dim for axis in layout.axes(dim)}
  exchange = math.prod(layout.mesh[axis] for _, axes in pieces for axis in axes)
  layers = math.ceil(depth / layout.shards("layers") / exchange)
  copies: tuple[str, ...] = ()
  for axis, size in layout.mesh.items():
    if axis not in used and layers % size == 0:
      copies, layers = (*copies, axis), layers // size
  return Share(pieces, copies, layers)


def by_layer(layout: Layout, work: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
  """Calls `work` on whole layers of a stacked weight that is stored as this layout says, and returns it stored so."""
  pieces, copies, layers = share(layout, dims, len(x))

  def own(x: jax.Array) -> jax.Array:
    count, exchange = len(x), math.prod(layout.mesh[axis] for _, axes in pieces for axis in axes)
    # The barrier keeps the dtype in which x travels; see `Constraints.gather`.
    x = jax.lax.optimization_barrier(jnp.pad(x, [(0, -count % exchange), *[(0, 0)] * (x.ndim - 1)]))
    for at, axes in pieces:
      x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=at, tiled=True)
    x = work(jax.lax.dynamic_slice_in_dim(x, layers * jax.lax.axis_index(copies), layers))
    x = jax.lax.all_gather(x, copies, tiled=True) if copies else x
    for at, axes in reversed(pieces):
      x = jax.lax.all_to_all(x, axes, split_axis=at, concat_axis=0, tiled=True)
    return x[:count]

  if layout.device_count == 1:
    return work(x)
  if set(jax.sharding.get_abstract_mesh().manual_axes) >= set(layout.mesh):
    return own(x)  # in pmap
  return jax.shard_map(own, in_specs=layout.spec(dims), out_specs=layout.spec(dims), check_vma=False)(x)
