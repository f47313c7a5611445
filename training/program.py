"""The training state and the step, as pure functions that know nothing of devices, nor of any one model.

Losses and gradients stay sums until the end: `gradient_sums` adds over examples, devices and microbatches, and
`apply_gradients` divides once, by the count. So padding, uneven batches and accumulation do not change the result.
Random numbers are keyed by step and example, so they are the same under every layout.

A runner (strategies/execution/runner.py) calls `loss_sums` and `gradient_sums`. A strategy
(strategies/execution/strategy.py) compiles them with `init` and `apply_gradients` for its mesh. transformer.py has the
program of the one Transformer, module.py that of any flax module.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from errors import ConfigError, positive
from models.dimensions import UNSHARDED, Sharding, resized
from models.generate import Sampling, TextWriter
from models.inputs import Field, Shapes
from models.keys import Purpose
from models.ops.loss import Sums as Sums
from models.parameters import joined
from models.sizes import ModelSizes
from training.optimizer import Optimizer
from training.optimizers import Rule
from training.optimizers.rounding import rounded_as, words_of_keys
from training.streaming import streamed

Params = dict[str, Any]  # nested; the leaves are arrays
Batch = dict[str, jax.Array]  # see `Program.example_shapes`
Metrics = dict[str, jax.Array]  # scalars; with experts also their `load` [depth, experts]
STATISTICS = (
  "statistics"  # among the sums over a batch: the new values of a model's statistics, by the parameters' names
)
# (parameters, batch, step, sharding) → sums over the batch, and the gradient of the summed loss
GradientSums = Callable[[Params, Batch, Any, Any], tuple[Sums, Params]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a training step changes. Its tree and global shapes are the same under every strategy."""

  step: jax.Array  # int32: updates so far, including skipped ones
  params: Params
  opt_state: Any


class Traits(NamedTuple):
  """What is asked of a program's model.

  Attributes:
    name: `model.name`.
    positions: how many positions of an example devices can share; 1: none.
    width: the size of the dimension `embed`; 0: it differs between weights.
    dtype: the dtype of the computation.
    param_dtype: the dtype of the stored weights.
    unit: the unit of throughput, and how many units an example holds.
    measures: what is reported beside the loss: a name, and the sum that is divided by the count.
    numbers: how many numbers of an example count as predictions.
    causal: whether the model predicts the next token at each position.
    is_image: whether an example is an image.
    keeps_statistics: whether the model keeps statistics of its batches, in which each row counts.
    activations: the logical dimensions of activations, which layouts may split.
    stacks: the entries of the parameters whose arrays begin with a dimension of layers, and its name (`Stack.dim`).
    products: how the weights of blocks multiply, one of `models.sizes.PRODUCTS`.
  """

  name: str
  positions: int = 1
  width: int = 0
  dtype: str = "float32"
  param_dtype: str = "float32"
  unit: tuple[str, int] = ("examples", 1)
  measures: Mapping[str, str] = {}
  numbers: int = 1
  causal: bool = False
  is_image: bool = False
  keeps_statistics: bool = False
  activations: Collection[str] = ("batch",)
  stacks: Mapping[str, str] = {}
  products: str = "dtype"


class _NoSizes:
  """In place of the sizes of a Transformer, in programs of other models: whatever asks for them ends in a sentence."""

  def __get__(self, program: "Program | None", kind: type) -> ModelSizes:
    if program is None:
      raise AttributeError("sizes")
    raise ConfigError(
      f"model.name={program.traits.name!r} is not the Transformer, which this needs; use model.name='transformer'"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A model, an optimizer, and the functions that train the model on batches: what a strategy runs.

  `traits` and the methods that raise NotImplementedError say what the model is: a subclass has them. The others can be
  changed.
  """

  optimizer: Optimizer
  seed: int
  accumulation: int
  sizes = _NoSizes()  # those of the Transformer, in its program

  def __post_init__(self) -> None:
    positive("accumulation", self.accumulation)

  @property
  def traits(self) -> Traits:
    """What is asked of the model."""
    raise NotImplementedError

  def init_params(self, key: jax.Array) -> Params:
    """Random parameters from a seed's root key, the same under every layout."""
    raise NotImplementedError

  def dims(self) -> dict[str, Any]:
    """The logical dimensions of every parameter (models/dimensions.py), in the same nested dicts as the parameters."""
    raise NotImplementedError

  def fields(self) -> Shapes:
    """The fields of a batch that the model reads."""
    raise NotImplementedError

  def no_sums(self, step: jax.Array | None) -> Sums:
    """The sums over an empty batch; `step` is None in evaluation."""
    raise NotImplementedError

  def loss_sums(
    self, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED
  ) -> tuple[jax.Array, Sums]:
    """The loss summed over the batch's predictions, and all sums. `step` is None in evaluation."""
    raise NotImplementedError

  def flops(self) -> tuple[float, float]:
    """The FLOPs that training on an example needs, and these as PaLM counts them (models/flops.py)."""
    raise NotImplementedError

  def shardable(self) -> list[tuple[str, str, int]]:
    """Every size that a layout may split: (logical dimension, its name for error messages, size)."""
    raise NotImplementedError

  def used_dtypes(self) -> Params:
    """The dtype in which the model uses each parameter."""
    return jax.tree.map(lambda w: w.dtype.name, jax.eval_shape(lambda: self.init_params(jax.random.key(0))))

  def trained(self, params: Params) -> Params:
    """The parameters that are trained, or the same part of a tree like the parameters."""
    return params

  def frozen(self, params: Params) -> Params:
    """The parameters that are not trained, in the same form; {} if all are trained."""
    return {}

  def of_base(self, params: Params) -> Params:
    """The parameters of another model that this one adds to: no step changes them, and checkpoints leave them out."""
    return {}

  def changing(self, params: Params) -> Params:
    """All parameters but `of_base`, in the same form."""
    return params

  def averaged(self, state: TrainState) -> Params:
    """The parameters with the average of those that are trained, which the optimizer keeps (`optimizer.ema`)."""
    mean = jax.tree.map(lambda mean, w: mean.astype(w.dtype), state.opt_state.ema, self.trained(state.params))
    return joined(mean, self.frozen(state.params))

  def statistics(self, params: Params) -> Params:
    """The parameters that are statistics of batches (`Traits.keeps_statistics`). `sums` has the new ones."""
    return self.frozen(params) if self.traits.keeps_statistics else {}

  def with_statistics(self, params: Params, statistics: Params) -> Params:
    """The parameters with these statistics in place of their own."""
    return joined(self.trained(params), statistics) if statistics else params

  def updated(self, params: Params, sums: Sums, finite: jax.Array) -> Params:
    """The parameters after an update, with what changes without a gradient. Nothing may, unless `finite`."""
    return params

  def measured(self, sums: Sums) -> Metrics:
    """What a step reports beside loss, gradient and learning rate."""
    return {name: sums[summed] / sums["count"] for name, summed in self.traits.measures.items()}

  def with_sizes(self, change: Callable[[ModelSizes], ModelSizes]) -> Self:
    """The same program with other sizes of the Transformer; unchanged if it has none."""
    return self

  def ways(self, shards: Callable[[str], int]) -> list[str]:
    """In which ways the model reads what other devices have, in words; `shards`: the pieces of a dimension."""
    return []

  def text_writer(self, params: Params, sampling: Sampling, sharding: Sharding) -> TextWriter:
    """Writes texts with these parameters."""
    raise ConfigError(f"model.name={self.traits.name!r} writes no text; use model.name='transformer'")

  def init(self, key: jax.Array) -> TrainState:
    """The state at step 0, with random weights from a seed's root key."""
    params = self.init_params(key)
    opt_state = self.rule.transform.init(self.trained(params))
    return TrainState(step=jnp.zeros((), jnp.int32), params=self.stored(params), opt_state=opt_state)

  @functools.cache  # noqa: B019 - equal programs share it, and there are few
  def abstract_state(self) -> TrainState:
    """The shapes and dtypes of the state that `init` returns."""
    state: TrainState = jax.eval_shape(lambda: self.init(jax.random.key(0)))
    return state

  @property
  def rule(self) -> Rule:
    """The optimizer, for the weights of this model that are trained."""
    return self.optimizer.rule(self.trained(self.dims()), self.traits.dtype)

  def stored(self, params: Params) -> Params:
    """The parameters as a state stores them: those that are not trained in the dtype in which the model uses them."""
    cast = jax.tree.map(lambda w, dtype: w.astype(dtype), self.frozen(params), self.frozen(self.used_dtypes()))
    return joined(self.trained(params), cast)

  def example_shapes(self) -> Shapes:
    """The fields of a batch: those that the model reads, `id` and `mask`.

    `id` is the example's number in its data set, which keys its random numbers: 64 bits as two words, the low one
    first. `mask` is false for padding.
    """
    return self.fields() | {"id": Field((2,), np.uint32, 1 << 32), "mask": Field((), np.bool_, 2)}

  def mean(self, sums: Sums, grads: Params) -> tuple[Metrics, Params]:
    """The mean loss and its gradient from the sums."""
    divided = jax.tree.map(lambda g: g.astype(jnp.float32) / sums["count"], grads)
    return {"loss": sums["loss"] / sums["count"]}, divided

  def gradient_sums(
    self,
    params: Params,
    batch: Batch,
    step: jax.Array,
    sharding: Sharding = UNSHARDED,
    of_part: GradientSums | None = None,
  ) -> tuple[Sums, Params]:
    """Sums over the batch, and the gradient of the summed loss in the parameters that are trained.

    Runs the `accumulation` parts one after another, each with the statistics that the part before has left. Their sum
    is in float32, whatever the dtype of the weights: in bfloat16 it would stop where a part is less than half of its
    last bit.

    Args:
      of_part: does the same for one part; by default the compiler's gradient of `loss_sums`.
    """
    of_part = of_part or self.part_gradient_sums
    if self.accumulation == 1:
      return of_part(params, batch, step, sharding)

    def add(carry: tuple[Params, tuple[Sums, Params]], part: Batch) -> tuple[Any, None]:
      statistics, total = carry
      sums, gradients = of_part(self.with_statistics(params, statistics), part, step, sharding)
      left: Any = sums.pop(STATISTICS, {})
      return (left, jax.tree.map(jnp.add, total, (sums, gradients))), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), self.trained(params))
    start = self.statistics(params), (self.no_sums(step), zeros)
    (statistics, (sums, gradients)), _ = jax.lax.scan(add, start, split_batch(batch, self.accumulation, sharding))
    whole: dict[str, Any] = {**sums} | ({STATISTICS: statistics} if statistics else {})
    return whole, gradients

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
    if self.traits.param_dtype == "bfloat16":
      weight_key = self._step_key(state.step, Purpose.WEIGHT_ROUNDING)
      words = [words_of_keys(self.trained(state.params), weight_key, self.traits.stacks)]

    def update(params: Params, opt_state: Any, grads: Params, *words: Params) -> tuple[Params, Any]:
      exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
      more = {"rate": rate, "step": state.step} if self.optimizer.ema else {}
      changes, new_state = self.rule.transform.update(grads, opt_state, exact, key=key, sharding=sharding, **more)
      new = jax.tree.map(lambda p, u: p - rate * u, exact, changes)
      new = jax.tree.map(rounded_as, params, new, *words) if words else new
      return jax.tree.map(lambda new, old: jnp.where(finite, new, old), (new, new_state), (params, opt_state))

    if self.optimizer.on_host:
      pieces = {name: sharding.shards(dim) for name, dim in self.traits.stacks.items()}
      update = functools.partial(streamed, update, pieces)
    grads = self.optimizer.clipped(grads, norm)
    params, opt_state = update(self.trained(state.params), state.opt_state, grads, *words)
    params = joined(params, self.frozen(state.params))
    params = self.updated(params, sums, finite)
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "skipped": ~finite} | self.measured(sums)
    return TrainState(state.step + 1, params, opt_state), metrics

  def _step_key(self, step: jax.Array, purpose: Purpose) -> jax.Array:
    return jax.random.fold_in(purpose.key(jax.random.key(self.seed)), step)

  def example_keys(self, ids: jax.Array, step: jax.Array, purpose: Purpose) -> jax.Array:
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
