"""What a run reports while it trains: its measurements, journal, status, signs of life and profile, behind one door."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from reporting import summary, trackers
from reporting.account import sentence
from reporting.appender import extra, warn
from reporting.dead_experts import DeadExperts
from reporting.evaluation.bigram import Baseline
from reporting.heartbeat import Heartbeat
from reporting.journal import Journal
from reporting.metrics import PICTURE, Writer
from reporting.progress import Progress
from reporting.speed import Clock, Meter
from reporting.status import Status
from runtime import processes
from runtime.hardware import peak_flops
from runtime.profiling import Profiler
from strategies import Strategy
from training.loop import LoopState, StepPlan
from training.program import Program
from training.transformer import TransformerProgram


def meter_of(program: Program, batch_size: int, devices: Sequence[jax.Device], clock: Clock) -> Meter:
  """The meter of a program's steps. `devices`: the devices of all processes."""
  (unit, per_example), (flops, palm_flops) = program.traits.unit, program.flops()
  peak = peak_flops(devices[0], program.traits.dtype)
  return Meter(
    clock,
    items=batch_size * per_example,
    unit=unit,
    flops=batch_size * flops,
    palm_flops=batch_size * palm_flops,
    peak=peak and peak * len(devices),
  )


class Reporter:
  """Follows a run from its start to its end. Its `journal`, `writer` and `profiler` are context managers.

  Args:
    loop: the state of the loop with which the run begins.
    newest: the step of the newest checkpoint; 0: there is none.
  """

  def __init__(
    self, config: Any, workdir: Path, plan: StepPlan, strategy: Strategy, loop: LoopState, clock: Clock,
    heartbeat: Heartbeat, newest: Callable[[], int],
  ):  # fmt: skip
    used, program = list(strategy.mesh.devices.flat), strategy.program  # the devices of all processes
    self.clock, self.heartbeat, self.workdir, self.first = clock, heartbeat, workdir, loop.step
    others = trackers.trackers(config, workdir)
    self.writer = writer = Writer(workdir, loop, plan.last, enabled=jax.process_index() == 0, trackers=others)
    self.journal = journal = Journal(workdir, clock, writer.enabled, warn, heartbeat)
    self.say = writer.say
    dead_experts = DeadExperts(program.sizes) if isinstance(program, TransformerProgram) else None
    self.meter = meter_of(program, config.batch_size, used, clock)
    self.status = Status(workdir, writer, journal, newest)
    self.progress = Progress(clock, self.meter, writer, journal, plan, used, loop, heartbeat, self.status, dead_experts)
    self.profiler = Profiler(workdir, config.profile, loop.step, self.say, warn)
    self._pending: tuple[int, dict[str, jax.Array]] | None = None

  @property
  def loop(self) -> LoopState:
    """The state of the loop after the last step whose metrics were read."""
    return self.progress.loop

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Around the dispatch of a step. The first one is compiled."""
    doing = "compile" if step == self.first else self.progress.work(step + 1)
    with self.clock(doing), self.profiler.step(step):
      yield

  def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Takes the metrics of a step that is dispatched, and reads those of the step before, while devices work.

    Raises Diverged if too many updates in a row were not finite.
    """
    self.profiler.after(step, metrics)
    if step == self.first:
      self.meter.restart(step)
    self.catch_up()
    self._pending = step + 1, metrics

  def catch_up(self) -> None:
    """Waits for the last step and reads its metrics, unless they were read."""
    if self._pending:
      self.progress.read(*self._pending)
      self._pending = None

  def while_evaluating(self, stops: Callable[[], bool]) -> Callable[[], bool]:
    """`stops`, with a sign of life at each call: an evaluation may be long."""

    def asked() -> bool:
      self.heartbeat.alive()
      return stops()

    return asked

  def evaluated(self, step: int, values: dict[str, float], lines: Sequence[str]) -> None:
    """Writes the values of an evaluation, and the lines about its parts."""
    self.progress.loop = self.loop.after_evaluation(values["loss"])
    with self.clock("logging"):
      self.writer.write(step, "validation", values)
      for line in lines:
        self.say(line)
      self.status.evaluated(step, self.heartbeat.pace())
      self.writer.sync()

  def has_ended(self, step: int) -> bool:
    """Whether an earlier start has shown the end of the run, at this step. All processes must call it."""
    return bool(processes.on_process_zero(lambda: step in self.journal.ended))

  def why_ended(self) -> str:
    """Why the run has ended before its last step; "" if it has not."""
    loop, plan = self.loop, self.progress.plan
    if not plan.gives_up(loop) or loop.step >= plan.last:
      return ""
    lowest = "" if loop.lowest_loss is None else f" of {loop.lowest_loss:.4f}"
    return (
      f"the lowest validation loss{lowest} is {loop.since_lowest} evaluations old (stop.patience="
      f"{plan.patience}; a larger one goes on)"
    )

  def stopped(self, step: int, by: str, saved: bool) -> None:
    """Says that a request has ended the run after this step."""
    then = "the same command continues from there" if saved else "but this step is not saved"
    self.say(f"stopped   by {by} after step {step}; {then}")
    self.journal.add("stop", step, by=by)
    self.say(sentence(self.status.update(step)))

  def ended(self, step: int, sample: str | None, baseline: Baseline | None, lines: Sequence[str]) -> None:
    """Shows the sample, the losses and where the time went, after the last step."""
    if sample is not None:
      self.say("sample\n" + "\n".join(f"  | {line}" for line in sample.splitlines()))
    if self.writer.enabled:
      picture = self.workdir / PICTURE
      with self.clock("logging"), extra(str(picture)):
        run = self.journal.reader.load(self.journal.events)
        losses = {split: run.points(split, "loss") for split in run.lines}
        summary.plot_loss(picture, losses, baseline)
    self.journal.add("end", step, sample=sample, **({"why": why} if (why := self.why_ended()) else {}))
    self.say("\n".join([*lines, *summary.wall_time_lines(self.clock)]))
    self.say(self.status.write(step))
