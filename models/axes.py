"""The vocabulary between the model and whoever shards it.

The model names the axes of its arrays; a `Sharding` decides what the names mean on a mesh. Weights and activations
are named apart, so `embed` (weights) can be split over the devices that also split `batch` (activations):

    batch    activations: examples
    embed    weights: the model width; gathered just before use
    heads    weights and activations: query and key-value heads
    mlp      weights and activations: the hidden width of the MLP
    vocab    weights and activations: the vocabulary of the embedding, the head and the logits
    layers   weights: the stacked blocks

The implementation that strategies use is `strategies.layout.Layout`; without one the model runs on one device.
"""

from typing import Protocol

import jax

AXES = ("batch", "embed", "heads", "mlp", "vocab", "layers")

Axes = tuple[str | None, ...]  # one name, or None, for each dimension of an array


class Sharding(Protocol):
  """What the model asks of a layout."""

  def activation(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation whose dimensions carry these names to its place on the mesh."""
    ...

  def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
    """Returns a weight as a computation uses it: no longer split along `embed`."""
    ...


class Unsharded:
  """One device, or code that shards by itself: names mean nothing."""

  def activation(self, x: jax.Array, *axes: str | None) -> jax.Array:
    return x

  def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
    return w


UNSHARDED = Unsharded()
