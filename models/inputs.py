"""What goes into a model: tokens, images, or features of any numbers. objectives.py is the other choice of a model.

An input knows which fields of a batch it reads, how it is embedded, and the coordinates of its positions. To add one,
write a subclass of `Input` and add it to `INPUTS`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from errors import ConfigError, positive
from models.dimensions import Dims, Sharding
from models.ops.lookup import lookup, summed_in_float32
from models.ops.positions import own

if TYPE_CHECKING:
  from models.sizes import ModelSizes


class Field(NamedTuple):
  """A field of a batch, for one example.

  Its values are integers from 0 up to and without `below`; with None, any finite numbers.
  """

  shape: tuple[int, ...]
  dtype: Any
  below: int | None


Shapes = dict[str, Field]  # the fields of a batch by name


class Input(Protocol):
  """What goes into a model of these sizes.

  Attributes:
    coordinates: the number of coordinates of a position: 1 in a text, 2 (row and column) in an image.
    is_image: whether image augmentation applies.
  """

  sizes: "ModelSizes"
  coordinates: int = 1
  is_image: bool = False

  def __init__(self, sizes: "ModelSizes"):
    self.sizes = sizes

  def check(self) -> None:
    """Raises ConfigError if the model's sizes do not fit this input."""

  def positions(self) -> int:
    """The length T of the sequence that the blocks process."""
    return self.sizes.seq_len

  def unit(self) -> tuple[str, int]:
    """The unit of throughput ("tokens", "images" or "examples"), and how many units an example holds."""

  def shapes(self, ahead: int) -> Shapes:
    """The fields of a batch that this input reads. The targets reach `ahead` tokens past the input."""

  def select(self, batch: dict[str, jax.Array]) -> jax.Array:
    """Takes the input out of a batch: tokens [B, T], images uint8 [B, S, S, C], or features [B, T, F]."""

  def prepare(self, x: jax.Array, sharding: Sharding) -> jax.Array:
    """Prepares the input for the model: tokens [B, T] as they are, images normalized with the mean of the pixels."""
    return x

  def embedding(self) -> tuple[tuple[int, ...], Dims, float]:
    """The shape, dimensions and initial standard deviation of the embedding's weight."""

  def embed(self, table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    """Embeds the prepared input → [B, T, D], the residual stream."""

  def locate(self, index: jax.Array) -> jax.Array:
    """The coordinates [..., C] of the positions numbered `index` [...]."""
    return index[..., None]

  def embedding_products(self) -> int:
    """How many weights multiply each position in the embedding; 0 for a lookup."""
    return 0


class Tokens(Input):
  """Token ids [B, T]."""

  def check(self) -> None:
    check_known("vocab_size", self.sizes.vocab_size)

  def unit(self) -> tuple[str, int]:
    return "tokens", self.sizes.seq_len

  def shapes(self, ahead: int) -> Shapes:
    return {"tokens": Field((self.sizes.seq_len + ahead,), np.int32, self.sizes.vocab_size)}

  def select(self, batch: dict[str, jax.Array]) -> jax.Array:
    return batch["tokens"][:, : self.sizes.seq_len]

  def embedding(self) -> tuple[tuple[int, ...], Dims, float]:
    return (self.sizes.vocab_size, self.sizes.width), ("vocab", "embed"), self.sizes.width**-0.5

  def embed(self, table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    # Pinning the table also pins its gradient, so each device sums the gradient over its own examples. Otherwise the
    # compiler may send the activations' gradients to where the table is stored.
    # Pinned once more: otherwise an all-to-all moves the gradients of activations to where the table is stored.
    table, x = sharding.activation(table, "vocab", None), own(x, sharding)
    rows_of = summed_in_float32 if table.dtype == "bfloat16" else lookup
    found = sharding.split_sequence(rows_of(table, x, sharding))
    scale = self.sizes.embedding_scale
    return found if scale == 1 else (found * scale).astype(found.dtype)


class Vectors(Input):
  """Vectors [B, T, F], each times the embedding [F, D]."""

  @property
  def columns(self) -> int:
    """The length F of a vector."""
    raise NotImplementedError

  def vectors(self, x: jax.Array) -> jax.Array:
    """The vectors of a prepared input."""
    return x

  def embedding(self) -> tuple[tuple[int, ...], Dims, float]:
    return (self.columns, self.sizes.width), (None, "embed"), self.columns**-0.5

  def embed(self, table: jax.Array, x: jax.Array, sharding: Sharding) -> jax.Array:
    # Each device embeds its own positions. So this is not a `linear`, which would join batch and positions.
    flat = own(self.vectors(x), sharding).astype(table.dtype)
    return sharding.activation(flat @ table, "batch", "sequence", None)

  def embedding_products(self) -> int:
    return self.columns * self.sizes.width


@dataclasses.dataclass(frozen=True)
class ImageSizes:
  """The sizes of images, which `ModelSizes.images` holds. `configs/base.py` documents each field."""

  image_size: int
  channels: int
  patch_size: int
  pixel_mean: tuple[float, ...]
  pixel_std: tuple[float, ...]

  @staticmethod
  def of(model: Mapping[str, Any]) -> "ImageSizes | None":
    """The image sizes in a config's section `model`; None if the model reads no images."""
    positive("model.patch_size", model["patch_size"])
    if model["inputs"] != "images":
      return None
    fields = {field.name: model[field.name] for field in dataclasses.fields(ImageSizes)}
    fields |= {name: tuple(model[name]) for name in ("pixel_mean", "pixel_std")}  # JSON makes lists of them
    return ImageSizes(**fields)

  def check(self) -> None:
    """Raises ConfigError unless the data has set the sizes, and they fit each other."""
    check_known("image_size", self.image_size)
    check_known("channels", self.channels)
    if self.image_size % self.patch_size:
      raise ConfigError(f"model.patch_size={self.patch_size} does not divide model.image_size={self.image_size}")
    for name, values in (("pixel_mean", self.pixel_mean), ("pixel_std", self.pixel_std)):
      if values and len(values) != self.channels:
        raise ConfigError(f"model.{name}={values} needs one number for each of model.channels={self.channels}, or ()")
    if not all(0 < std < math.inf for std in self.pixel_std) or not all(map(math.isfinite, self.pixel_mean)):
      raise ConfigError(
        f"model.pixel_mean={self.pixel_mean} and model.pixel_std={self.pixel_std} must be finite numbers, and the "
        "standard deviations above 0; use () for those of the data"
      )


class Images(Vectors):
  """Square images with any number of channels, cut into patches."""

  coordinates, is_image = 2, True

  def check(self) -> None:
    self.images.check()

  @property
  def images(self) -> ImageSizes:
    assert self.sizes.images is not None
    return self.sizes.images

  @property
  def side(self) -> int:
    """The number of patches along a side."""
    return self.images.image_size // self.images.patch_size

  def positions(self) -> int:
    return self.side**2

  def unit(self) -> tuple[str, int]:
    return "images", 1

  def shapes(self, ahead: int) -> Shapes:
    return {"image": Field((self.images.image_size, self.images.image_size, self.images.channels), np.uint8, 256)}

  def select(self, batch: dict[str, jax.Array]) -> jax.Array:
    return batch["image"]

  def prepare(self, x: jax.Array, sharding: Sharding) -> jax.Array:
    x, channels = sharding.activation(x, "batch", None, None, None), self.images.channels
    mean, std = self.images.pixel_mean or (0.0,) * channels, self.images.pixel_std or (1.0,) * channels
    return (x / 255.0 - jnp.array(mean)) / jnp.array(std)

  @property
  def columns(self) -> int:
    return self.images.patch_size**2 * self.images.channels

  def vectors(self, x: jax.Array) -> jax.Array:
    return patches(x, self.images.patch_size)

  def locate(self, index: jax.Array) -> jax.Array:
    return jnp.stack([index // self.side, index % self.side], axis=-1)


class Features(Vectors):
  """Sequences of vectors of any numbers, such as the spectra of a sound: [B, T, F] in float32, as they are."""

  def check(self) -> None:
    check_known("features", self.sizes.features)

  @property
  def columns(self) -> int:
    return self.sizes.features

  def unit(self) -> tuple[str, int]:
    return "examples", 1

  def shapes(self, ahead: int) -> Shapes:
    return {"features": Field((self.sizes.seq_len, self.sizes.features), np.float32, None)}

  def select(self, batch: dict[str, jax.Array]) -> jax.Array:
    return batch["features"]


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


INPUTS: dict[str, type[Input]] = {"tokens": Tokens, "images": Images, "features": Features}
