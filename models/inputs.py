"""What goes into a model: tokens or images. The other choice that makes a model is in objectives.py.

An input knows which fields of a batch it reads, how it is embedded, and the coordinates of its positions. To add one,
write a class with the methods of `Input` and add it to `INPUTS`.
"""

import math
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
  """The interface of an input.

  Attributes:
    unit: the unit of throughput.
    coordinates: the number of coordinates of a position: 1 in a text, 2 (row and column) in an image.
    is_image: whether image augmentation applies.
  """

  unit: str
  coordinates: int
  is_image: bool

  def check(self, model: "ModelConfig") -> None:
    """Raises ConfigError if the model's sizes do not fit this input."""

  def positions(self, model: "ModelConfig") -> int:
    """The length T of the sequence that the blocks process."""

  def units_per_example(self, model: "ModelConfig") -> int:
    """How many of `unit` an example holds."""

  def shapes(self, model: "ModelConfig", ahead: int) -> Shapes:
    """The fields of a batch that this input reads. The targets reach `ahead` tokens past the input."""

  def select(self, model: "ModelConfig", batch: dict[str, jax.Array]) -> jax.Array:
    """Takes the input out of a batch: tokens [B, T], or images uint8 [B, S, S, 3]."""

  def prepare(self, x: jax.Array, sharding: Sharding) -> jax.Array:
    """Prepares the input for the model: tokens [B, T] as they are, images normalized to zero mean and unit variance."""

  def embedding(self, model: "ModelConfig") -> tuple[tuple[int, ...], Dims, float]:
    """The shape, dimensions and initial standard deviation of the embedding's weight."""

  def embed(self, model: "ModelConfig", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    """Embeds the prepared input → [B, T, D]."""

  def locate(self, model: "ModelConfig", index: jax.Array) -> jax.Array:
    """The coordinates [T, C] of the positions numbered `index` [T]."""

  def embedding_products(self, model: "ModelConfig") -> int:
    """How many weights multiply each position in the embedding; 0 for a lookup."""


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
    # Pinning the table also pins its gradient, so each device sums the gradient over its own examples. Otherwise the
    # compiler may send the activations' gradients to where the table is stored.
    return sharding.lookup(sharding.activation(table, "vocab", None), x)

  def locate(self, model: "ModelConfig", index: jax.Array) -> jax.Array:
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
    patch = model.patch_size**2 * 3
    return (patch, model.width), (None, "embed"), patch**-0.5

  def embed(self, model: "ModelConfig", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    return linear(patches(x, model.patch_size).astype(table.dtype), table)

  def locate(self, model: "ModelConfig", index: jax.Array) -> jax.Array:
    side = model.image_size // model.patch_size
    return jnp.stack([index // side, index % side], axis=-1)

  def embedding_products(self, model: "ModelConfig") -> int:
    return math.prod(self.embedding(model)[0])


def patches(images: jax.Array, size: int) -> jax.Array:
  """Images [B, S, S, C] → flattened patches [B, (S/size)², size² · C], row by row."""
  b, s, _, c = images.shape
  n = s // size
  x = images.reshape(b, n, size, n, size, c).swapaxes(2, 3)
  return x.reshape(b, n * n, size * size * c)


INPUTS: dict[str, Input] = {"tokens": Tokens(), "images": Images()}
