"""The network, and how it is trained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from models.dimensions import Dims
from models.inputs import Field, Shapes
from training.augmentation import crop_and_flip
from training.module import ModuleProgram
from training.program import Batch
from training.settings import of_training


class Stage(nnx.Module):
  """Two convolutions, each normalized over the batch; then the image has half as many pixels along a side."""

  def __init__(self, channels: int, width: int, rngs: nnx.Rngs):
    self.first = nnx.Conv(channels, width, (3, 3), use_bias=False, rngs=rngs)
    self.first_norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
    self.second = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
    self.second_norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, S, C] → [B, S/2, S/2, W]
    x = jax.nn.relu(self.first_norm(self.first(x)))
    x = jax.nn.relu(self.second_norm(self.second(x)))
    return nnx.max_pool(x, (2, 2), strides=(2, 2))


class Net(nnx.Module):
  """Some stages, the mean over the pixels that are left, and a linear head."""

  def __init__(self, channels: int, widths: tuple[int, ...], classes: int, rngs: nnx.Rngs):
    self.stages = nnx.List([Stage(*sizes, rngs) for sizes in zip((channels, *widths), widths, strict=False)])
    self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, S, C] → logits [B, classes]
    for stage in self.stages:
      x = stage(x)
    return self.head(jnp.mean(x, axis=(1, 2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvNet(ModuleProgram):
  """Classifies images of `size` × `size` pixels, whose mean and standard deviation are given where white is 1."""

  size: int
  channels: int
  classes: int
  widths: tuple[int, ...]
  pixel_mean: tuple[float, ...]
  pixel_std: tuple[float, ...]
  augment: bool

  @classmethod
  def of(cls, config: ConfigDict, platform: str) -> "ConvNet":
    """The program of a config. The sizes of its section `model` are those of the data."""
    model = config.model
    sizes = {"size": model.image_size, "channels": model.channels, "classes": model.classes}
    pixels = {"pixel_mean": tuple(model.pixel_mean) or (0.0,), "pixel_std": tuple(model.pixel_std) or (1.0,)}
    widths, augment = tuple(config.own.widths), config.data.augment
    return cls(name=model.name, widths=widths, augment=augment, **sizes, **pixels, **of_training(config))

  measures_of_examples = ("accuracy",)

  def module(self, rngs: nnx.Rngs) -> Net:
    return Net(self.channels, self.widths, self.classes, rngs)

  def fields(self) -> Shapes:
    return {
      "image": Field((self.size, self.size, self.channels), np.uint8, 256),
      "label": Field((), np.int32, self.classes),
    }

  def losses(self, module: Any, batch: Batch, keys: jax.Array | None) -> dict[str, jax.Array]:
    images = batch["image"] if keys is None or not self.augment else crop_and_flip(batch["image"], keys)
    logits = module((images / 255.0 - jnp.array(self.pixel_mean)) / jnp.array(self.pixel_std))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": loss, "accuracy": jnp.argmax(logits, axis=-1) == batch["label"]}

  def dims_of(self, name: str, shape: tuple[int, ...]) -> Dims:
    """Tensor parallelism splits the channels between the two convolutions of a stage, FSDP the other ones."""
    stage, *rest = name.split("/")[-2:]
    if stage == "first_norm":
      return ("mlp",)
    if stage == "first" and rest == ["kernel"]:
      return (None, None, "embed" if shape[2] > 3 else None, "mlp")  # the colors are too few to split
    if stage == "second" and rest == ["kernel"]:
      return (None, None, "mlp", "embed")
    return ("embed", None) if name == "head/kernel" else (None,) * len(shape)
