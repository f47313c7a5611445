"""Products in float8: each number of an operand is a byte, and all numbers of a tensor share a power of two, its scale.

    product       operands          of which gradients need range more than precision
    forward       e4m3 × e4m3       e4m3: 4 bits of exponent and 3 of mantissa, up to 448
    of the input  e5m2 × e4m3       e5m2: 5 and 2, up to 57344
    of a weight   e4m3 × e5m2

A scale is made of the exponent of the tensor's largest number, over all devices. So multiplying by it rounds nothing,
and operands are the same under every layout. The result of a product is scaled, not its operands: compilers turn only
such products into those of the hardware. Infinite numbers become NaN, so a step that is not finite is seen.

The weights of a block share one scale. Their largest numbers differ by a few powers of two, and below the largest
number e4m3 has 15 with full precision.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.ops.gradients import with_gradient
from models.remat import SCALE

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
TOP = {E4M3: 8, E5M2: 15}  # the largest number of a format is 1.75 · 2^TOP
Arrays = tuple[jax.Array, ...]
Map = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
  """A weight as it multiplies, and as it is sent between devices.

  Attributes:
    bits: the numbers in e4m3, as uint8, because JAX gives integers no gradient.
    inverse: by what the numbers are multiplied to be the weight's: a power of two, float32.
    carrier: in the weight's shape and compute dtype. Nobody reads its values: its gradient is the weight's.
  """

  bits: jax.Array
  inverse: jax.Array
  carrier: jax.Array

  def __getitem__(self, _: Any) -> "Quantized":
    return self  # as an `nnx.Variable` is read

  @property
  def shape(self) -> tuple[int, ...]:
    return self.bits.shape

  @property
  def numbers(self) -> jax.Array:
    return jax.lax.bitcast_convert_type(self.bits, E4M3)

  def reshape(self, *shape: int) -> "Quantized":
    return Quantized(self.bits.reshape(*shape), self.inverse, self.carrier.reshape(*shape))

  def gathered(self, gather: Map, scatter: Map) -> "Quantized":
    """The weight whose bits are gathered, in one byte each. `scatter` brings a gradient to where the weight is."""
    zeros = lambda carrier: (jnp.zeros_like(jax.eval_shape(gather, carrier)), None)
    carrier = with_gradient(zeros, lambda _, gradient: (scatter(gradient),), self.carrier)
    return Quantized(jax.lax.optimization_barrier(gather(self.bits)), self.inverse, carrier)

  def wide(self) -> jax.Array:
    """The weight in its compute dtype."""
    value = lambda w: (_times(w.numbers.astype(w.carrier.dtype), w.inverse), w)
    return with_gradient(value, lambda w, gradient: (_of_weight(w, gradient),), self)


def quantized(weights: Any, sharding: Sharding) -> Any:
  """A stack's weights [layers, ...], of which those of products become `Quantized`. A tree of `nnx.Param`."""
  is_param = lambda x: isinstance(x, nnx.Param)
  own = [w for w in jax.tree.leaves(weights, is_leaf=is_param) if _multiplies(w)]
  if not own:
    return weights
  of_each = [_largest(w[...], tuple(range(1, w[...].ndim))) for w in own]
  of_block = sharding.largest(functools.reduce(jnp.maximum, of_each), *{dim for w in own for dim in w.dims})
  inverse = inverse_scale(of_block, E4M3)

  def one(w: nnx.Variable) -> nnx.Variable:
    if not _multiplies(w):
      return w
    value = w[...]
    numbers = in_float8(jax.lax.stop_gradient(value), inverse.reshape(-1, *(1,) * (value.ndim - 1)), E4M3)
    return w.replace(Quantized(jax.lax.bitcast_convert_type(numbers, jnp.uint8), inverse, value))

  return jax.tree.map(one, weights, is_leaf=is_param)


def values_of(weights: Any) -> Any:
  """A tree of weights with the values of those in float8, which have their gradients."""
  return jax.tree.map(lambda w: w.carrier if _is_quantized(w) else w, weights, is_leaf=_is_quantized)


def with_values(weights: Any, values: Any) -> Any:
  """A tree of weights with other values, which are not made float8 again: `values_of` in reverse."""
  put = lambda w, value: dataclasses.replace(w, carrier=value) if _is_quantized(w) else value
  return jax.tree.map(put, weights, values, is_leaf=_is_quantized)


def _is_quantized(x: Any) -> bool:
  return isinstance(x, Quantized)


def _multiplies(w: nnx.Variable) -> bool:
  """Whether a weight is one of a product, and not in float8 yet."""
  return "product" in w.get_metadata() and w.product and not isinstance(w[...], Quantized)


def linears(
  x: jax.Array,
  weights: tuple[Quantized, ...],
  join: Callable[[Arrays], jax.Array] | None,
  sharding: Sharding,
  *,
  flat: bool = True,
) -> Arrays:
  """Linear maps of one input, as `layers.linears` and, with one weight, `layers.linear` say: [..., I] → [..., O...].

  The gradients of their results share a scale. With `join`, the maps are one product.
  """
  dtype, lead = x.dtype, x.shape[:-1]
  rows = lambda x: x.reshape(-1, *x.shape[len(lead) :])
  together = lambda arrays: (join(tuple(arrays)),) if join else tuple(arrays)
  shapes = tuple(jax.ShapeDtypeStruct((*lead, *w.shape[1:]), dtype) for w in weights)
  apart = lambda found: jax.linear_transpose(join, shapes)(*found)[0] if join else tuple(found)

  def forward(x: jax.Array, weights: tuple[Quantized, ...]) -> tuple[Arrays, Any]:
    inverse = scale_of((x,), E4M3, sharding)
    left, power = in_float8(x, inverse, E4M3), inverse * weights[0].inverse
    product = lambda w: _times(_product(rows(left) if flat else left, w, -1, 0, dtype), power)
    found = [product(w) for w in together(w.numbers for w in weights)]
    return apart(y.reshape(*lead, *y.shape[1 if flat else len(lead) :]) for y in found), (x, inverse, weights)

  def backward(kept: Any, gradients: Arrays) -> tuple[jax.Array, tuple[Quantized, ...]]:
    x, inverse, weights = kept
    joined = together(gradients)
    of_g, left = scale_of(joined, E5M2, sharding), rows(in_float8(x, inverse, E4M3))

    def of_input(g: jax.Array, w: jax.Array) -> jax.Array:
      axes = range(len(lead), g.ndim), range(1, w.ndim)
      return _times(_product(in_float8(g, of_g, E5M2), w, *axes, dtype), of_g * weights[0].inverse)

    def of_weight(w: Quantized, g: jax.Array) -> Quantized:
      return _of_weight(w, _times(_product(left, rows(in_float8(g, of_g, E5M2)), 0, 0, dtype), inverse * of_g))

    of_x = functools.reduce(jnp.add, map(of_input, joined, together(w.numbers for w in weights)))
    return of_x, tuple(map(of_weight, weights, gradients))

  return with_gradient(forward, backward, x, weights)


def _product(a: jax.Array, b: jax.Array, of_a: int | range, of_b: int | range, dtype: Any) -> jax.Array:
  """The products, summed over these dimensions in a wider dtype."""
  axes = lambda x, at: (at % x.ndim,) if isinstance(at, int) else tuple(at)
  return jax.lax.dot_general(a, b, ((axes(a, of_a), axes(b, of_b)), ((), ())), preferred_element_type=dtype)


def _times(x: jax.Array, power: jax.Array) -> jax.Array:
  return x * power.astype(x.dtype)


def _of_weight(w: Quantized, gradient: jax.Array) -> Quantized:
  """What a backward pass returns for a weight. Integers have gradients of the dtype float0."""
  zeros: Any = np.zeros(w.shape, jax.dtypes.float0)
  return Quantized(zeros, jnp.zeros_like(w.inverse), gradient)


def scale_of(arrays: Arrays, form: Any, sharding: Sharding) -> jax.Array:
  """The inverse scale of activations or gradients [B, T, ...]. Remat saves it: it would need the devices again."""
  largest = functools.reduce(jnp.maximum, map(_largest, arrays))
  return checkpoint_name(inverse_scale(sharding.largest(largest, "batch", "positions"), form), SCALE)


def _largest(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
  return jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=axes)


def inverse_scale(largest: jax.Array, form: Any) -> jax.Array:
  """The least power of two by which numbers up to `largest` can be divided to fit a format, float32; 1 for zeros.

  It is made of bits, because `exp2` of whole numbers is not exact on CPUs.
  """
  bits = jax.lax.bitcast_convert_type(largest.astype(np.float32), np.int32)
  exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) > 0x600000)  # mantissas over 1.75 need one more
  exponent = jnp.where(largest > 0, jnp.clip(exponent - TOP[form], -100, 100), 0)
  return jax.lax.bitcast_convert_type((exponent + 127).astype(np.int32) << 23, np.float32)


def in_float8(x: jax.Array, inverse: jax.Array, form: Any) -> jax.Array:
  """x / inverse, rounded to a format. Nothing overflows, so nothing is clipped: what is not finite must stay so."""
  return (x * (1 / inverse).astype(x.dtype)).astype(form)
