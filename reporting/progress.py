"""Reads the metrics of each step, writes a line every `log_every` steps, and stops a run that has diverged."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from errors import JobError
from reporting.dead_experts import DeadExperts
from reporting.heartbeat import Heartbeat
from reporting.journal import Journal
from reporting.metrics import Writer
from reporting.speed import Clock, Meter
from reporting.status import Status
from runtime.hardware import memory_in_use
from training.loop import LoopState, StepPlan

EACH_STEP = ("skipped", "load")  # the metrics that are read after each step, because reading one takes a host 0.1 ms


class Diverged(JobError):
  """Too many updates in a row had a loss or gradient that was not finite."""


class Progress:
  """Follows the loop from step to step. `loop` is its state after the last step whose metrics were read."""

  def __init__(
    self, clock: Clock, meter: Meter, writer: Writer, journal: Journal, plan: StepPlan, devices: Sequence[jax.Device],
    loop: LoopState, heartbeat: Heartbeat, status: Status, experts: DeadExperts | None,
  ):  # fmt: skip
    self.clock, self.meter, self.writer, self.journal, self.plan = clock, meter, writer, journal, plan
    self.devices, self.loop, self.heartbeat, self.work = list(devices), loop, heartbeat, heartbeat.work
    self.status, self.experts = status, experts

  def read(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Waits for the metrics of `step`, and writes a line if one is due. Else reads only those that each step needs.

    Raises Diverged after `max_skipped` skipped updates in a row.
    """
    begin, has_line = time.perf_counter(), step % self.plan.log_every == 0 or step == self.plan.last
    with self.clock(self.work(step)):
      names = metrics if has_line else [name for name in EACH_STEP if name in metrics]
      found = {name: np.asarray(metrics[name]) for name in names}
    waited = time.perf_counter() - begin
    load, skipped = found.pop("load", None), bool(found.pop("skipped"))
    loop = self.loop.after(step, skipped=skipped)
    if load is not None and not skipped:
      self._look_for_dead_experts(step, load)
    with self.clock("logging"):
      self.writer.progress(step)
      if has_line:
        values = {name: float(value) for name, value in found.items()}
        if loop.skipped_since_line:
          values["skipped_updates"] = loop.skipped_since_line
        values |= self.meter.read(step) | memory_in_use(self.devices)
        self.writer.write(step, "train", values)
        self.status.update(step, values)
        loop = dataclasses.replace(loop, skipped_since_line=0)
    self.loop = loop
    self.heartbeat.after(step, waited)
    if loop.skipped_in_a_row >= self.plan.max_skipped:
      raise Diverged(
        f"the last {loop.skipped_in_a_row} updates, up to step {step}, had a loss or gradient that was not finite and "
        f"were not applied; lower optimizer.learning_rate={self.plan.learning_rate}, or raise optimizer.warmup"
      )

  def _look_for_dead_experts(self, step: int, load: np.ndarray) -> None:
    """Warns of experts that died in this step. That is no measurement: a resumed run counts from its start."""
    if self.experts and (sentences := self.experts.after(load)):
      for sentence in sentences:
        self.writer.say(f"warning   {sentence}")
      self.journal.add("dead_experts", step, why=". ".join(sentences))
