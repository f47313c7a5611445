"""What a model predicts: the next token at every position, or for each example a class or some numbers.

The other choice that makes a model is in inputs.py. An objective knows its head, its targets, and whether a position
may attend to later ones. To add one, write a subclass of `Objective` and add it to `OBJECTIVES`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from errors import ConfigError
from models.dimensions import Dims, Sharding
from models.inputs import Field, Shapes, check_known
from models.ops import positions
from models.ops.layers import linear
from models.ops.loss import Sums, Targets, by_position, next_token, of_logits

if TYPE_CHECKING:
  from models.sizes import ModelSizes


class Objective(Protocol):
  """What a model of these sizes predicts.

  Attributes:
    causal: whether a position attends only to itself and earlier positions.
    ahead: how many tokens past the input the targets reach.
    measures: what is reported beside the loss: a name, and the sum that is divided by the count of predictions.
    sums: the dtypes of the sums beside loss and count.
    numbers: how many numbers of an example count as predictions. Not for causal objectives, where texts differ.
  """

  sizes: "ModelSizes"
  causal: bool
  ahead: int
  measures: Mapping[str, str] = {}
  sums: Mapping[str, str] = {"correct": "int32"}
  numbers: int = 1

  def __init__(self, sizes: "ModelSizes"):
    self.sizes = sizes

  def check(self) -> None:
    """Raises ConfigError if the model's input does not fit this objective."""

  def shapes(self) -> Shapes:
    """The fields of a batch that this objective reads, in addition to those of the input."""
    return {}

  def targets(self, batch: dict[str, jax.Array]) -> jax.Array:
    """The correct predictions for a batch: tokens [B, T], classes [B], or numbers [B, O]."""

  def counted(self, mask: jax.Array, segments: jax.Array | None, completions: jax.Array | None) -> jax.Array:
    """Whether each prediction counts, [B] or [B, T].

    Args:
      mask: [B], false where an example is padding.
      segments, completions: fields of the batch [B, T + ahead], or None (`ModelSizes.example_shapes`).
    """
    return mask

  def own(self, targets: Targets, sharding: Sharding) -> Targets:
    """The targets of a device's own positions, if devices share the positions of an example."""

  def predictions(self) -> int:
    """The number of predictions for an example."""

  def head(self) -> tuple[tuple[int, int], Dims]:
    """The shape and dimensions of the head's weight."""

  def head_dtype(self) -> str:
    """The dtype in which the head is gathered and used."""
    return self.sizes.dtype

  def logits(self, x: jax.Array, head: jax.Array, sharding: Sharding, segments: jax.Array | None) -> jax.Array:
    """Normalized activations [B, T, D], the head [D, V] and segments [B, T] → float32 logits [B, T, V] or [B, V]."""

  def loss_sums(
    self, x: jax.Array, head: jax.Array, targets: Targets, sharding: Sharding, segments: jax.Array | None
  ) -> tuple[jax.Array, Sums]:
    """The loss summed over the predictions of normalized activations [B, T, D], and all sums."""
    return of_logits(self.logits(x, head, sharding, segments), targets)


class NextToken(Objective):
  """Predicts the token after each position: a language model."""

  causal, ahead = True, 1

  def check(self) -> None:
    if self.sizes.inputs != "tokens":
      raise ConfigError(
        f"model.objective='next_token' needs tokens, but model.inputs={self.sizes.inputs!r}; use 'class'"
      )

  def targets(self, batch: dict[str, jax.Array]) -> jax.Array:
    return batch["tokens"][:, 1:]

  def counted(self, mask: jax.Array, segments: jax.Array | None, completions: jax.Array | None) -> jax.Array:
    if segments is None:
      return mask
    here, after = segments[:, :-1], segments[:, 1:]
    counted = mask[:, None] & (here == after) & (after > 0)  # the last token of a document predicts nothing
    return counted if completions is None else counted & completions[:, 1:]

  def own(self, targets: Targets, sharding: Sharding) -> Targets:
    return jax.tree.map(lambda x: positions.own(x, sharding), targets)

  def predictions(self) -> int:
    return self.sizes.positions

  def head(self) -> tuple[tuple[int, int], Dims]:
    return (self.sizes.width, self.sizes.vocab_size), ("embed", "vocab")

  def logits(self, x: jax.Array, head: jax.Array, sharding: Sharding, segments: jax.Array | None) -> jax.Array:
    logits = linear(sharding.whole_sequence(x), head, sharding).astype(jnp.float32)
    return sharding.activation(logits, "batch", None, "vocab")

  def loss_sums(
    self, x: jax.Array, head: jax.Array, targets: Targets, sharding: Sharding, segments: jax.Array | None
  ) -> tuple[jax.Array, Sums]:
    x = sharding.whole_sequence(x)
    score = lambda targets: next_token(x, head, targets, sharding, self.sizes.loss_chunk)
    return score(targets) if targets.position is None else by_position(score, targets, self.sizes.positions)


class OfExample(Objective):
  """Predicts something for each example, from the mean over its positions without padding."""

  causal, ahead = False, 0
  size: str  # the field of config.model that says how many columns the head has

  @property
  def columns(self) -> int:
    return int(getattr(self.sizes, self.size))

  def check(self) -> None:
    check_known(self.size, self.columns)
    if self.sizes.tied_embedding:
      raise ConfigError("model.tied_embedding=True needs model.objective='next_token'; set it to False")

  def own(self, targets: Targets, sharding: Sharding) -> Targets:
    """All devices that share an example compute its prediction. It counts on the first device only."""
    return targets._replace(counted=targets.counted & (sharding.index("positions") == 0))

  def predictions(self) -> int:
    return 1

  def head(self) -> tuple[tuple[int, int], Dims]:
    return (self.sizes.width, self.columns), ("embed", None)

  def head_dtype(self) -> str:
    return "float32"  # the product with a few columns is so small that full precision costs nothing

  def logits(self, x: jax.Array, head: jax.Array, sharding: Sharding, segments: jax.Array | None) -> jax.Array:
    summed = lambda x: sharding.across(jax.lax.psum, jnp.sum(x, axis=1, dtype=jnp.float32), "positions")
    if segments is None:
      return linear(summed(x) / (x.shape[1] * sharding.shards("positions")), head, sharding)
    # Pins all segments and a device's own. Otherwise compilers might split what attention reads, and gather it there.
    is_text = sharding.activation(segments, "batch", None)[..., None] > 0  # [B, T, 1]
    is_own_text = sharding.activation(positions.own(segments, sharding), "batch", "sequence")[..., None] > 0
    total = summed(jnp.where(is_own_text, x, 0))
    return linear(total / jnp.maximum(jnp.sum(is_text, axis=1), 1), head, sharding)  # an empty text has a mean of 0


class Class(OfExample):
  """Predicts one of `model.classes`."""

  measures, size = {"accuracy": "correct"}, "classes"

  def shapes(self) -> Shapes:
    return {"label": Field((), np.int32, self.sizes.classes)}

  def targets(self, batch: dict[str, jax.Array]) -> jax.Array:
    return batch["label"]


class Regression(OfExample):
  """Predicts `model.outputs` numbers. The loss is the mean of the squared errors of all of them."""

  measures, sums, size = {"mean_absolute_error": "absolute_error"}, {"absolute_error": "float32"}, "outputs"

  @property
  def numbers(self) -> int:  # type: ignore[override]
    return self.columns

  def shapes(self) -> Shapes:
    return {"target": Field((self.columns,), np.float32, None)}

  def targets(self, batch: dict[str, jax.Array]) -> jax.Array:
    return batch["target"]

  def loss_sums(
    self, x: jax.Array, head: jax.Array, targets: Targets, sharding: Sharding, segments: jax.Array | None
  ) -> tuple[jax.Array, Sums]:
    error = self.logits(x, head, sharding, segments) - targets.values  # [B, O]
    total = lambda x: jnp.sum(jnp.where(targets.counted, x, 0))
    loss = total(error**2)
    return loss, {"loss": loss, "absolute_error": total(jnp.abs(error)), "count": jnp.sum(targets.counted)}


OBJECTIVES: dict[str, type[Objective]] = {"next_token": NextToken, "class": Class, "regression": Regression}
