"""Padding: arrays are stored with dimensions that devices divide, and computed with in the model's own sizes.

    stored   [ 0 1 2 ] [ 3 4 5 ] [ 6 7 · ]     width 8 on 3 devices: ⌈8/3⌉ rows each, and a row of zeros
    used     [ 0 1 2 ] [ 3 4 5 ] [ 6 7 ]

JAX takes and returns only arrays whose dimensions divide. So a jitted function is given padded arrays and cuts them
first; its last lines pad. In between, the compiler splits a dimension of any size into equal pieces, of which the last
are shorter. So no sum, mean or norm ever sees padding. No row changes its device, and nothing is sent. A `shard_map`
takes only what divides, too: `pad` before it, `cut` after it.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.lax import with_sharding_constraint as constrain

from models.dimensions import Dims, is_dims, resized
from strategies.layout import Layout

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Stored:
  """How the arrays of a tree are stored under a layout.

  Attributes:
    dims: the names of the dimensions of each array, in the same tree.
    shapes: the arrays' shapes without padding, and their dtypes, in the same tree.
    axes: pads only for the pieces along these mesh axes; None: along all.
  """

  layout: Layout
  dims: Any
  shapes: Any
  axes: Collection[str] | None = None

  def abstract(self) -> Any:
    """The shapes and dtypes of what is stored."""
    return self._each(lambda x, dims: jax.ShapeDtypeStruct(self._shape(x, dims), x.dtype), self.shapes)

  def pad(self, tree: Any) -> Any:
    return self._each(lambda x, dims: _placed(self.layout, x, dims, self._shape(x, dims)), tree)

  def cut(self, tree: Any) -> Any:
    return self._each(lambda x, like, dims: cut(self.layout, x, dims, like.shape), tree, self.shapes)

  def _shape(self, x: Any, dims: Dims) -> tuple[int, ...]:
    layout = self.layout if self.axes is None else self.layout.restricted_to(self.axes)
    return stored_shape(layout, x.shape, dims)

  def _each(self, f: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(lambda dims, *x: f(*x, dims), self.dims, *trees, is_leaf=is_dims)


def stored_shape(layout: Layout, shape: Shape, dims: Dims) -> tuple[int, ...]:
  """A shape with each dimension rounded up to a multiple of its pieces."""
  pieces = [layout.shards_in(dims, dim) if dim else 1 for dim in dims]
  return tuple(-(-size // n) * n for size, n in zip(shape, pieces, strict=True))


def pad(layout: Layout, x: jax.Array, dims: Dims) -> jax.Array:
  """An array as it is stored: with zeros behind it."""
  return _placed(layout, x, dims, stored_shape(layout, x.shape, dims))


def cut(layout: Layout, x: jax.Array, dims: Dims, shape: Shape) -> jax.Array:
  """An array of this shape, cut from a stored array."""
  return _placed(layout, x, dims, shape)


def _placed(layout: Layout, x: jax.Array, dims: Dims, shape: Shape) -> jax.Array:
  return x if x.shape == tuple(shape) else constrain(resized(x, shape), layout.spec(dims))
