"""The vocabulary between the model and whoever shards it.

The model names the dimensions of its arrays; a `Sharding` decides what the names mean on a mesh. Weights and
activations have separate names, so that `embed` (weights) can be split over the devices that also split `batch`
(activations):

    batch    activations: examples
    embed    weights: the model width; gathered just before use
    heads    weights and activations: query and key-value heads
    mlp      weights and activations: the hidden width of the MLP
    vocab    weights and activations: the vocabulary of the embedding, the head and the logits
    layers   weights: the stacked blocks

Strategies use `strategies.sharding.MeshSharding`. Without one the model runs on a single device.
"""

from typing import Protocol

import jax

DIMENSIONS = ("batch", "embed", "heads", "mlp", "vocab", "layers")

Dims = tuple[str | None, ...]  # one name, or None, for each dimension of an array


class Sharding(Protocol):
  """What the model asks of a layout."""

  def activation(self, x: jax.Array, *dims: str | None) -> jax.Array:
    """Pins an activation whose dimensions carry these names to its place on the mesh."""
    ...

  def gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    """Returns a weight as a computation uses it: no longer split along `embed`."""
    ...

  def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows [B, T, D] of a table [V, D] for ids [B, T]."""
    ...


class Unsharded:
  """A single device, or code that shards by itself: the names mean nothing."""

  def activation(self, x: jax.Array, *dims: str | None) -> jax.Array:
    return x

  def gather(self, w: jax.Array, dims: Dims) -> jax.Array:
    return w

  def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


UNSHARDED = Unsharded()
