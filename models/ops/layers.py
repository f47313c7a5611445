"""Weights, products with them, RMSNorm and dropout, in the form that compilers run best."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from models.dimensions import Dims, Sharding
from models.ops import float8
from models.ops.float8 import Quantized
from models.ops.gradients import with_gradient
from models.ops.positions import own

if TYPE_CHECKING:
  from models.sizes import ModelSizes


def weight(
  keys: nnx.RngStream,
  shape: tuple[int, ...],
  dims: Dims,
  *,
  std: float,
  dtype: str,
  used: str | None = None,
  product: bool = False,
) -> nnx.Param:
  """A weight drawn from a normal distribution with the next of the keys; `dims` names its dimensions.

  Args:
    dtype: the dtype in which the weight is stored.
    used: the dtype in which the model uses it; None: the compute dtype.
    product: whether the weight multiplies as `model.products` says.
  """
  assert len(shape) == len(dims)
  value = std * jax.random.normal(keys(), shape, jnp.float32)
  return nnx.Param(value.astype(dtype), dims=dims, used=used, product=product)


def linear(
  x: jax.Array, w: jax.Array | Quantized, sharding: Sharding, *, inputs: int = 1, flat: bool = True
) -> jax.Array:
  """Contracts the last `inputs` dimensions of x with the first of w: [..., I] × [I, O...] → [..., O...].

  It is a product of two matrices, and so is the gradient of w, because XLA's CPU backend runs a contraction over two
  dimensions (batch and position) at half the speed of one over a single dimension.

  Args:
    flat: whether the leading dimensions form one, too. Must be false where devices sum the results and then split them
      by position (`Sharding.split_sequence`): the GPU compiler would all-reduce a flat result. The same holds for the
      gradient of x, which is never flat.
  """
  lead, out = x.shape[: x.ndim - inputs], w.shape[inputs:]
  if isinstance(w, Quantized):
    of_rows = w.reshape(math.prod(w.shape[:inputs]), -1)
    (found,) = float8.linears(x.reshape(*lead, -1), (of_rows,), None, sharding, flat=flat)
    return found.reshape(*lead, *out)

  def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return (_rows(x) if flat else x) @ w, (x, w)

  def backward(given: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = given
    return g.reshape(*x.shape[:-1], -1) @ w.T, _rows(x).T @ _rows(g)

  matrix = w.reshape(math.prod(w.shape[:inputs]), -1)
  return with_gradient(forward, backward, x.reshape(*lead, -1), matrix).reshape(*lead, *out)


def linear_by_rows(x: jax.Array, table: jax.Array) -> jax.Array:
  """A few rows x [B, I] and the rows of a table [O, I] → [B, O]: x · tableᵀ, computed as (table · xᵀ)ᵀ.

  In this order XLA's CPU backend takes about a third less time, if B is from 2 to 64. The barrier keeps the order. With
  many rows, x · tableᵀ is faster.
  """
  return jax.lax.optimization_barrier(table @ x.T).T


Arrays = tuple[jax.Array, ...]


def linears(
  x: jax.Array,
  weights: Arrays | tuple[Quantized, ...],
  join: Callable[[Arrays], jax.Array],
  sharding: Sharding,
) -> Arrays:
  """Several linear maps of one input: [..., I] × [I, O...] each → [..., O...] each.

  Where devices split heads or hidden units, the maps are one product. So the devices sum its contributions to the
  gradient of x only once. And a CPU computes the gradients of a device's few columns of each weight at a third of the
  speed of many columns (measured once, when this was built).

  Args:
    join: makes one array [..., M, N] of arrays [..., O...]. Devices may split M or N. The backward pass calls it again,
      so no joined weights are saved.
  """
  are_whole = sharding.shards("heads") == sharding.shards("mlp") == 1
  if isinstance(weights[0], Quantized):
    return float8.linears(x, weights, None if are_whole else join, sharding)
  if are_whole:
    return tuple(linear(x, w, sharding) for w in weights)

  def forward(x: jax.Array, weights: Arrays) -> tuple[Arrays, tuple[jax.Array, Arrays]]:
    product = jnp.einsum("ri,imn->rmn", _rows(x), join(weights))
    shapes = [jax.ShapeDtypeStruct((len(product), *w.shape[1:]), product.dtype) for w in weights]
    (parts,) = jax.linear_transpose(join, tuple(shapes))(product)
    return tuple(part.reshape(*x.shape[:-1], *part.shape[1:]) for part in parts), (x, weights)

  def backward(given: tuple[jax.Array, Arrays], gradients: Arrays) -> tuple[jax.Array, Arrays]:
    x, weights = given
    joined = join(gradients)
    of_x = jnp.einsum("...mn,imn->...i", joined, join(weights))
    if sharding.shards("gradients") > 1:  # the TPU compiler scatters no pieces of a larger product
      of_weight = lambda w, g: (_rows(x).T @ g.reshape(-1, math.prod(w.shape[1:]))).reshape(w.shape)
      return of_x, tuple(of_weight(w, g) for w, g in zip(weights, gradients, strict=True))
    of_weights = jnp.einsum("ri,rmn->imn", _rows(x), joined.reshape(-1, *joined.shape[-2:]))
    return of_x, *jax.linear_transpose(join, weights)(of_weights)

  return with_gradient(forward, backward, x, weights)


def _rows(x: jax.Array) -> jax.Array:
  return x.reshape(-1, x.shape[-1])


class RMSNorm(nnx.Module):
  """Root mean square normalization over the last dimensions, of this shape, in float32 (arXiv:1910.07467).

  Args:
    dims: the names of these dimensions, of which a layout may split some.
  """

  def __init__(self, shape: int | tuple[int, ...], sizes: "ModelSizes", dims: Dims = (None,)):
    self.eps, self.offset, self.axes = sizes.norm_eps, sizes.norm_offset, tuple(range(-len(dims), 0))
    self.scale = nnx.Param(jnp.full(shape, 1 - self.offset, sizes.param_dtype), dims=dims)

  def __call__(self, x: jax.Array) -> jax.Array:  # [..., *shape] → [..., *shape]
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=self.axes, keepdims=True) + self.eps)
    scale = self.scale[...] + self.offset if self.offset else self.scale[...]
    return (normed * scale).astype(x.dtype)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, sharding: Sharding) -> jax.Array:
  """Zeroes elements of x [B, T, D] with probability `rate` and scales up the rest. `keys` [B] has a key per example.

  Keys depend on the example and the step, never on the device, so every layout drops the same elements.
  """
  if keys is None or rate == 0:
    return x
  shape = x.shape[1] * sharding.shards("positions"), x.shape[2]
  keep = own(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys), sharding)
  keep = sharding.activation(keep, "batch", "sequence", None)
  return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def fold_in(keys: jax.Array | None, data: jax.Array | int) -> jax.Array | None:
  """Folds a number into each of the keys [B]."""
  return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, data))(keys)
