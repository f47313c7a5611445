"""Automatic: leaves all communication to the compiler, which inserts the collectives that the layout needs.

So a gradient is summed over devices as soon as it exists: once for each part of a batch, and while the backward pass
goes on.
"""

import jax

from strategies.execution.runner import Runner
from training.program import Batch, Params, Sums


class Automatic(Runner):
  """Runs the program as it is: the layout says where each array is."""

  def gradient_sums(self, params: Params, batch: Batch, step: jax.Array) -> tuple[Sums, Params]:
    return self.program.gradient_sums(params, batch, step, self.sharding)

  def eval_sums(self, params: Params, batch: Batch) -> Sums:
    return self.program.loss_sums(params, batch, None, self.sharding)[1]
