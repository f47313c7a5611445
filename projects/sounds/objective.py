"""An objective of your own: a class, with one more measure."""

import jax
import jax.numpy as jnp

from models.dimensions import Sharding
from models.objectives import Class
from models.ops.loss import Sums, Targets, of_logits


class LikelyClass(Class):
  """Predicts one of `model.classes`, and also reports how often it is among the two likeliest."""

  measures, sums = {**Class.measures, "top_2": "top_2"}, {**Class.sums, "top_2": "int32"}

  def loss_sums(
    self, x: jax.Array, head: jax.Array, targets: Targets, sharding: Sharding, segments: jax.Array | None
  ) -> tuple[jax.Array, Sums]:
    logits = self.logits(x, head, sharding, segments)  # [B, classes]
    loss, sums = of_logits(logits, targets)
    likely = jax.lax.top_k(logits, 2)[1] == targets.values[:, None]
    return loss, sums | {"top_2": jnp.sum(targets.counted & likely.any(axis=1))}
