"""What goes into a model: tokens or images. The other choice that makes a model is in objectives.py.

An input knows which fields of a batch it reads, how it is embedded, and the coordinates of its positions. To add one,
write a class with the methods of `Input` and add it to `INPUTS`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from errors import ConfigError, positive
from models.dimensions import Dims, Sharding

if TYPE_CHECKING:
  from models.sizes import ModelSizes


class Field(NamedTuple):
  """A field of a batch, for one example. Its values are integers from 0 up to and without `below`."""

  shape: tuple[int, ...]
  dtype: Any
  below: int


Shapes = dict[str, Field]  # the fields of a batch by name


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

  def check(self, sizes: "ModelSizes") -> None:
    """Raises ConfigError if the model's sizes do not fit this input."""

  def positions(self, sizes: "ModelSizes") -> int:
    """The length T of the sequence that the blocks process."""

  def units_per_example(self, sizes: "ModelSizes") -> int:
    """How many of `unit` an example holds."""

  def shapes(self, sizes: "ModelSizes", ahead: int) -> Shapes:
    """The fields of a batch that this input reads. The targets reach `ahead` tokens past the input."""

  def select(self, sizes: "ModelSizes", batch: dict[str, jax.Array]) -> jax.Array:
    """Takes the input out of a batch: tokens [B, T], or images uint8 [B, S, S, C]."""

  def prepare(self, sizes: "ModelSizes", x: jax.Array, sharding: Sharding) -> jax.Array:
    """Prepares the input for the model: tokens [B, T] as they are, images normalized with the mean of the pixels."""

  def embedding(self, sizes: "ModelSizes") -> tuple[tuple[int, ...], Dims, float]:
    """The shape, dimensions and initial standard deviation of the embedding's weight."""

  def embed(self, sizes: "ModelSizes", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    """Embeds the prepared input → [B, T, D], the residual stream."""

  def locate(self, sizes: "ModelSizes", index: jax.Array) -> jax.Array:
    """The coordinates [..., C] of the positions numbered `index` [...]."""

  def embedding_products(self, sizes: "ModelSizes") -> int:
    """How many weights multiply each position in the embedding; 0 for a lookup."""


class Tokens:
  """Token ids [B, T]."""

  unit, coordinates, is_image = "tokens", 1, False

  def check(self, sizes: "ModelSizes") -> None:
    check_known("vocab_size", sizes.vocab_size)

  def positions(self, sizes: "ModelSizes") -> int:
    return sizes.seq_len

  def units_per_example(self, sizes: "ModelSizes") -> int:
    return sizes.seq_len

  def shapes(self, sizes: "ModelSizes", ahead: int) -> Shapes:
    return {"tokens": Field((sizes.seq_len + ahead,), np.int32, sizes.vocab_size)}

  def select(self, sizes: "ModelSizes", batch: dict[str, jax.Array]) -> jax.Array:
    return batch["tokens"][:, : sizes.seq_len]

  def prepare(self, sizes: "ModelSizes", x: jax.Array, sharding: Sharding) -> jax.Array:
    return x

  def embedding(self, sizes: "ModelSizes") -> tuple[tuple[int, ...], Dims, float]:
    return (sizes.vocab_size, sizes.width), ("vocab", "embed"), sizes.width**-0.5

  def embed(self, sizes: "ModelSizes", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    # Pinning the table also pins its gradient, so each device sums the gradient over its own examples. Otherwise the
    # compiler may send the activations' gradients to where the table is stored.
    return sharding.split_sequence(sharding.lookup(sharding.activation(table, "vocab", None), x))

  def locate(self, sizes: "ModelSizes", index: jax.Array) -> jax.Array:
    return index[..., None]

  def embedding_products(self, sizes: "ModelSizes") -> int:
    return 0


class Images:
  """Square images with any number of channels, cut into patches."""

  unit, coordinates, is_image = "images", 2, True

  def check(self, sizes: "ModelSizes") -> None:
    check_known("image_size", sizes.image_size)
    check_known("channels", sizes.channels)
    if sizes.image_size % sizes.patch_size:
      raise ConfigError(f"model.patch_size={sizes.patch_size} does not divide model.image_size={sizes.image_size}")
    for name, values in (("pixel_mean", sizes.pixel_mean), ("pixel_std", sizes.pixel_std)):
      if values and len(values) != sizes.channels:
        raise ConfigError(f"model.{name}={values} needs one number for each of model.channels={sizes.channels}, or ()")
    if not all(0 < std < math.inf for std in sizes.pixel_std) or not all(map(math.isfinite, sizes.pixel_mean)):
      raise ConfigError(
        f"model.pixel_mean={sizes.pixel_mean} and model.pixel_std={sizes.pixel_std} must be finite numbers, and the "
        "standard deviations above 0; use () for those of the data"
      )

  def positions(self, sizes: "ModelSizes") -> int:
    return (sizes.image_size // sizes.patch_size) ** 2

  def units_per_example(self, sizes: "ModelSizes") -> int:
    return 1

  def shapes(self, sizes: "ModelSizes", ahead: int) -> Shapes:
    return {"image": Field((sizes.image_size, sizes.image_size, sizes.channels), np.uint8, 256)}

  def select(self, sizes: "ModelSizes", batch: dict[str, jax.Array]) -> jax.Array:
    return batch["image"]

  def prepare(self, sizes: "ModelSizes", x: jax.Array, sharding: Sharding) -> jax.Array:
    x = sharding.activation(x, "batch", None, None, None)
    mean, std = sizes.pixel_mean or (0.0,) * sizes.channels, sizes.pixel_std or (1.0,) * sizes.channels
    return (x / 255.0 - jnp.array(mean)) / jnp.array(std)

  def embedding(self, sizes: "ModelSizes") -> tuple[tuple[int, ...], Dims, float]:
    patch = sizes.patch_size**2 * sizes.channels
    return (patch, sizes.width), (None, "embed"), patch**-0.5

  def embed(self, sizes: "ModelSizes", table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    # Each device embeds its own positions. So this is no `linear`, which would join batch and positions.
    return sharding.activation(patches(x, sizes.patch_size).astype(table.dtype) @ table, "batch", "sequence", None)

  def locate(self, sizes: "ModelSizes", index: jax.Array) -> jax.Array:
    side = sizes.image_size // sizes.patch_size
    return jnp.stack([index // side, index % side], axis=-1)

  def embedding_products(self, sizes: "ModelSizes") -> int:
    return math.prod(self.embedding(sizes)[0])


def check_known(name: str, value: int) -> None:
  """Raises ConfigError unless model.`name` is at least 1. By default some sizes are 0, and the data sets them."""
  if value == 0:
    raise ConfigError(f"model.{name}=0 stands for the value that fits the data, which is not read here; set it")
  positive(f"model.{name}", value)


def patches(images: jax.Array, size: int) -> jax.Array:
  """Images [B, S, S, C] → flattened patches [B, (S/size)², size² · C], row by row."""
  b, s, _, c = images.shape
  n = s // size
  x = images.reshape(b, n, size, n, size, c).swapaxes(2, 3)
  return x.reshape(b, n * n, size * size * c)


INPUTS: dict[str, Input] = {"tokens": Tokens(), "images": Images()}
