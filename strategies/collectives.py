"""Collectives by hand: what code inside a `shard_map` uses to send between devices.

constraints.py is the counterpart for code outside, where the compiler adds the collectives.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from models.dimensions import Dims, map_dims
from models.ops.workarounds import cast_before_sending, sum_in_dtype
from strategies.layout import Layout

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Collectives:
  """Sums, gathers and scatters over mesh axes that are manual.

  Attributes:
    layout: the places on the manual axes.
    rest: the places on the axes that are left to the compiler; without any, the code is manual over all axes.
  """

  layout: Layout
  rest: Layout | None = None

  def total(self, x: jax.Array, dim: str) -> jax.Array:
    """The sum of x over the devices that split a dimension."""
    return jax.lax.psum(x, self.layout.axes(dim)) if self.layout.shards(dim) > 1 else x

  def largest(self, x: jax.Array, dim: str) -> jax.Array:
    """The elementwise maximum of x over the devices that split a dimension."""
    return jax.lax.pmax(x, self.layout.axes(dim)) if self.layout.shards(dim) > 1 else x

  def gathered(self, w: jax.Array, dims: Dims) -> jax.Array:
    """A weight gathered along `embed`. Its gradient is reduce-scattered to the pieces that devices hold."""
    use = jax.custom_vjp(lambda w: self.all_gather(w, dims))
    scatter = functools.partial(self.reduce_scatter, dims=dims, axes=self.layout.axes("embed"))
    use.defvjp(lambda w: (self.all_gather(w, dims), None), lambda _, gradient: (scatter(gradient),))
    return use(w)

  def all_gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """Gathers a weight along `embed`. `dims` names its last dimensions."""
    if "embed" not in dims or not self.layout.axes("embed"):
      return w
    dims, axes = (None,) * (w.ndim - len(dims)) + dims, self.layout.axes("embed")
    collective = lambda w: jax.lax.all_gather(w, axes, axis=dims.index("embed"), tiled=True)
    return self._with_whole_embed(collective, cast_before_sending(w), dims)

  def reduce_scatter(self, gradient: jax.Array, dims: Dims, axes: tuple[str, ...]) -> jax.Array:
    """Sums the gradient of such a weight over devices, and leaves each device its piece along `embed`."""
    if "embed" not in dims or not axes:
      return gradient
    dims = (None,) * (gradient.ndim - len(dims)) + dims
    at, lead = dims.index("embed"), dims.index("layers") + 1 if "layers" in dims else 0

    def collective(g: jax.Array) -> jax.Array:
      first = jnp.moveaxis(g, at, lead)
      matrices = first.reshape(*first.shape[: lead + 1], -1)  # as in `Constraints._scatter`
      piece = jax.lax.psum_scatter(matrices, axes, scatter_dimension=lead, tiled=True)
      return jnp.moveaxis(piece.reshape(*piece.shape[: lead + 1], *first.shape[lead + 1 :]), lead, at)

    return self._with_whole_embed(functools.partial(sum_in_dtype, collective), gradient, dims)

  def _with_whole_embed(self, collective: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
    """Runs a collective on arrays whose `embed` the compiler must not split while their pieces are put together."""
    assert self.rest is not None, "weights are gathered where the compiler has the other mesh axes"
    whole = self.rest.place(embed=None, gradients=None, state=None)
    return on_own_parts(whole, collective, x, dims=(dims,), results=dims)


def on_own_parts(layout: Layout, kernel: Callable[..., T], *arrays: jax.Array, dims: Sequence[Dims], results: Any) -> T:
  """Calls a kernel on each device's own part of the arrays, as this layout splits them (`Sharding.local`).

  In a pipeline, `stage` is manual already. There, axes of a single device must become manual too: cuDNN's attention
  cannot be partitioned beside manual axes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
  if not axes or (layout.device_count == 1 and not mesh.manual_axes):
    return kernel(*arrays)
  ins = tuple(map(layout.spec, dims))
  outs = map_dims(layout.spec, results)
  return jax.shard_map(kernel, in_specs=ins, out_specs=outs, axis_names=axes, check_vma=False)(*arrays)
