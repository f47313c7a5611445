"""A step to predict: a layout, a model and a batch.

Next: theory.py and predict.py, which predict what such a step sends, stores and costs.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from configs.base import get_config
from lab.analysis.weights import Weight, weights
from models import remat
from models.dimensions import Dims
from models.expert_sizes import ExpertSizes
from models.flops import palm_flops_per_example, train_flops_per_example
from models.sizes import ModelSizes
from strategies.execution.options import reduces_late
from strategies.execution.stages.schedule import Schedule
from strategies.execution.strategy import Strategy
from strategies.execution.transfers import Transfers
from strategies.layout import Layout
from training.optimizer import Optimizer

ADAMW = Optimizer(steps=1, **get_config().optimizer)


@dataclasses.dataclass(frozen=True)
class Case:
  """A step to predict.

  Attributes:
    layout: resolved.
    gather: the config's field. A pipeline gathers its weights once a step in any case.
    by_hand: whether gradients are summed by hand even if the batch runs as one part.
    schedule: that of a pipeline with several stages; None without one.
    compiler: a key of `compilers.COMPILERS`: the platform, "cpu", "gpu" or "tpu".
    optimizer: its name, the dtype of its moments and where they are count here.
    transfers: what moves between devices, which follows from the fields above.
  """

  layout: Layout
  sizes: ModelSizes
  batch_size: int
  accumulation: int = 1
  gather: str = "part"
  by_hand: bool = False
  schedule: Schedule | None = None
  compiler: str = "tpu"
  optimizer: Optimizer = ADAMW
  transfers: Transfers = dataclasses.field(init=False)

  def __post_init__(self) -> None:
    parts = self.accumulation * (self.schedule.microbatches if self.schedule else 1)
    by_hand = self.by_hand or (self.compiler == "gpu" and reduces_late(self.layout))
    transfers = Transfers.of(self.layout, parts=parts, gather=self.gather, by_hand=by_hand)
    object.__setattr__(self, "transfers", transfers)

  @staticmethod
  def of(strategy: Strategy, batch_size: int, platform: str) -> "Case":
    program, transfers = strategy.program, strategy.transfers
    return Case(
      strategy.layout,
      program.sizes,
      batch_size,
      program.accumulation,
      gather=transfers.gather,
      by_hand=bool(transfers.by_hand),
      schedule=strategy.schedule,
      compiler=platform if platform in ("cpu", "gpu") else "tpu",
      optimizer=program.optimizer,
    )

  @property
  def batch_parts(self) -> int:
    """The number of parts of the batch that run through the model one after another."""
    return self.transfers.parts

  @property
  def saved_names(self) -> frozenset[str]:
    """The named values of a block that the backward pass need not compute again (models/remat.py)."""
    return remat.saved_names(self.sizes.remat, self.sizes.saved)

  @property
  def saves_attended(self) -> bool:
    """Whether remat saves what the backward pass of a kernel, or of `blockwise`, reads of the forward pass."""
    return self.sizes.remat in ("minimal", "dots") or "attended" in self.saved_names

  @property
  def repeats(self) -> bool:
    """Whether the backward pass repeats the forward pass, except for what has a name and is saved."""
    return self.sizes.remat in ("full", "offload")

  @property
  def policy(self) -> str:
    """The remat policy whose fitted constants apply: what is offloaded is computed again as with "full"."""
    return "full" if self.repeats else self.sizes.remat

  @property
  def backward(self) -> float:
    """Time of a backward pass relative to a forward pass: 2, and 1 more if remat repeats the forward pass."""
    return 3.0 if self.repeats else 2.0

  @property
  def first(self) -> int:
    """The dense blocks of a mixture that only the first stage of a pipeline runs, before its own; else 0.

    Its backward unit runs their forward pass again (strategies/execution/stages/stage.py).
    """
    return self.sizes.first_layers if self.schedule else 0

  @property
  def layers(self) -> int:
    """The blocks of one device, without those of `first`; the last stage may have fewer."""
    return -(-(self.sizes.depth - self.first) // self.layout.shards("layers"))

  @property
  def mixtures(self) -> int:
    """Those of them that have experts."""
    return -(-self.sizes.mixtures // self.layout.shards("layers"))

  @functools.cached_property
  def of_state(self) -> Layout:
    """The layout of the optimizer's state."""
    return self.layout.stored_as("state")

  @property
  def splits(self) -> bool:
    """Whether a pipeline's weight units compute the gradients of weights."""
    return bool(self.schedule and self.schedule.splits)

  @property
  def idle(self) -> float:
    """The share of time in which a pipeline's stages wait; 0 without a pipeline."""
    return self.schedule.idle_time(self.backward) if self.schedule else 0.0

  @property
  def rows(self) -> int:
    """Rows of one part on one device, also those without an example, if devices do not divide the batch."""
    return -(-self.batch_size // (self.batch_parts * self.layout.shards("batch")))

  @property
  def examples(self) -> float:
    """The same, where devices share the positions of an example: each has a part of it."""
    return self.rows / self.sharers

  @property
  def tokens(self) -> float:
    """Positions of one part on one device."""
    return self.examples * self.sizes.positions

  @property
  def sharers(self) -> int:
    """The number of devices that share the positions of an example (models/ops/context.py)."""
    return self.layout.shards("positions")

  @property
  def experts(self) -> ExpertSizes:
    """Those of a mixture."""
    assert self.sizes.experts is not None
    return self.sizes.experts

  @property
  def model_flops(self) -> float:
    """One device's share of the FLOPs that a step needs (models/flops.py)."""
    return self.batch_size * train_flops_per_example(self.sizes) / self.layout.device_count

  @property
  def palm_flops(self) -> float:
    """One device's share of a step's FLOPs as PaLM counts them."""
    return self.batch_size * palm_flops_per_example(self.sizes) / self.layout.device_count

  @property
  def item(self) -> int:
    """Bytes of an element in the compute dtype."""
    return jnp.dtype(self.sizes.dtype).itemsize

  @property
  def pieces(self) -> tuple[int, int, int]:
    """The number of pieces that a block's values are split into, besides the batch: heads, MLP and positions."""
    return self.layout.shards("heads"), self.layout.shards("mlp"), self.layout.shards("sequence")

  @property
  def outputs(self) -> float:
    """The head's outputs for one prediction on one device. The vocabulary may be split, classes are not."""
    (_, outputs), dims = self.sizes.predicts.head()
    return -(-outputs // self.layout.shards("vocab")) if "vocab" in dims else outputs

  @property
  def logits(self) -> float:
    """Logits of one example on one device."""
    return self.sizes.predicts.predictions() * self.outputs

  def axes(self, dim: str) -> tuple[str, ...]:
    """The mesh axes that split a dimension (`Layout.axes`), outermost first."""
    return self.ordered(self.layout.axes(dim))

  def ordered(self, axes: Collection[str]) -> tuple[str, ...]:
    """Those of these mesh axes that have several devices, outermost first."""
    return tuple(axis for axis, size in self.layout.mesh.items() if axis in axes and size > 1)

  def devices(self, axes: tuple[str, ...]) -> int:
    """The number of devices along these mesh axes."""
    return math.prod(self.layout.mesh[axis] for axis in axes)

  def stored_item(self, weight: Weight) -> int:
    """Bytes of an element of a weight as it is stored."""
    return jnp.dtype(weight.stored).itemsize if weight.trained else self.item_of(weight)

  @property
  def sum_item(self) -> int:
    """Bytes of an element of the gradients that are kept until the update: in float32, if several parts are summed."""
    return 4 if self.batch_parts > 1 else jnp.dtype(self.sizes.param_dtype).itemsize

  def item_of(self, weight: Weight) -> int:
    """Bytes of an element of a weight as the model uses it, and of its gradient (`models.parameters.used_dtypes`)."""
    return jnp.dtype(weight.dtype).itemsize

  def sent_item(self, weight: Weight) -> int:
    """Bytes of an element of a block's weight when it is gathered for a part of the batch."""
    return 1 if weight.product and self.sizes.products != "dtype" else self.item_of(weight)

  def held(self, weight: Weight) -> float:
    """Elements of a weight that one device stores."""
    return self._held_and_used[weight][0]

  def used(self, weight: Weight) -> float:
    """Elements of a weight that one device computes with: gathered along `embed`."""
    return self._held_and_used[weight][1]

  @functools.cached_property
  def _held_and_used(self) -> dict[Weight, tuple[int, int]]:
    """Both for each weight, because predictions ask for them more than ten times."""
    held = {weight: piece_size(self.layout, weight.shape, weight.dims) for weight in weights(self.sizes)}
    shards = lambda dims: self.layout.shards_in(dims, "embed") if "embed" in dims else 1
    return {weight: (size, size * shards(weight.dims)) for weight, size in held.items()}

  def whole(self, weight: Weight) -> float:
    """The same without padding along `embed`."""
    return piece_size(self.layout.place(embed=None, gradients=None, state=None), weight.shape, weight.dims)

  def along(self, weight: Weight, axes: Collection[str]) -> tuple[str, ...]:
    """Those of these mesh axes along which pieces of a weight may lie, outermost first."""
    return tuple(axis for axis in self.ordered(axes) if "embed" in weight.dims and axis not in self.own_axes(weight))

  def own_axes(self, weight: Weight) -> tuple[str, ...]:
    """The mesh axes along which devices have other experts."""
    return self.axes("experts") if "experts" in weight.dims else ()

  def resident(self, weight: Weight) -> float:
    """Elements of a weight that one device keeps from one part of the batch to the next."""
    return self.held(weight) * self.devices(self.along(weight, self.transfers.gathered_once))

  def summed(self, weight: Weight) -> float:
    """Elements of a weight's gradient that one device keeps from one part of the batch to the next."""
    if self.transfers.by_hand:
      return self.resident(weight)
    return self.used(weight) / self.devices(self.along(weight, self.transfers.scattered_each_part))

  def updated(self, weight: Weight) -> float:
    """Elements of a weight that one device updates: as many as it stores of each moment of Adam."""
    return piece_size(self.of_state, weight.shape, weight.dims)


class Product(NamedTuple):
  """Matrix products of a step.

  Attributes:
    flops: FLOPs of one device for each position.
    dims: the dimensions besides `batch` and `layers` whose sharding splits the products.
    kind: "block": with weights of blocks; "pairs": of queries with keys, and of what they weigh; "": others.
  """

  flops: float
  dims: tuple[str, ...]
  kind: str = ""


def piece_size(layout: Layout, shape: Sequence[int], dims: Dims) -> int:
  """Elements of an array that one device stores under a layout, with padding (strategies/execution/padding.py)."""
  return math.prod(-(-n // layout.shards_in(dims, dim)) if dim else n for n, dim in zip(shape, dims, strict=True))


def ring_share(n: int) -> float:
  """The share of an array that a device sends or receives in a ring of n devices."""
  return (n - 1) / n
