"""What becomes of a step's metrics: a line now and then, and a watch over updates that were thrown away."""

from collections.abc import Sequence

import jax

from training.hardware import memory_in_use
from training.metrics import Clock, Meter, Writer
from training.settings import Schedule


class Diverged(RuntimeError):
  """Too many updates in a row had a loss or gradient that was not finite."""


class Progress:
  """Reads the metrics of each step.

  Attributes:
    skipped: updates thrown away [in a row, since the last line]; a checkpoint keeps them, so that a run that goes on
      tells and decides the same.
  """

  def __init__(
    self, clock: Clock, meter: Meter, writer: Writer, schedule: Schedule, devices: Sequence[jax.Device], skipped: list
  ):
    self.clock, self.meter, self.writer, self.schedule, self.devices = clock, meter, writer, schedule, list(devices)
    self.skipped = list(skipped)

  def note(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Reads the metrics of `step`, which waits until it is done, and tells them if it is time to."""
    with self.clock("train"):
      values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    skipped = int(values.pop("skipped"))
    in_a_row, since_line = (self.skipped[0] + 1 if skipped else 0), self.skipped[1] + skipped
    with self.clock("logging"):
      self.writer.progress(step)
      if step % self.schedule.log_every == 0 or step == self.schedule.last:
        if since_line:
          values["skipped_updates"] = since_line
          since_line = 0
        self.writer.write(step, "train", values | self.meter.read(step) | memory_in_use(self.devices))
    self.skipped = [in_a_row, since_line]
    if in_a_row >= self.schedule.max_skipped:
      raise Diverged(
        f"the last {in_a_row} updates, up to step {step}, had a loss or gradient that was not finite and were not "
        f"applied; lower optimizer.learning_rate={self.schedule.learning_rate}, or raise optimizer.warmup"
      )
