"""Keeps a run: when its state is compared and saved, what is asked of it, and when it ends.

All processes of a job decide the same after the same step. The order of what follows a step is written down here, once.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from checkpointing import reading, record
from checkpointing.memory.tier import Tier
from checkpointing.record import Record
from checkpointing.save import Checkpoints
from checkpointing.shipping import Shipping
from reporting.appender import warn
from reporting.reporter import Reporter
from reporting.save_interval import SaveInterval, first_minutes
from runtime import processes, signals
from runtime.replicas import Replicas
from runtime.storage.bucket import Location
from runtime.storage.mirror import Mirror
from strategies import Strategy
from training.loop import LoopState, StepPlan
from training.program import TrainState


@dataclasses.dataclass(frozen=True)
class Due:
  """What follows a step, in this order. A save in storage makes one in memory superfluous."""

  step: int
  compare: bool  # compare the copies of the state
  save_in_memory: bool
  save: bool
  evaluate: bool
  stop: bool

  @property
  def needs_the_state(self) -> bool:
    return self.compare or self.save_in_memory or self.save


class Keeper:
  """Everything that keeps the state of a run. All processes call its methods after the same steps.

  Its `requests`, `tier` and `checkpoints` are context managers, which train.py enters.

  Args:
    mirror: copies the workdir to a bucket; None: it stays on this machine.
    tier: the checkpoints in the hosts' memory. It has restored the state, if it could.
  """

  def __init__(
    self, config: Any, workdir: Path, mirror: Mirror | None, plan: StepPlan, strategy: Strategy, tier: Tier,
    reporter: Reporter,
  ):  # fmt: skip
    self.plan, self.mirror, self.tier, self.clock, self.writer = plan, mirror, tier, reporter.clock, reporter.writer
    say, journal = reporter.say, reporter.journal
    self.results: Location = mirror.remote if mirror else workdir
    saving, hosts = config.checkpoint, len(set(processes.hosts()))
    self.checkpoints = Checkpoints(
      workdir / reading.FOLDER, saving.keep, saving.keep_best, say, warn,
      Shipping(workdir, mirror) if mirror else None,
    )  # fmt: skip
    self.requests = signals.Requests(first_minutes(saving.minutes), mirror.lost if mirror else str)
    self.interval = SaveInterval(saving.minutes, hosts, self.requests, self.checkpoints, journal, say)
    arrays, note = record.named(strategy.abstract_state()), functools.partial(journal.add, "healed")
    self.replicas = Replicas(arrays, config.runtime.check_every, say, note)

  @property
  def lines(self) -> list[str]:
    """The lines that a run prints about its keeper at the start."""
    return [*self.tier.lines, *self.replicas.lines]

  def compared(self, state: TrainState, step: int) -> TrainState:
    """The state, healed if a copy had other bits than most copies. Raises Corrupted if it cannot be healed."""
    with self.clock("check"):
      return self.replicas.check(state, step)

  def due(self, step: int) -> Due:
    """What follows this step. Call it once after each step is dispatched.

    Raises JobConfigError if this run may no longer write its results.
    """
    self.checkpoints.check()
    self.interval.update()
    asked = self.requests.decide()
    save = self.plan.saves(step) or asked.save or asked.stop
    in_memory = self.plan.saves_in_memory(step) and not save
    evaluate = save and self.plan.evaluates(step) and not asked.stop
    return Due(step, self.replicas.due(step, save or in_memory), in_memory, save, evaluate, asked.stop)

  def keep(self, state: TrainState, due: Due, written: Record, loop: LoopState) -> TrainState:
    """Compares and saves what is due after a step whose metrics were read. Returns the state, healed if need be."""
    if due.compare:
      state = self.compared(state, due.step)
    if due.save_in_memory or due.save:
      with self.clock("checkpoint"):
        self.writer.sync()  # no checkpoint is newer than the lines of the steps before it
        (self.checkpoints if due.save else self.tier).save(state, written, loop)
    return state

  def evaluated(self, step: int, loss: float) -> None:
    """Notes the loss of a step beside its checkpoint, which the first step of a run does not have."""
    if step:
      with self.clock("checkpoint"):
        self.checkpoints.evaluated(step, loss)

  def stops(self) -> bool:
    """Whether a request ends the run now. Call it after each step of an evaluation is dispatched."""
    self.checkpoints.check()
    return self.requests.decide().stop

  def finish(self) -> None:
    """Waits for the last checkpoint."""
    with self.clock("checkpoint"):
      self.checkpoints.finish()

  def copy_soon(self) -> None:
    """Copies the workdir to its bucket, in the background."""
    if self.mirror:
      self.mirror.soon()
