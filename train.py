"""Trains the one Transformer with a strategy, on text or images.

    python train.py --config=configs/fsdp.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE ...]

Reads top to bottom: set up the run, loop over the steps, finish. With the workdir of a run that ended early, the same
command continues from its newest checkpoint. configs/base.py documents every field.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from absl import flags

import data
import strategies
from checkpointing import pretrained, record, restore
from checkpointing.memory.tier import Tier
from checkpointing.save import NotSaved
from job.keeper import Keeper
from reporting import summary, trackers
from reporting.appender import extra, warn
from reporting.evaluation.evaluator import Evaluator
from reporting.heartbeat import Heartbeat
from reporting.metrics import NotWritten, last
from reporting.progress import Diverged
from reporting.reporter import Reporter
from reporting.speed import Clock, process_start
from runtime import command_line, device_memory, fitting, folders, processes
from runtime.devices import start_jax
from runtime.replicas import Corrupted
from runtime.storage.bucket import here, location
from runtime.storage.mirror import Mirror, NotSent
from training import settings
from training.loop import StepPlan
from training.program import TrainState

WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder for the results; default runs/STRATEGY-TIME. Or gs://... or s3://..."
)


def train(config: Any, workdir: Path | str | None, clock: Clock | None = None) -> dict[str, float]:
  """Trains as `config` says, writes the results into `workdir`, and returns the values of the last evaluation.

  The workdir may be a folder of a bucket (gs://... or s3://...). Then `Run.workdir` is where this machine works.
  SIGTERM and SIGINT end the run early, with a checkpoint. The run's time is counted from the beginning of `clock`.

  Raises:
    ConfigError: bad input, or another run has taken over the workdir in a bucket.
    Unavailable: what the run needs does not work now; another start may succeed.
    Corrupted: devices hold other bits of the same weights, and cannot be healed.
    Diverged: too many updates in a row were not finite.
    NotSaved: at the end, if a checkpoint could not be written on the way.
    NotSent: at the end, if the last results could not be copied to a bucket.
  """
  clock, config = clock or Clock(), pretrained.adopt(config)
  with clock("set-up"):
    devices = start_jax(config)
    named = lambda: str(location(str(workdir or folders.fresh(config.strategy)), "workdir"))
    results = location(processes.on_process_zero(named), "workdir")
    folder = here(results)
    fields = record.flat(config.to_dict())
    processes.require_equal({name: value for name, value in fields.items() if "distributed." not in name})
  heartbeat = Heartbeat(folder, jax.process_index(), clock, config.runtime.heartbeat)
  with folders.owned(results) as mirror, heartbeat:
    # During set-up a signal ends the process immediately. The next run continues an unfinished data preparation.
    run = set_up(config, folder, mirror, devices, clock, heartbeat)
    keeper, reporter = run.keeper, run.reporter
    # Contexts exit from right to left. The writer exits after the tier and the checkpoints: it can raise on process 0
    # alone, and they wait for all processes.
    fits = device_memory.in_words(run.config, devices)
    with fits, keeper.requests, reporter.journal, reporter.writer, keeper.tier, keeper.checkpoints, reporter.profiler:
      announce(run, devices)
      ended = loop(run)
      keeper.finish()
      return finish(run, ended)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that is set up: what the loop and the ending need."""

  config: Any
  workdir: Path
  plan: StepPlan
  start: restore.Start
  strategy: strategies.Strategy
  dataset: data.Dataset
  batches: data.Batches
  evaluator: Evaluator
  keeper: Keeper
  reporter: Reporter


@dataclasses.dataclass(frozen=True)
class Ended:
  """How the loop ended: `result` holds the values of its last evaluation, empty if it made none."""

  state: TrainState
  result: dict[str, float]
  step: int
  stopped: bool = False  # by a request


def set_up(
  config: Any, workdir: Path, mirror: Mirror | None, devices: list[jax.Device], clock: Clock, heartbeat: Heartbeat
) -> Run:
  """Checks the config, loads the data, and creates or restores the state."""
  platform = devices[0].platform
  with clock("set-up"), processes.raise_together():
    plan = StepPlan.of(config)
    settings.check(config, platform)  # all that needs no data, before data is prepared
    trackers.check(config)
    dataset = data.load(config)
    config = data.with_sizes(config, dataset.model)
    program = settings.program(config, platform)
    data.check(config, dataset, program.fields())
    strategy = strategies.create(config, program, devices)
    strategy.check_batch("batch_size", config.batch_size, config.accumulation)
    strategy.check_batch("eval_batch_size", config.eval_batch_size)
    summary.prompt(config, dataset, program)  # fails if the prompt of the sample at the end does not fit
  processes.require_equal({f"the content of {part.name!r}": part.fingerprint for part in dataset.parts})
  with clock("initial state"), device_memory.in_words(config, devices, state=True):
    results, now = mirror.remote if mirror else workdir, record.make(config, dataset, strategy)
    tier = Tier(config, workdir, warn)
    start = restore.begin(results, config.init_from, strategy, now, warn, tier)
  history = start.record["data"]
  mixture = data.mixture(dataset, history["first"], tuple(history["given"]), tuple(history["streams"]))
  keeper: Keeper  # made after the reporter, whose status shows the keeper's newest checkpoint
  newest = lambda: keeper.checkpoints.newest
  with clock("set-up"), processes.raise_together(), folders.written_into(workdir, "workdir"):
    reporter = Reporter(config, workdir, plan, strategy, start.loop, clock, heartbeat, newest)
    if reporter.writer.enabled:
      summary.write_config(workdir, config, dataset)
  with clock("set-up"):
    keeper = Keeper(config, workdir, mirror, plan, strategy, tier, reporter)
  batches, evaluator = data.Batches(mixture, config.batch_size, config.seed), Evaluator(strategy, dataset, config)
  return Run(config, workdir, plan, start, strategy, dataset, batches, evaluator, keeper, reporter)


def announce(run: Run, devices: list[jax.Device]) -> None:
  """Shows what is about to run."""
  strategy, start, wrote = run.strategy, run.start, run.start.record
  with run.reporter.clock("logging"):
    about = summary.about(devices, strategy.describe(run.config.strategy, run.config.batch_size), strategy, run.dataset)
    lines = *summary.start_lines(about), summary.parameter_table(strategy), *start.lines, *run.keeper.lines
    run.reporter.say("\n".join(lines))
  known = about | {"versions": wrote["versions"], "command": wrote["command"]}
  run.reporter.journal.add("start", start.loop.step, source=start.source, **known)


def loop(run: Run) -> Ended:
  """Runs the steps of the plan, from the start's step on."""
  plan, keeper, reporter, size = run.plan, run.keeper, run.reporter, run.config.batch_size
  first, rows, result = run.start.loop.step, run.strategy.rows(size), dict[str, float]()
  state = keeper.compared(run.start.state, first)
  # `evaluated` is False if the run was stopped before this evaluation, or begins from other parameters.
  if plan.evaluates(first) and not run.start.loop.evaluated:
    result = evaluate(run, state, first)
    if not result:
      return Ended(state, {}, first, stopped=True)
  if plan.gives_up(reporter.loop):
    return Ended(state, result, first)
  make = lambda step: run.strategy.shard(run.batches.read(step, rows), size)
  ahead, threads = run.config.data.read_ahead, run.config.data.threads
  with data.prefetch(make, range(first, plan.last), ahead, threads) as reader:
    for step in range(first, plan.last):
      with reporter.clock("data"):
        batch = next(reader)
      with reporter.step(step):
        state, metrics = run.strategy.train_step(state, batch)  # dispatched, not awaited
      reporter.after(step, metrics)
      due = keeper.due(step + 1)
      stopped = due.stop
      if due.needs_the_state:
        reporter.catch_up()
        state = keeper.keep(state, due, run.start.record, reporter.loop)
      if due.evaluate:
        values = evaluate(run, state, due.step)
        result, stopped = values or result, not values
      if due.save:
        keeper.requests.saved()  # after the evaluation, which changes nothing that is saved
        reporter.meter.restart(due.step)
      if stopped:
        return Ended(state, result, due.step, stopped=True)
      if due.evaluate and plan.gives_up(reporter.loop):
        return Ended(state, result, due.step)
  return Ended(state, result, plan.last)


def evaluate(run: Run, state: TrainState, step: int) -> dict[str, float]:
  """Loss and accuracy on the validation examples, written as the evaluation of `step`; {} if a request stopped it."""
  keeper, reporter = run.keeper, run.reporter
  with reporter.clock("eval"):
    values = run.evaluator(state, reporter.while_evaluating(keeper.stops))
  if not values:
    return {}
  values |= summary.epochs(run.dataset, run.batches, step)
  reporter.evaluated(step, values, summary.part_lines(run.dataset, values))
  keeper.evaluated(step, values["loss"])
  reporter.journal.add("evaluation", step)
  keeper.copy_soon()
  reporter.meter.restart(step)
  return values


def finish(run: Run, ended: Ended) -> dict[str, float]:
  """Shows how the run ended: the result, the baseline, a sample, and where the time went."""
  keeper, reporter, first = run.keeper, run.reporter, run.start.loop.step
  if ended.stopped:
    by, saved = keeper.requests.signal or "a signal", ended.step not in keeper.checkpoints.failed
    reporter.stopped(ended.step, by, saved)
    return ended.result
  result, why = ended.result, reporter.why_ended()
  if first >= ended.step and not result:
    evaluated = lambda: last(reporter.writer.path, "validation")
    result = processes.on_process_zero(evaluated) or evaluate(run, ended.state, first)
    if reporter.has_ended(first):
      reporter.say(f"finished  at step {first}: {why or f'all {run.plan.last} steps are done'}")
      reporter.journal.add("end", first)
      return result

  if why:
    reporter.say(f"finished  at step {ended.step} of {run.plan.last}: {why}")
  baseline = sample = None
  with extra("the baseline"):
    baseline = run.evaluator.baseline() if jax.process_index() == 0 else None
  if baseline and result.get("bits_per_byte") is not None:
    reporter.say(summary.baseline_line(baseline, result["bits_per_byte"]))
  with reporter.clock("sample"), extra("the sample", together=True):
    sample = summary.sample(run.config, run.strategy, run.dataset, ended.state)
  reporter.ended(ended.step, sample, baseline, [*filter(None, [keeper.tier.summary])])
  files = "report.html, metrics.jsonl, loss.png, tensorboard/, config.json, checkpoints/"
  reporter.say(f"results in {keeper.results}: {files}")
  return result


def main(config: Any, workdir: Path | str | None) -> None:
  """`train` as a program: a run that failed ends with a line on standard error, and a status (docs/cluster.md)."""
  try:
    train(config, workdir, Clock(process_start()))
  except device_memory.TooLittle as error:
    command_line.fail(error, command_line.BAD_INPUT, functools.partial(fitting.advice, error, config))
  except (Corrupted, Diverged, NotSaved, NotSent, NotWritten) as error:
    command_line.fail(error, status=command_line.DIVERGED if isinstance(error, Diverged) else command_line.FAILED)


if __name__ == "__main__":
  command_line.run(lambda config: main(config, WORKDIR.value))
