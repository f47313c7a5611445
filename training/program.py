"""The training state, the loss and the step, as pure functions that know nothing of devices.

Losses and gradients stay sums until the end: `gradient_sums` adds over examples, devices and microbatches, and
`apply_gradients` divides once, by the count. So padding, uneven batches and accumulation do not change the result.
Random numbers are keyed by step and example, so they are the same under every layout.

A runner (strategies/execution/runner.py) calls `loss_sums` and `gradient_sums`. A strategy
(strategies/execution/strategy.py) compiles them with `init` and `apply_gradients` for its mesh.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from errors import ConfigError, positive
from models.dimensions import UNSHARDED, Sharding, resized
from models.inputs import Field, Shapes
from models.keys import Purpose
from models.ops import routing
from models.ops.loss import BY_POSITION, Targets, buckets
from models.ops.loss import Sums as Sums
from models.ops.workarounds import in_order
from models.parameters import bind, frozen, init_params, joined, logical_dims, trained, used_dtypes
from models.sizes import ModelSizes
from models.transformer import positions_in
from training.optimizer import Optimizer
from training.optimizers import Rule
from training.optimizers.rounding import rounded_as, words_of_keys
from training.streaming import streamed

PADDING = 4  # pixels on each side, by which crops move

Params = dict[str, Any]  # nested; the leaves are arrays
Batch = dict[str, jax.Array]  # see `Program.example_shapes`
Metrics = dict[str, jax.Array]  # scalars; with experts also their `load` [depth, experts]
# (parameters, batch, step, sharding) → sums over the batch, and the gradient of the summed loss
GradientSums = Callable[[Params, Batch, Any, Any], tuple[Sums, Params]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a training step changes. Its tree and global shapes are the same under every strategy."""

  step: jax.Array  # int32: updates so far, including skipped ones
  params: Params
  opt_state: Any


@dataclasses.dataclass(frozen=True)
class Program:
  """A model, an optimizer, and the functions that train the model on batches."""

  sizes: ModelSizes
  optimizer: Optimizer
  seed: int
  accumulation: int
  augment: bool
  by_position: bool = False  # whether an evaluation also sums the loss by position

  def __post_init__(self) -> None:
    positive("accumulation", self.accumulation)
    if self.by_position and not self.sizes.predicts.causal:
      raise ConfigError(
        f"eval_by_position=True is for the next token, but model.objective={self.sizes.objective!r}; set it to False"
      )
    if self.sizes.lora and self.optimizer.name == "muon":
      raise ConfigError(
        f"optimizer.name='muon' is for whole weights, but model.lora_rank={self.sizes.lora.rank} trains adapters; use "
        "'adamw'"
      )

  def init(self, key: jax.Array) -> TrainState:
    """The state at step 0, with random weights from a seed's root key."""
    params = init_params(self.sizes, key)
    opt_state = self.rule.transform.init(self.trained(params))
    return TrainState(step=jnp.zeros((), jnp.int32), params=self.stored(params), opt_state=opt_state)

  @functools.cache  # noqa: B019 - equal programs share it, and there are few
  def abstract_state(self) -> TrainState:
    """The shapes and dtypes of the state that `init` returns."""
    state: TrainState = jax.eval_shape(self.init, jax.random.key(0))
    return state

  @property
  def rule(self) -> Rule:
    """The optimizer, for the weights of this model that are trained."""
    return self.optimizer.rule(self.trained(self.dims()), self.sizes.dtype)

  def trained(self, params: Params) -> Params:
    """The parameters that are trained, or the same part of a tree like the parameters (models/parameters.py)."""
    return trained(self.sizes, params)

  def frozen(self, params: Params) -> Params:
    """The parameters that are not trained; {} unless the model has adapters."""
    return frozen(self.sizes, params)

  def stored(self, params: Params) -> Params:
    """The parameters as a state stores them: those that are not trained in the dtype in which the model uses them."""
    cast = jax.tree.map(lambda w, dtype: w.astype(dtype), self.frozen(params), self.frozen(used_dtypes(self.sizes)))
    return joined(self.trained(params), cast)

  def dims(self) -> dict[str, Any]:
    """The logical dimensions of every parameter, in the same nested dicts as the parameters."""
    return logical_dims(self.sizes)

  def example_shapes(self) -> Shapes:
    """The fields of a batch: those of `ModelSizes.example_shapes`, `id` and `mask`.

    `id` is the example's number in its data set, which keys its random numbers: 64 bits as two words, the low one
    first. `mask` is false for padding.
    """
    return self.sizes.example_shapes() | {"id": Field((2,), np.uint32, 1 << 32), "mask": Field((), np.bool_, 2)}

  def mean(self, sums: Sums, grads: Params) -> tuple[Metrics, Params]:
    """The mean loss and its gradient from the sums."""
    divided = jax.tree.map(lambda g: g.astype(jnp.float32) / sums["count"], grads)
    return {"loss": sums["loss"] / sums["count"]}, divided

  def loss_sums(
    self, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED
  ) -> tuple[jax.Array, Sums]:
    """The loss summed over the batch's predictions, and all sums. `step` is None in evaluation."""
    model, targets = bind(self.sizes, params), self.targets(batch, sharding, step)
    inputs, segments = self.inputs(batch, step, sharding), self.segments(batch)
    keys, count = self.dropout_keys(batch, step), jnp.sum(targets.counted)
    if sharding.shards("batch") * sharding.shards("sequence") > 1:
      inputs = in_order(count, inputs)  # the only sum over devices that needs no result of the model
    loss, sums = model.loss_sums(inputs, targets, segments=segments, keys=keys, sharding=sharding)
    return loss, sums | {"count": count}

  def inputs(self, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED) -> jax.Array:
    """The model's input: tokens [B, T], or images [B, S, S, C], normalized and, in training, augmented."""
    x = self.sizes.reads.select(batch)
    if self.augment and step is not None:
      x = crop_and_flip(x, self._example_keys(batch["id"], step, Purpose.AUGMENTATION))
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
    return self._example_keys(batch["id"], step, Purpose.DROPOUT) if self.sizes.dropout and step is not None else None

  def no_sums(self, step: jax.Array | None) -> Sums:
    """The sums over an empty batch; `step` is None in evaluation."""
    sums = {"loss": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}
    sums |= {name: jnp.zeros((), dtype) for name, dtype in self.sizes.predicts.sums.items()}
    sums |= routing.no_sums(self.sizes)
    if self.by_position and step is None:
      room = len(buckets(self.sizes.positions))
      sums |= {f"{name}_by_position": jnp.zeros(room, sums[name].dtype) for name in BY_POSITION}
    return sums

  def gradient_sums(
    self,
    params: Params,
    batch: Batch,
    step: jax.Array,
    sharding: Sharding = UNSHARDED,
    of_part: GradientSums | None = None,
  ) -> tuple[Sums, Params]:
    """Sums over the batch, and the gradient of the summed loss in the parameters that are trained.

    Runs the `accumulation` parts one after another. Their sum is in float32, whatever the dtype of the weights: in
    bfloat16 it would stop where a part is less than half of its last bit.

    Args:
      of_part: does the same for one part; by default the compiler's gradient of `loss_sums`.
    """
    of_part = of_part or self.part_gradient_sums
    if self.accumulation == 1:
      return of_part(params, batch, step, sharding)

    def add(total: tuple[Sums, Params], part: Batch) -> tuple[tuple[Sums, Params], None]:
      return jax.tree.map(jnp.add, total, of_part(params, part, step, sharding)), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self.trained(params))
    return jax.lax.scan(add, (self.no_sums(step), zeros), split_batch(batch, self.accumulation, sharding))[0]

  def part_gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    """`gradient_sums` for one accumulation part."""
    others = self.frozen(params)
    loss = lambda params: self.loss_sums(joined(params, others), batch, step, sharding)
    grads, sums = jax.grad(loss, has_aux=True)(self.trained(params))
    return sums, grads

  @jax.named_scope("optimizer")
  def apply_gradients(
    self, state: TrainState, sums: Sums, grads: Params, sharding: Sharding = UNSHARDED
  ) -> tuple[TrainState, Metrics]:
    """Updates the state with the gradient of the summed loss. Skips the update if loss or gradient is not finite.

    The arithmetic is in float32. New weights that are stored in bfloat16 are rounded at random, as moments are.
    """
    mean, grads = self.mean(sums, grads)
    loss, norm = mean["loss"], optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    rate, key = self.optimizer.learning_rate_at(state.step), self._step_key(state.step, Purpose.ROUNDING)
    words: list[Params] = []
    if self.sizes.param_dtype == "bfloat16":
      words = [words_of_keys(self.trained(state.params), self._step_key(state.step, Purpose.WEIGHT_ROUNDING))]

    def update(params: Params, opt_state: Any, grads: Params, *words: Params) -> tuple[Params, Any]:
      exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
      changes, new_state = self.rule.transform.update(grads, opt_state, exact, key=key, sharding=sharding)
      new = jax.tree.map(lambda p, u: p - rate * u, exact, changes)
      new = jax.tree.map(rounded_as, params, new, *words) if words else new
      return jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new, new_state), (params, opt_state))

    if self.optimizer.on_host:
      update = functools.partial(streamed, update, pieces=sharding.shards("layers"))
    grads = self.optimizer.clipped(grads, norm)
    params, opt_state = update(self.trained(state.params), state.opt_state, grads, *words)
    params = joined(params, self.frozen(state.params))
    experts = self.sizes.experts
    if experts and experts.has_bias and not self.sizes.lora:
      params = balanced(params, jnp.where(finite, sums["load"], 0), experts.router_bias_rate)
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "skipped": ~finite}
    metrics |= {name: sums[summed] / sums["count"] for name, summed in self.sizes.predicts.measures.items()}
    if experts:
      metrics |= routing.metrics(sums, self.sizes)
    return TrainState(state.step + 1, params, opt_state), metrics

  def _step_key(self, step: jax.Array, purpose: Purpose) -> jax.Array:
    return jax.random.fold_in(purpose.key(jax.random.key(self.seed)), step)

  def _example_keys(self, ids: jax.Array, step: jax.Array, purpose: Purpose) -> jax.Array:
    """A key for each example [B], from its id [B, 2], the step and the purpose; the same on every device."""
    key = self._step_key(step, purpose)
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i[0]), i[1]))(ids)


def split_batch(batch: Batch, parts: int, sharding: Sharding) -> Batch:
  """Splits a batch [B, ...] into parts [A, B/A, ...]. A part takes every A-th row, so that no row changes device.

  Rows of zeros, whose `mask` is false, are added to each device's rows if the parts do not divide these.
  """
  devices = sharding.shards("batch")

  def rows(x: jax.Array) -> jax.Array:
    if more := -(x.shape[0] // devices) % parts:
      own = x.reshape(devices, -1, *x.shape[1:])
      x = resized(own, (devices, own.shape[1] + more, *x.shape[1:])).reshape(-1, *x.shape[1:])
    x = x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
    return sharding.activation(x, None, "batch", *(None,) * (x.ndim - 2))

  return jax.tree.map(rows, batch)


def crop_and_flip(images: jax.Array, keys: jax.Array) -> jax.Array:
  """Shifts each image [B, S, S, C] by up to 4 pixels, fills the border with black, and mirrors half of the images.

  `keys` [B] holds a key for each image.
  """

  def one(image: jax.Array, key: jax.Array) -> jax.Array:
    row, column, flip = jax.random.randint(key, (3,), 0, jnp.array([2 * PADDING + 1, 2 * PADDING + 1, 2]))
    padded = jnp.pad(image, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    crop = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
    return jnp.where(flip == 1, crop[:, ::-1], crop)

  return jax.vmap(one)(images, keys)


def balanced(params: Params, load: jax.Array, rate: float) -> Params:
  """The parameters with the biases of routers moved towards equal loads."""
  mlp = params["blocks"]["mlp"]
  bias = routing.balanced(mlp["bias"], load, rate)
  return params | {"blocks": params["blocks"] | {"mlp": mlp | {"bias": bias}}}
