"""A step to predict: a layout, a model and a batch; and the model's weights with the names of their dimensions.

Next: theory.py and predict.py, which say what such a step sends, keeps and costs.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from analysis.timeline import idle_time
from models.config import ModelConfig
from models.transformer import definition
from strategies.base import Strategy
from strategies.layout import Layout
from strategies.pipeline.schedule import Schedule


class Weight(NamedTuple):
  """A parameter of the model: its shape with all layers, and the names of its dimensions."""

  name: str
  shape: tuple[int, ...]
  dims: tuple[str | None, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def is_table(self) -> bool:
    """Whether rows of it are looked up, by token id."""
    return self.dims[0] == "vocab"

  @property
  def in_blocks(self) -> bool:
    return self.dims[0] == "layers"

  @property
  def is_matrix(self) -> bool:
    return any(axis not in (None, "layers") for axis in self.dims)


@dataclasses.dataclass(frozen=True)
class Case:
  """A step to predict. `layout` is resolved; `schedule` is that of a pipeline with more than one stage.

  `joins` is what a compiler for accelerators does and XLA's CPU backend does not: it sums gradients straight into their
  pieces, by reduce-scatter, and adds up cotangents that several products have of one value before it reduces them.
  """

  layout: Layout
  model: ModelConfig
  batch_size: int
  accumulation: int = 1
  schedule: Schedule | None = None
  joins: bool = True
  reduces_once: bool = False

  @staticmethod
  def of(strategy: Strategy, batch_size: int, platform: str) -> "Case":
    program = strategy.program
    return Case(
      strategy.layout,
      program.model,
      batch_size,
      program.accumulation,
      strategy.schedule,
      joins=platform != "cpu",
      reduces_once=strategy.reduces_once,
    )

  @property
  def units(self) -> int:
    """Parts that the batch goes through the model in, one after the other."""
    return self.accumulation * (self.schedule.microbatches if self.schedule else 1)

  @property
  def sums(self) -> int:
    """How often a step sums gradients over devices: for each part, or once where a strategy does it by hand."""
    return 1 if self.reduces_once else self.units

  @property
  def backward(self) -> float:
    """Time of a backward pass, a forward pass = 1: two products for each one, and with remat "full" that one again."""
    return 3.0 if self.model.remat == "full" else 2.0

  @property
  def idle(self) -> float:
    """The share of the time that a pipeline's stages wait; 0 where there are none."""
    return idle_time(self.schedule, self.backward) if self.schedule else 0.0

  @property
  def examples(self) -> float:
    """Of one part, on one device."""
    return self.batch_size / self.units / self.layout.shards("batch")

  @property
  def item(self) -> int:
    """Bytes of a number of the computation."""
    return jnp.dtype(self.model.dtype).itemsize

  def item_of(self, weight: Weight) -> int:
    """Bytes of an element of a weight as it travels: the head of a classifier is used in float32."""
    head = weight.name == "head"
    return jnp.dtype(self.model.predicts.head_dtype(self.model)).itemsize if head else self.item

  def held(self, weight: Weight) -> float:
    """Elements of a weight on one device."""
    return weight.size / math.prod(self.layout.shards(axis) for axis in weight.dims if axis)

  def used(self, weight: Weight) -> float:
    """The same as a device computes with it: gathered along `embed`."""
    return self.held(weight) * (self.layout.shards("embed") if "embed" in weight.dims else 1)


@functools.cache
def weights(model: ModelConfig) -> tuple[Weight, ...]:
  """The parameters, by name."""
  _, params = definition(model)
  flat = jax.tree.leaves_with_path(params, is_leaf=lambda x: hasattr(x, "dims"))
  found = []
  for path, param in flat:
    name = "/".join(str(key.key) for key in path if hasattr(key, "key"))
    stacked = ("layers",) if name.startswith("blocks/") else ()
    found.append(Weight(name, tuple(param.shape), (*stacked, *param.dims)))
  return tuple(found)
