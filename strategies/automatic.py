"""Automatic: one program for all devices, in which the compiler inserts the collectives that the layout needs.

The compiler sums a gradient over devices as soon as it exists. So it sums once for each part of a batch, and while the
backward pass goes on. by_hand.py is for batches of several parts whose sums can wait.
"""

import jax

from strategies.runner import Runner
from training.program import Batch, Params, Sums


class Automatic(Runner):
  """Leaves all communication to the compiler."""

  def gradient_sums(self, params: Params, batch: Batch, step: jax.Array) -> tuple[Sums, Params]:
    return self.program.gradient_sums(params, batch, step, self.sharding)
