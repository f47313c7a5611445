"""A step to predict: a layout, a model and a batch.

Next: theory.py and predict.py, which predict what such a step sends, stores and costs.
"""

import dataclasses
import math
from collections.abc import Collection

import jax.numpy as jnp

from analysis.weights import Weight
from models import remat
from models.config import ModelConfig
from strategies.base import Strategy
from strategies.layout import Layout
from strategies.pipeline.table import Schedule
from training.optimizer import Optimizer

ADAMW = Optimizer(
  3e-4, warmup=0, steps=1, final_fraction=1.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=1.0
)


@dataclasses.dataclass(frozen=True)
class Case:
  """A step to predict.

  Attributes:
    layout: resolved.
    schedule: that of a pipeline with several stages; None without one.
    compiler: a key of `compilers.COMPILERS`: the platform, "cpu", "gpu" or "tpu".
    gathers_once: whether weights that `embed` splits are gathered, and their gradients scattered, once a step and not
      for each part of the batch. A pipeline always does so.
    sums_by_hand: whether gradients are summed over devices by hand even if the batch runs as one part.
    optimizer: its name, the dtype of its moments and where they are count here.
  """

  layout: Layout
  model: ModelConfig
  batch_size: int
  accumulation: int = 1
  schedule: Schedule | None = None
  compiler: str = "tpu"
  gathers_once: bool = False
  sums_by_hand: bool = False
  optimizer: Optimizer = ADAMW

  @staticmethod
  def of(strategy: Strategy, batch_size: int, platform: str) -> "Case":
    program = strategy.program
    return Case(
      strategy.layout,
      program.model,
      batch_size,
      program.accumulation,
      strategy.schedule,
      compiler=platform if platform in ("cpu", "gpu") else "tpu",
      gathers_once=strategy.gathers_once,
      sums_by_hand=bool(strategy.axes_by_hand),
      optimizer=program.optimizer,
    )

  @property
  def units(self) -> int:
    """The number of parts of the batch that run through the model one after another."""
    return self.accumulation * (self.schedule.microbatches if self.schedule else 1)

  @property
  def once(self) -> bool:
    """Whether weights are gathered, and their gradients scattered, once a step. Pipelines always do so."""
    return self.gathers_once or self.schedule is not None

  @property
  def by_hand(self) -> tuple[str, ...]:
    """The mesh axes over which gradients are summed by hand (strategies/sums.py)."""
    return self.layout.axes_by_hand(self.once) if self.sums_by_hand or self.units > 1 else ()

  @property
  def saved_names(self) -> frozenset[str]:
    """The named values of a block that the backward pass need not compute again (models/remat.py)."""
    return remat.kept(self.model.remat, self.model.saved)

  @property
  def repeats(self) -> bool:
    """Whether the backward pass repeats the forward pass, except for what has a name and is saved."""
    return self.model.remat in ("full", "offload")

  @property
  def policy(self) -> str:
    """The remat policy whose fitted constants apply: what is offloaded is computed again as with "full"."""
    return "full" if self.repeats else self.model.remat

  @property
  def backward(self) -> float:
    """Time of a backward pass relative to a forward pass: 2, and 1 more if remat repeats the forward pass."""
    return 3.0 if self.repeats else 2.0

  @property
  def idle(self) -> float:
    """The share of time in which a pipeline's stages wait; 0 without a pipeline."""
    return self.schedule.idle_time(self.backward) if self.schedule else 0.0

  @property
  def examples(self) -> float:
    """Examples of one part on one device."""
    return self.batch_size / self.units / self.layout.shards("batch")

  @property
  def item(self) -> int:
    """Bytes of an element in the compute dtype."""
    return jnp.dtype(self.model.dtype).itemsize

  @property
  def parts(self) -> tuple[int, int, int]:
    """The number of pieces that a block's values are split into, besides the batch: heads, MLP and positions."""
    return self.layout.shards("heads"), self.layout.shards("mlp"), self.layout.shards("sequence")

  @property
  def outputs(self) -> float:
    """The head's outputs for one prediction on one device. The vocabulary may be split, classes are not."""
    (_, outputs), dims = self.model.predicts.head(self.model)
    return outputs / (self.layout.shards("vocab") if "vocab" in dims else 1)

  @property
  def logits(self) -> float:
    """Logits of one example on one device."""
    return self.model.predicts.predictions(self.model) * self.outputs

  def axes(self, dim: str) -> tuple[str, ...]:
    """The mesh axes that split a dimension (`Layout.axes`), outermost first."""
    return self.ordered(self.layout.axes(dim))

  def ordered(self, axes: Collection[str]) -> tuple[str, ...]:
    """These mesh axes, outermost first."""
    return tuple(axis for axis in self.layout.mesh if axis in axes)

  def devices(self, axes: tuple[str, ...]) -> int:
    """The number of devices along these mesh axes."""
    return math.prod(self.layout.mesh[axis] for axis in axes)

  def stored_item(self, weight: Weight) -> int:
    """Bytes of an element of a weight as it is stored."""
    return jnp.dtype(self.model.param_dtype).itemsize if weight.trained else self.item_of(weight)

  def item_of(self, weight: Weight) -> int:
    """Bytes of an element of a weight as the model uses it, and of its gradient (`models.parameters.used_dtypes`)."""
    return jnp.dtype(weight.dtype).itemsize

  def held(self, weight: Weight) -> float:
    """Elements of a weight that one device stores."""
    return weight.size / math.prod(self.layout.shards(dim) for dim in weight.dims if dim)

  def used(self, weight: Weight) -> float:
    """Elements of a weight that one device computes with: gathered along `embed`."""
    return self.held(weight) * (self.layout.shards("embed") if "embed" in weight.dims else 1)

  def kept(self, weight: Weight) -> float:
    """Elements of a weight that one device keeps from one part of the batch to the next."""
    gathered = tuple(axis for axis in self.axes("embed") if axis in self.by_hand and self.once)
    return self.held(weight) * (self.devices(gathered) if "embed" in weight.dims else 1)

  def summed(self, weight: Weight) -> float:
    """Elements of a weight's gradient that one device keeps from one part of the batch to the next."""
    return self.kept(weight) if self.by_hand else self._pieces(weight, self.scattered)

  def updated(self, weight: Weight) -> float:
    """Elements of a weight that one device updates: as many as it stores of each moment of Adam."""
    return self._pieces(weight, self.axes("state"))

  @property
  def scattered(self) -> tuple[str, ...]:
    """The mesh axes along which the compiler scatters the gradients of a part; with a single part, for the update."""
    return self.axes("state" if self.units == 1 else "gradients")

  def _pieces(self, weight: Weight, axes: tuple[str, ...]) -> float:
    """Elements of a weight on one device if these mesh axes split `embed`."""
    return self.used(weight) / (self.devices(axes) if "embed" in weight.dims else 1)


def part(n: int) -> float:
  """The part of an array that a device sends or receives in a ring of n devices."""
  return (n - 1) / n
