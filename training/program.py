"""What is trained: the state, the loss and the step, as pure functions that know no device.

Losses and gradients travel as sums until the very end: `gradient_sums` adds up over examples, devices and
microbatches, and `apply_gradients` divides once by the count. So padding, uneven batches and accumulation change no
number. Random numbers are keyed by step and example, so no layout changes one either.

A strategy wraps `init`, `train_step`, `eval_step` and `gradients` for its mesh (strategies/base.py).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from errors import positive
from models.config import ModelConfig
from models.dimensions import UNSHARDED, Sharding
from models.generate import generate
from models.inputs import Shapes
from models.transformer import bind, init_params, logical_dims
from training.augment import crop_and_flip
from training.optimizer import Optimizer

_DROPOUT, _AUGMENT = 0, 1  # the two uses of an example's key at a step, kept apart

Params = dict[str, Any]  # nested; the leaves are arrays
Batch = dict[str, jax.Array]  # see `Program.example_shapes`
Metrics = dict[str, jax.Array]  # scalars
Sums = dict[str, jax.Array]  # "loss", "correct" and "count", summed over predictions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that changes in training. The tree and the global shapes are the same under every strategy."""

  step: jax.Array  # int32, updates tried so far
  params: Params
  opt_state: Any


@dataclasses.dataclass(frozen=True)
class Program:
  """A model, an optimizer, and how a batch becomes an update."""

  model: ModelConfig
  optimizer: Optimizer
  seed: int
  accumulation: int
  augment: bool

  def __post_init__(self) -> None:
    positive("accumulation", self.accumulation)

  def init(self, key: jax.Array) -> TrainState:
    params = init_params(self.model, key)
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=self.optimizer.transform.init(params))

  def dims(self) -> dict[str, Any]:
    """The logical dimensions of every parameter, in the tree of the parameters."""
    return logical_dims(self.model)

  def example_shapes(self) -> Shapes:
    """What a batch holds: for each field the shape of one example, and the dtype.

    `id` numbers the example in its data set and keys its random numbers: 64 bits as two words, the low one first.
    `mask` is false on padding.
    """
    objective = self.model.predicts
    content = self.model.reads.shapes(self.model, objective.ahead) | objective.shapes()
    return content | {"id": ((2,), np.uint32), "mask": ((), np.bool_)}

  def train_step(self, state: TrainState, batch: Batch, sharding: Sharding = UNSHARDED) -> tuple[TrainState, Metrics]:
    sums, grads = self.gradient_sums(state.params, batch, state.step, sharding)
    return self.apply_gradients(state, sums, grads)

  def eval_step(self, params: Params, batch: Batch, sharding: Sharding = UNSHARDED) -> Sums:
    return self.loss_sums(params, batch, None, sharding)[1]

  def gradients(self, state: TrainState, batch: Batch, sharding: Sharding = UNSHARDED) -> tuple[Metrics, Params]:
    """The mean loss and its gradient, before clipping."""
    return self.mean(*self.gradient_sums(state.params, batch, state.step, sharding))

  def mean(self, sums: Sums, grads: Params) -> tuple[Metrics, Params]:
    """The mean loss and its gradient from the sums."""
    return {"loss": sums["loss"] / sums["count"]}, jax.tree.map(lambda g: g / sums["count"], grads)

  def loss_sums(
    self, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED
  ) -> tuple[jax.Array, Sums]:
    """The loss summed over the batch's predictions, and all sums. Training if `step` is given, else evaluation."""
    model = bind(self.model, params)
    logits = model(self.inputs(batch, step, sharding), keys=self.dropout_keys(batch, step), sharding=sharding)
    return self.cross_entropy_sums(logits, self.targets(batch), batch["mask"])

  def generate(self, params: Params, prompt: jax.Array, *, sharding: Sharding = UNSHARDED, **options: Any) -> jax.Array:
    """Continues prompts [B, P]; see models/generate.py for the options."""
    return generate(self.model, params, prompt, sharding=sharding, **options)

  def inputs(self, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED) -> jax.Array:
    """What the model takes: tokens [B, T]; or images [B, S, S, 3], normalized and, in training, augmented."""
    x = self.model.reads.select(self.model, batch)
    if self.augment and step is not None:
      x = crop_and_flip(x, self._example_keys(batch["id"], step, _AUGMENT))
    return self.model.reads.prepare(x, sharding)

  def targets(self, batch: Batch) -> jax.Array:
    """What it should predict: tokens [B, T], each the one after the input at its place; or labels [B]."""
    return self.model.predicts.targets(batch)

  def dropout_keys(self, batch: Batch, step: jax.Array | None) -> jax.Array | None:
    """One key for each example [B]; None where nothing is dropped."""
    return self._example_keys(batch["id"], step, _DROPOUT) if self.model.dropout and step is not None else None

  def cross_entropy_sums(self, logits: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, Sums]:
    """Cross-entropy of logits [B, ..., V] against targets [B, ...], examples with mask [B] false left out.

    Only reductions over V, no lookup in it, so that logits split over the vocabulary stay where they are.
    """
    weight = jnp.broadcast_to(mask.reshape(-1, *(1,) * (targets.ndim - 1)), targets.shape)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    target_logit = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    loss = jnp.sum(jnp.where(weight, jax.nn.logsumexp(logits, axis=-1) - target_logit, 0))
    others = jnp.max(jnp.where(is_target, -jnp.inf, logits), axis=-1)
    correct = weight & (target_logit > others)  # a tie is no answer
    return loss, {"loss": loss, "correct": jnp.sum(correct), "count": jnp.sum(weight)}

  def gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    """Sums over the batch and the gradient of the summed loss, one of `accumulation` parts after the other."""
    if self.accumulation == 1:
      return self.microbatch_gradient_sums(params, batch, step, sharding)

    def add(total: tuple[Sums, Params], part: Batch) -> tuple[tuple[Sums, Params], None]:
      return jax.tree.map(jnp.add, total, self.microbatch_gradient_sums(params, part, step, sharding)), None

    start = (no_sums(), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, start, split(batch, self.accumulation, sharding))[0]

  def microbatch_gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    """The same for what is computed in one go; a strategy with a schedule of its own replaces this."""
    grads, sums = jax.grad(self.loss_sums, has_aux=True)(params, batch, step, sharding)
    return sums, grads

  def apply_gradients(self, state: TrainState, sums: Sums, grads: Params) -> tuple[TrainState, Metrics]:
    """The update from the gradient of the summed loss; none where the loss or the gradient is not finite."""
    grads = jax.tree.map(lambda g: g / sums["count"], grads)
    loss, norm = sums["loss"] / sums["count"], optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    rate = self.optimizer.learning_rate_at(state.step)
    updates, opt_state = self.optimizer.transform.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), state.params, updates)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "skipped": ~finite}
    if self.model.predicts.counts_correct:
      metrics["accuracy"] = sums["correct"] / sums["count"]
    return TrainState(state.step + 1, params, opt_state), metrics

  def _example_keys(self, ids: jax.Array, step: jax.Array, use: int) -> jax.Array:
    """One key for each example [B] and use, the same wherever it is computed; ids [B, 2]."""
    key = jax.random.fold_in(jax.random.key(self.seed), step)
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i[0]), 2 * i[1] + use))(ids)


def no_sums() -> Sums:
  """The sums over an empty batch."""
  return {"loss": jnp.zeros(()), "correct": jnp.zeros((), jnp.int32), "count": jnp.zeros((), jnp.int32)}


def split(batch: Batch, parts: int, sharding: Sharding) -> Batch:
  """A batch [B, ...] in parts [A, B/A, ...]. A part takes every A-th row, so that each device's rows stay on it."""

  def rows(x: jax.Array) -> jax.Array:
    x = x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
    return sharding.activation(x, None, "batch", *(None,) * (x.ndim - 2))

  return jax.tree.map(rows, batch)
