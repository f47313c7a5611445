"""Trains the one Transformer with a strategy, on text or images.

    python train.py --config=configs/fsdp.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE ...]

Reads top to bottom: set up the run, loop over the steps, finish. With the workdir of a run that ended early, the same
command continues from its newest checkpoint. configs/base.py documents every field.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import data
import strategies
from checkpointing import pretrained, reading, record, restore
from checkpointing.memory.tier import Tier
from checkpointing.save import Checkpoints, NotSaved
from checkpointing.shipping import Shipping
from reporting import summary
from reporting.account import sentence
from reporting.appender import warn
from reporting.dead_experts import DeadExperts
from reporting.evaluation.evaluator import Evaluator
from reporting.heartbeat import Heartbeat
from reporting.journal import Journal
from reporting.metrics import NotWritten, Writer, read
from reporting.progress import Diverged, Progress
from reporting.save_interval import SaveInterval, first_minutes
from reporting.speed import Clock, Meter, process_start
from reporting.status import Status
from runtime import command_line, device_memory, folders, processes, signals
from runtime.devices import start_jax
from runtime.hardware import peak_flops
from runtime.profiling import Profiler
from runtime.replicas import Corrupted, Replicas
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
  SIGTERM and SIGINT end it early, with a checkpoint. Its time is counted from the beginning of `clock`.

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
    default = f"runs/{config.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
    results = location(processes.on_process_zero(lambda: str(location(str(workdir or default), "workdir"))), "workdir")
    folder = here(results)
    fields = record.flat(config.to_dict())
    processes.require_equal({name: value for name, value in fields.items() if "distributed." not in name})
  heartbeat = Heartbeat(folder, jax.process_index(), clock, config.runtime.heartbeat)
  with folders.owned(results) as mirror, heartbeat, device_memory.in_words(config, devices):
    # During set-up a signal ends the process immediately. The next run continues an unfinished data preparation.
    run = set_up(config, folder, mirror, devices, clock, heartbeat)
    # Contexts exit from right to left. The writer exits after the tier and the checkpoints: it can raise on process 0
    # alone, and they wait for all processes.
    with run.requests, run.journal, run.writer, run.tier, run.checkpoints, run.profiler:
      announce(run, devices)
      ended = loop(run)
      with clock("checkpoint"):
        run.checkpoints.finish()
      return finish(run, ended)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that is set up: what the loop and the ending need."""

  config: Any
  workdir: Path
  mirror: Mirror | None  # copies the workdir to a bucket
  plan: StepPlan
  start: restore.Start
  strategy: strategies.Strategy
  dataset: data.Dataset
  prompt: np.ndarray | None  # of the sample at the end
  clock: Clock
  meter: Meter
  writer: Writer
  journal: Journal
  status: Status
  batches: data.Batches
  progress: Progress
  evaluator: Evaluator
  checkpoints: Checkpoints
  tier: Tier
  requests: signals.Requests
  save_interval: SaveInterval
  profiler: Profiler
  replicas: Replicas

  def evaluate(self, state: TrainState, step: int) -> dict[str, float]:
    """Loss and accuracy on the validation examples, written as the evaluation of `step`; {} if a request stopped it."""

    def stop() -> bool:
      self.progress.heartbeat.alive()
      self.checkpoints.check()
      return self.requests.decide().stop

    with self.clock("eval"):
      values = self.evaluator(state, stop)
    if not values:
      return {}
    with self.clock("logging"):
      values |= summary.epochs(self.dataset, self.batches, step)
      self.writer.write(step, "validation", values)
      for line in summary.part_lines(self.dataset, values):
        self.writer.say(line)
      self.status.evaluated(step, self.progress.heartbeat.pace())
      self.writer.sync()
    if step:  # before the first step there is no checkpoint
      with self.clock("checkpoint"):
        self.checkpoints.evaluated(step, values["loss"])
    self.journal.add("evaluation", step)
    if self.mirror:
      self.mirror.soon()
    self.meter.restart(step)
    return values


@dataclasses.dataclass(frozen=True)
class Ended:
  """How the loop ended: `result` holds the values of its last evaluation, empty if it made none."""

  state: TrainState
  result: dict[str, float]
  step: int
  stopped: bool  # by a request


def set_up(
  config: Any, workdir: Path, mirror: Mirror | None, devices: list[jax.Device], clock: Clock, heartbeat: Heartbeat
) -> Run:
  """Checks the config, loads the data, and creates or restores the state."""
  with clock("set-up"), processes.raise_together():
    plan = StepPlan.of(config)
    settings.check(config, devices[0].platform)  # all that needs no data, before data is prepared
    dataset = data.load(config)
    config = data.with_sizes(config, dataset.model)
    program = settings.program(config, devices[0].platform)
    data.check(config, dataset, program.sizes.example_shapes())
    strategy = strategies.create(config, program, devices)
    strategy.check_batch("batch_size", config.batch_size, config.accumulation)
    strategy.check_batch("eval_batch_size", config.eval_batch_size)
    prompt = summary.prompt(config, dataset, program.sizes)
  processes.require_equal({f"the content of {part.name!r}": part.fingerprint for part in dataset.parts})
  with clock("initial state"):
    results, now = mirror.remote if mirror else workdir, record.make(config, dataset, strategy)
    tier = Tier(config, workdir, warn)
    start = restore.begin(results, config.init_from, strategy, now, warn, tier)
  history = start.record["data"]
  mixture = data.mixture(dataset, history["first"], tuple(history["given"]), tuple(history["streams"]))

  used = list(strategy.mesh.devices.flat)  # of all processes
  peak = peak_flops(used[0], program.sizes.dtype)
  unit, per_example = program.sizes.reads.unit()
  meter = Meter(
    clock,
    items=config.batch_size * per_example,
    unit=unit,
    flops=config.batch_size * program.sizes.train_flops_per_example(),
    palm_flops=config.batch_size * program.sizes.palm_flops_per_example(),
    peak=peak and peak * len(used),
  )
  with clock("set-up"), processes.raise_together(), folders.written_into(workdir, "workdir"):
    writer = Writer(workdir, start.loop, plan.last, enabled=jax.process_index() == 0)
    journal = Journal(workdir, clock, writer.enabled, warn, heartbeat)
    if writer.enabled:
      summary.write_config(workdir, config, dataset)
  folder, saving = workdir / reading.FOLDER, config.checkpoint
  with clock("set-up"):
    send = Shipping(workdir, mirror) if mirror else None
    checkpoints = Checkpoints(folder, saving.keep, saving.keep_best, writer.say, warn, send)
  status = Status(workdir, writer, journal, checkpoints)
  requests = signals.Requests(first_minutes(saving.minutes), mirror.lost if mirror else str)
  hosts = processes.hosts()
  return Run(
    config, workdir, mirror, plan, start, strategy, dataset, prompt, clock, meter, writer, journal, status,
    batches=data.Batches(mixture, config.batch_size, config.seed),
    progress=Progress(
      clock, meter, writer, journal, plan, used, start.loop, heartbeat, status, DeadExperts(program.sizes)
    ),
    evaluator=Evaluator(strategy, dataset, config),
    checkpoints=checkpoints,
    tier=tier,
    requests=requests,
    save_interval=SaveInterval(saving.minutes, len(set(hosts)), requests, checkpoints, journal, writer.say),
    profiler=Profiler(workdir, config.profile, start.loop.step, writer.say, warn),
    replicas=Replicas(
      record.named(strategy.abstract_state()), config.runtime.check_every, writer.say,
      functools.partial(journal.add, "healed"),
    ),
  )  # fmt: skip


def announce(run: Run, devices: list[jax.Device]) -> None:
  """Shows what is about to run."""
  strategy, saved = run.strategy, run.start.record
  with run.clock("logging"):
    about = summary.about(devices, strategy.describe(run.config.strategy, run.config.batch_size), strategy, run.dataset)
    table = summary.parameter_table(strategy)
    for line in (*summary.start_lines(about), table, *run.start.lines, *run.tier.lines, *run.replicas.lines):
      run.writer.say(line)
  run.journal.add(
    "start", run.start.loop.step, source=run.start.source, **about, versions=saved["versions"], command=saved["command"]
  )


def loop(run: Run) -> Ended:
  """Runs the steps of the plan, from the start's step on."""
  plan, clock, size, state = run.plan, run.clock, run.config.batch_size, run.start.state
  first, rows = run.start.loop.step, run.strategy.rows(size)
  pending, result = None, {}
  with clock("check"):
    state = run.replicas.check(state, first)
  # `evaluated` is False if the run was stopped before this evaluation, or begins from other parameters.
  if plan.evaluates(first) and not run.start.loop.evaluated:
    result = run.evaluate(state, first)
    if not result:
      return Ended(state, {}, first, stopped=True)
  make = lambda step: run.strategy.shard(run.batches.read(step, rows), size)
  ahead, threads = run.config.data.read_ahead, run.config.data.threads
  with data.prefetch(make, range(first, plan.last), ahead, threads) as reader:
    for step in range(first, plan.last):
      with clock("data"):
        batch = next(reader)
      with clock("compile" if step == first else run.progress.work(step + 1)), run.profiler.step(step):
        state, metrics = run.strategy.train_step(state, batch)  # dispatched, not awaited
      run.profiler.after(step, metrics)
      if step == first:
        run.meter.restart(step)
      if pending:
        run.progress.read(*pending)  # of the step before, while the device works on this one
      pending, done = (step + 1, metrics), step + 1
      run.checkpoints.check()
      run.save_interval.update()
      decision = run.requests.decide()
      stopped = decision.stop
      saves = plan.saves(done) or decision.save or stopped
      saves_in_memory = plan.saves_in_memory(done) and not saves
      checks = run.replicas.due(done, saves or saves_in_memory)
      if saves or saves_in_memory or checks:
        run.progress.read(*pending)
        pending = None
      if checks:
        with clock("check"):
          state = run.replicas.check(state, done)
      if saves_in_memory:
        with clock("checkpoint"):
          run.writer.sync()
          run.tier.save(state, run.start.record, run.progress.loop)
      if saves:
        with clock("checkpoint"):
          run.writer.sync()
          run.checkpoints.save(state, run.start.record, run.progress.loop)
        if plan.evaluates(done) and not stopped:
          values = run.evaluate(state, done)
          result, stopped = values or result, not values
        run.requests.saved()  # after the evaluation, which changes nothing that is saved
        run.meter.restart(done)
      if stopped:
        return Ended(state, result, done, stopped=True)
  return Ended(state, result, plan.last, stopped=False)


def finish(run: Run, ended: Ended) -> dict[str, float]:
  """Shows how the run ended: the result, the baseline, a sample, and where the time went."""
  say, first = run.writer.say, run.start.loop.step
  if ended.stopped:
    saved = ended.step not in run.checkpoints.failed
    then = "the same command continues from there" if saved else "but this step is not saved"
    say(f"stopped   by {run.requests.signal or 'a signal'} after step {ended.step}; {then}")
    run.journal.add("stop", ended.step, by=run.requests.signal or "a signal")
    say(sentence(run.status.update(ended.step)))
    return ended.result
  result = ended.result
  if first >= run.plan.last and not result:
    lines = [line for line in read(run.writer.path) if line["split"] == "validation"]
    result = lines[-1] if lines else run.evaluate(ended.state, first)
    if (run.workdir / "loss.png").exists():
      say(f"finished  at step {first}: all {run.plan.last} steps are done")
      run.journal.add("end", first)
      return result

  baseline = run.evaluator.baseline() if jax.process_index() == 0 else None
  if baseline and result.get("bits_per_byte") is not None:
    say(summary.baseline_line(baseline, result["bits_per_byte"]))
  with run.clock("sample"):
    sample = summary.sample(run.config, run.strategy, run.dataset, ended.state, run.prompt)
  if sample is not None:
    say("sample\n" + "\n".join(f"  | {line}" for line in sample.splitlines()))
  if run.writer.enabled:
    with run.clock("logging"):
      summary.plot_loss(run.workdir / "loss.png", read(run.writer.path), baseline)
  run.journal.add("end", ended.step, sample=sample)
  say("\n".join([*filter(None, [run.tier.summary]), *summary.wall_time_lines(run.clock)]))
  say(run.status.write(ended.step))
  where = run.mirror.remote if run.mirror else run.workdir
  say(f"results in {where}: report.html, metrics.jsonl, loss.png, tensorboard/, config.json, checkpoints/")
  return result


def main(config: Any, workdir: Path | str | None) -> None:
  """`train` as a program: a run that failed ends with one line on standard error, and status FAILED or DIVERGED."""
  try:
    train(config, workdir, Clock(process_start()))
  except (Corrupted, Diverged, NotSaved, NotSent, NotWritten) as error:
    command_line.fail(error, status=command_line.DIVERGED if isinstance(error, Diverged) else command_line.FAILED)


if __name__ == "__main__":
  command_line.run(lambda config: main(config, WORKDIR.value))
