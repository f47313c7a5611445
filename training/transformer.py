"""The program of the one Transformer: how a batch becomes input and targets, and what its step adds to any other's.

program.py has what all programs share. A pipeline (strategies/execution/stages/) runs the parts of this one apart.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from errors import ConfigError
from models.dimensions import UNSHARDED, Sharding
from models.flops import palm_flops_per_example, train_flops_per_example
from models.generate import Sampling, TextWriter
from models.inputs import Shapes
from models.keys import Purpose
from models.ops import routing
from models.ops.loss import BY_POSITION, Targets, buckets
from models.ops.workarounds import in_order
from models.parameters import bind, frozen, init_params, logical_dims, trained, used_dtypes
from models.side_inputs import positions_in
from models.sizes import ModelSizes
from training.augmentation import crop_and_flip
from training.program import Batch, Metrics, Params, Program, Sums, Traits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerProgram(Program):
  """The program of a Transformer.

  Attributes:
    sizes: the sizes of the model.
    augment: whether training images are cropped and flipped at random.
    by_position: whether an evaluation also sums the loss by position.
  """

  sizes: ModelSizes = dataclasses.field()  # type: ignore[assignment]
  augment: bool
  by_position: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.by_position and not self.sizes.predicts.causal:
      raise ConfigError(
        f"eval_by_position=True is for the next token, but model.objective={self.sizes.objective!r}; set it to False"
      )
    if self.sizes.lora and self.optimizer.name == "muon":
      raise ConfigError(
        f"optimizer.name='muon' is for whole weights, but model.lora_rank={self.sizes.lora.rank} trains adapters; use "
        "'adamw'"
      )

  @property
  def traits(self) -> Traits:
    sizes, predicts = self.sizes, self.sizes.predicts
    return Traits(
      name="transformer",
      positions=sizes.positions,
      width=sizes.width,
      dtype=sizes.dtype,
      param_dtype=sizes.param_dtype,
      unit=sizes.reads.unit(),
      measures=predicts.measures,
      numbers=predicts.numbers,
      causal=predicts.causal,
      is_image=sizes.reads.is_image,
      activations=("batch", "positions", "sequence"),
      stacks={stack.name: stack.dim for stack in sizes.stacks},
      products=sizes.products,
    )

  def init_params(self, key: jax.Array) -> Params:
    return init_params(self.sizes, key)

  def dims(self) -> dict[str, Any]:
    return logical_dims(self.sizes)

  def fields(self) -> Shapes:
    return self.sizes.example_shapes()

  def no_sums(self, step: jax.Array | None) -> Sums:
    sums = {"loss": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}
    sums |= {name: jnp.zeros((), dtype) for name, dtype in self.sizes.predicts.sums.items()}
    sums |= routing.no_sums(self.sizes)
    if self.by_position and step is None:
      room = len(buckets(self.sizes.positions))
      sums |= {f"{name}_by_position": jnp.zeros(room, sums[name].dtype) for name in BY_POSITION}
    return sums

  def loss_sums(
    self, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED
  ) -> tuple[jax.Array, Sums]:
    model, targets = bind(self.sizes, params), self.targets(batch, sharding, step)
    inputs, segments = self.inputs(batch, step, sharding), self.segments(batch)
    keys, count = self.dropout_keys(batch, step), jnp.sum(targets.counted)
    if sharding.shards("batch") * sharding.shards("sequence") > 1:
      inputs = in_order(count, inputs)  # the only sum over devices that needs no result of the model
    loss, sums = model.loss_sums(inputs, targets, segments=segments, keys=keys, sharding=sharding)
    return loss, sums | {"count": count}

  def flops(self) -> tuple[float, float]:
    return train_flops_per_example(self.sizes), palm_flops_per_example(self.sizes)

  def shardable(self) -> list[tuple[str, str, int]]:
    return self.sizes.shardable()

  def used_dtypes(self) -> Params:
    return used_dtypes(self.sizes)

  def trained(self, params: Params) -> Params:
    return trained(self.sizes, params)

  def frozen(self, params: Params) -> Params:
    return frozen(self.sizes, params)

  def of_base(self, params: Params) -> Params:
    return self.frozen(params)

  def changing(self, params: Params) -> Params:
    return self.trained(params)

  def updated(self, params: Params, sums: Sums, finite: jax.Array) -> Params:
    """The parameters with the biases of routers moved towards equal loads."""
    experts = self.sizes.experts
    if not experts or not experts.has_bias or self.sizes.lora:
      return params
    mlp = params["blocks"]["mlp"]
    bias = routing.balanced(mlp["bias"], jnp.where(finite, sums["load"], 0), experts.router_bias_rate)
    return params | {"blocks": params["blocks"] | {"mlp": mlp | {"bias": bias}}}

  def measured(self, sums: Sums) -> Metrics:
    return super().measured(sums) | (routing.metrics(sums, self.sizes) if self.sizes.experts else {})

  def with_sizes(self, change: Callable[[ModelSizes], ModelSizes]) -> "TransformerProgram":
    return dataclasses.replace(self, sizes=change(self.sizes))

  def ways(self, shards: Callable[[str], int]) -> list[str]:
    found, sizes = list[str](), self.sizes
    if shards("positions") > 1:
      way = f" by {sizes.attention_context}" if sizes.mixes.per_pair(sizes) else ""
      if not all(sizes.windowed):
        found.append(f"{sizes.mixer} reads other positions{way}")
        found[-1] += f", because {sizes.context_why}" if sizes.context_why else ""
      if any(sizes.windowed):
        found.append(f"{sizes.mixer} of local layers reads other positions by {sizes.local_way}")
    if shards("experts") > 1 and sizes.experts:
      found.append(f"tokens get to experts by {sizes.experts.transport}")
    return found

  def text_writer(self, params: Params, sampling: Sampling, sharding: Sharding) -> TextWriter:
    return TextWriter(bind(self.sizes, params), sampling, sharding)

  def inputs(self, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED) -> jax.Array:
    """The model's input: tokens [B, T], or images [B, S, S, C], normalized and, in training, augmented."""
    x = self.sizes.reads.select(batch)
    if self.augment and step is not None:
      x = crop_and_flip(x, self.example_keys(batch["id"], step, Purpose.AUGMENTATION))
    return self.sizes.reads.prepare(x, sharding)

  def targets(self, batch: Batch, sharding: Sharding = UNSHARDED, step: jax.Array | int | None = 0) -> Targets:
    """What is to be predicted: for each position the next token, or for each example a label.

    `step` is None in evaluation. Only an evaluation can sum losses by position.
    """
    values, position = self.sizes.predicts.targets(batch), None
    segments = batch["segments"] if self.sizes.segments else None
    if self.by_position and step is None:
      inputs = self.segments(batch)
      position = 1 + positions_in(jnp.ones_like(values) if inputs is None else inputs)
    completions = batch["completions"] if self.sizes.completions else None
    counted = self.sizes.predicts.counted(batch["mask"], segments, completions)
    counted = counted.reshape(*counted.shape, *(1,) * (values.ndim - counted.ndim))
    return self.sizes.predicts.own(Targets(values, jnp.broadcast_to(counted, values.shape), position), sharding)

  def segments(self, batch: Batch) -> jax.Array | None:
    """The segments of the input's tokens [B, T]; None if the model has no segments."""
    return batch["segments"][:, : self.sizes.positions] if self.sizes.segments else None

  def dropout_keys(self, batch: Batch, step: jax.Array | None) -> jax.Array | None:
    """A key for each example [B]; None if nothing is dropped."""
    return self.example_keys(batch["id"], step, Purpose.DROPOUT) if self.sizes.dropout and step is not None else None
