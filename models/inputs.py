"""What goes into a model: tokens or images. One of the two choices that make a model; objectives.py is the other.

Each kind of input knows its part of a batch, its embedding, and the coordinates of its positions. A new kind is a
class here with these methods, and a line in `INPUTS`.
"""

from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from errors import ConfigError
from models.dimensions import Dims, Sharding
from models.layers import linear

if TYPE_CHECKING:
  from models.config import ModelConfig

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # CIFAR-10's training set, by channel

Shapes = dict[str, tuple[tuple[int, ...], Any]]  # field of a batch → shape of one example, dtype


class Input(Protocol):
  """The methods of a kind of input.

  Attributes:
    unit: what throughput counts.
    coordinates: how many numbers say where a position is: 1 in a text, 2 (row, column) in an image.
    is_image: whether image augmentation applies.
  """

  unit: str
  coordinates: int
  is_image: bool

  def check(self, model: "ModelConfig") -> None:
    """Raises ConfigError if the model's sizes do not fit this input."""

  def positions(self, model: "ModelConfig") -> int:
    """Length T of the sequence that the blocks see."""

  def units_per_example(self, model: "ModelConfig") -> int:
    """How many of `unit` an example holds."""

  def shapes(self, model: "ModelConfig", ahead: int) -> Shapes:
    """The fields of a batch that this input reads; `ahead` is how far the objective looks past the input."""

  def select(self, model: "ModelConfig", batch: dict[str, jax.Array]) -> jax.Array:
    """The input in a batch: tokens [B, T], or images uint8 [B, S, S, 3]."""

  def prepare(self, x: jax.Array, sharding: Sharding) -> jax.Array:
    """The input as the model takes it: tokens [B, T], or images normalized to zero mean and unit variance."""

  def embedding(self, model: "ModelConfig") -> tuple[tuple[int, ...], Dims, float]:
    """Shape, dimensions and standard deviation of the embedding's weight."""

  def embed(self, model: "ModelConfig", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    """The prepared input through the embedding → [B, T, D]."""

  def place(self, model: "ModelConfig", index: jax.Array) -> jax.Array:
    """Coordinates [T, A] of the positions with these numbers [T]."""

  def embedding_products(self, model: "ModelConfig") -> int:
    """Weights that multiply each position in the embedding; a lookup has none."""


class Tokens:
  """Token ids [B, T]."""

  unit, coordinates, is_image = "tokens", 1, False

  def check(self, model: "ModelConfig") -> None:
    pass

  def positions(self, model: "ModelConfig") -> int:
    return model.seq_len

  def units_per_example(self, model: "ModelConfig") -> int:
    return model.seq_len

  def shapes(self, model: "ModelConfig", ahead: int) -> Shapes:
    return {"tokens": ((model.seq_len + ahead,), np.int32)}

  def select(self, model: "ModelConfig", batch: dict[str, jax.Array]) -> jax.Array:
    return batch["tokens"][:, : model.seq_len]

  def prepare(self, x: jax.Array, sharding: Sharding) -> jax.Array:
    return x

  def embedding(self, model: "ModelConfig") -> tuple[tuple[int, ...], Dims, float]:
    return (model.vocab_size, model.width), ("vocab", "embed"), model.width**-0.5

  def embed(self, model: "ModelConfig", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    # The table is pinned, and so is its gradient: a scatter-add sums where the examples are. Otherwise the compiler
    # may send the activations' gradients to where the table is stored.
    return sharding.lookup(sharding.activation(table, "vocab", None), x)

  def place(self, model: "ModelConfig", index: jax.Array) -> jax.Array:
    return index[:, None]

  def embedding_products(self, model: "ModelConfig") -> int:
    return 0


class Images:
  """Square images with three channels, cut into patches."""

  unit, coordinates, is_image = "images", 2, True

  def check(self, model: "ModelConfig") -> None:
    if model.image_size % model.patch_size:
      raise ConfigError(f"model.patch_size={model.patch_size} does not divide model.image_size={model.image_size}")

  def positions(self, model: "ModelConfig") -> int:
    return (model.image_size // model.patch_size) ** 2

  def units_per_example(self, model: "ModelConfig") -> int:
    return 1

  def shapes(self, model: "ModelConfig", ahead: int) -> Shapes:
    return {"image": ((model.image_size, model.image_size, 3), np.uint8)}

  def select(self, model: "ModelConfig", batch: dict[str, jax.Array]) -> jax.Array:
    return batch["image"]

  def prepare(self, x: jax.Array, sharding: Sharding) -> jax.Array:
    x = sharding.activation(x, "batch", None, None, None)
    return (x / 255.0 - jnp.array(MEAN)) / jnp.array(STD)

  def embedding(self, model: "ModelConfig") -> tuple[tuple[int, ...], Dims, float]:
    patch = self.embedding_products(model) // model.width
    return (patch, model.width), (None, "embed"), patch**-0.5

  def embed(self, model: "ModelConfig", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    return linear(patches(x, model.patch_size).astype(table.dtype), table)

  def place(self, model: "ModelConfig", index: jax.Array) -> jax.Array:
    side = model.image_size // model.patch_size
    return jnp.stack([index // side, index % side], axis=-1)

  def embedding_products(self, model: "ModelConfig") -> int:
    return model.patch_size**2 * 3 * model.width


def patches(images: jax.Array, size: int) -> jax.Array:
  """Images [B, S, S, C] → flattened patches [B, (S/size)², size² · C], row by row."""
  b, s, _, c = images.shape
  n = s // size
  x = images.reshape(b, n, size, n, size, c).swapaxes(2, 3)
  return x.reshape(b, n * n, size * size * c)


INPUTS: dict[str, Input] = {"tokens": Tokens(), "images": Images()}
