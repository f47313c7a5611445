"""Logical dimensions: the names by which the model and the strategies speak about arrays.

The model names the dimensions of its arrays; a `Sharding` decides what the names mean on a mesh. Weights and
activations have separate names, so that `embed` (weights) can be split over the devices that also split `batch`
(activations):

    batch      activations: the examples
    positions  activations: the positions, everywhere and also in attention (ops/context.py)
    sequence   activations: the positions of the residual stream, between products
    embed      weights: the model width; gathered just before use
    heads      weights and activations: query and key-value heads
    mlp        weights and activations: the hidden width of the MLP, or of each expert
    experts    weights: the experts of a block (ops/experts.py)
    vocab      weights and activations: the vocabulary of the embedding, the head and the logits
    layers     weights: the stacked blocks

No layout splits `first_layers`: the blocks before those that the stages of a pipeline split (`Stacks.first_layers`).

Strategies use `strategies.execution.constraints.Constraints`. Without a strategy, the model runs on a single device.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

DIMENSIONS = ("batch", "positions", "sequence", "embed", "heads", "mlp", "experts", "vocab", "layers")

FIRST_LAYERS = "first_layers"
STACKED = ("layers", FIRST_LAYERS, "experts")  # the dimensions along which a weight is several matrices

T = TypeVar("T")

Dims = tuple[str | None, ...]  # one name, or None, for each dimension of an array


def is_dims(x: Any) -> bool:
  """Whether x names the dimensions of one array. The states of optax are tuples too."""
  return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def resized(x: jax.Array, shape: Sequence[int]) -> jax.Array:
  """An array with zeros added at the end of some dimensions, and the end of others cut off."""
  edges = [(0, new - old, 0) for old, new in zip(x.shape, shape, strict=True)]
  return x if x.shape == tuple(shape) else jax.lax.pad(x, jnp.zeros((), x.dtype), edges)


def map_dims(f: Callable[[Dims], Any], dims: Any) -> Any:
  """A tree like `dims`, with f(dimensions) for each array."""
  return jax.tree.map(f, dims, is_leaf=is_dims)


def leaves_of(dims: Any) -> list[Dims]:
  """The dimensions of each array of a tree like `dims`."""
  return jax.tree.leaves(dims, is_leaf=is_dims)


class Sharding:
  """What the model needs from whoever shards it.

  This is the sharding of a single device, and of code that shards by itself: it ignores the names of dimensions.
  `strategies.execution.constraints.Constraints` overrides every method.
  """

  def shards(self, dim: str, among: str | None = None) -> int:
    """The number of pieces of a dimension; with `among`, of those on the devices that share the dimension `among`.

    "gradients" stands for the pieces in which the compiler leaves the gradients of weights. If "positions" has several
    pieces, a device computes with its own positions only, in the order of `ops.positions.own`.
    """
    return 1

  def activation(self, x: jax.Array, *dims: str | None) -> jax.Array:
    """Constrains the sharding of an activation; `dims` names its dimensions."""
    return x

  def gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """Returns a weight ready to use: no longer split along `embed`."""
    return w

  def by_layer(self, work: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
    """Calls `work` on whole layers of stacked weights [layers, ...]. One call may get only some of the layers.

    Args:
      x: the stacked array, stored like the optimizer's state of a weight with these dimensions. So is the result.
      work: returns an array of the same shape. It must treat each layer apart, and make zeros of zeros.
    """
    return work(x)

  def largest(self, x: jax.Array, *dims: str | None) -> jax.Array:
    """The largest x of all devices that share an array with these dimensions. Each has that of its own part."""
    return x

  def whole_sequence(self, x: jax.Array) -> jax.Array:
    """All positions of the residual stream [B, T, D], for a product; splits the gradient again."""
    return x

  def split_sequence(self, x: jax.Array) -> jax.Array:
    """Each device's own positions of a product's result [B, T, D]; makes the gradient whole again."""
    return x

  def local(self, kernel: Callable[..., T], *arrays: jax.Array, dims: Sequence[Dims], results: Any) -> T:
    """Calls a kernel that the compiler does not split, on each device's own part of the arrays.

    Args:
      dims: names the dimensions of each array.
      results: names the dimensions of each result, in the same tree.
    """
    return kernel(*arrays)

  def index(self, dim: str) -> jax.Array:
    """The number of the piece of a dimension that this device has. Works in a kernel of `local`, or for "positions"."""
    return jnp.zeros((), jnp.int32)

  def across(self, collective: Callable[..., jax.Array], x: jax.Array, dim: str) -> jax.Array:
    """Runs a collective of x over the devices that split `dim`. Works in a kernel of `local`, or for "positions".

    Args:
      collective: (x, mesh axes) → the result, such as `jax.lax.psum`.
    """
    return x

  def sum_pieces(self, parts: jax.Array, dim: str, dims: Dims) -> jax.Array:
    """Sums over the first dimension of an array [n, ...], which has an entry for each piece of the dimension `dim`.

    Args:
      dims: names the dimensions of the result, which is a gradient, or is sharded like one.
    """
    return parts[0]


UNSHARDED = Sharding()
