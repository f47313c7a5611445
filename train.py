"""Trains the one Transformer with a strategy, on text or images.

    python train.py --config=configs/fsdp.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE ...]

Reads top to bottom: what there is to run on, what is trained on what, where to begin, the loop, and what is told at
the end. With the workdir of a run that has ended early, the same command goes on from its newest checkpoint.
configs/base.py documents every field.
"""

import collections
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import data
import strategies
from data.batches import HostBatch
from training import command_line, processes, record, report, restore, runtime, settings
from training.checkpoint import Checkpoints, NotSaved
from training.hardware import peak_flops
from training.metrics import Clock, Meter, NotWritten, Writer, read, warn
from training.program import TrainState
from training.progress import Diverged, Progress

WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results; default runs/STRATEGY-TIME.")


def train(config: Any, workdir: Path | None) -> dict[str, float]:
  """Trains as `config` says, writes the results into `workdir`, and returns the last evaluation's values.

  SIGTERM and SIGINT end it early, with a checkpoint. Raises ConfigError for bad input; Diverged; and NotSaved, at the
  end, if a checkpoint could not be written on the way.
  """
  clock = Clock()
  with clock("set-up"):
    devices = runtime.start(config)
    workdir = Path(processes.first(lambda: str(workdir or default_workdir(config)))).expanduser()
    processes.same({name: value for name, value in record.flat(config.to_dict()).items() if "distributed." not in name})
  with processes.Requests() as requests, runtime.owned(workdir):
    return train_in(workdir, config, devices, requests, clock)


def train_in(
  workdir: Path, config: Any, devices: list[jax.Device], requests: processes.Requests, clock: Clock
) -> dict[str, float]:
  """The same in a folder that no other run has, on devices that are there."""
  with clock("set-up"), processes.together():
    schedule = settings.Schedule.of(config)
    program = settings.program(config, devices[0].platform)
    strategy = strategies.create(config, program, devices)
    strategy.check_batch("batch_size", config.batch_size, config.accumulation)
    strategy.check_batch("eval_batch_size", config.eval_batch_size)
    dataset = data.load(config.data, program.model)
    prompt = report.prompt(config, dataset, program.model)
  processes.same({"data.fingerprint": dataset.fingerprint})
  with clock("initial state"):
    run = record.make(config, dataset, strategy)
    start = restore.begin(workdir, config.init_from, strategy, run, warn)
    state, first_step = start.state, start.saved["step"]

  train_batches = data.Batches(dataset.train, config.batch_size, config.seed)
  eval_batches = data.Batches(dataset.validation, config.eval_batch_size)
  eval_examples = config.eval_examples or len(dataset.validation)
  rows = strategy.rows(config.batch_size)

  used = list(strategy.mesh.devices.flat)  # of all processes
  peak = peak_flops(used[0], program.model.dtype)
  unit, per_example = program.model.unit
  meter = Meter(
    clock,
    items=config.batch_size * per_example,
    unit=unit,
    flops=config.batch_size * program.model.train_flops_per_example(),
    peak=peak and peak * len(used),
  )
  with processes.together():
    evaluated = start.saved["evaluated"]
    writer = Writer(workdir, first_step, schedule.last, enabled=jax.process_index() == 0, evaluated=evaluated)
    if writer.enabled:
      (workdir / "config.json").write_text(config.to_json(indent=2))
  progress = Progress(clock, meter, writer, schedule, used, start.saved["skipped"])
  keep, keep_best = config.checkpoint.keep, config.checkpoint.keep_best
  checkpoints = Checkpoints(workdir / restore.FOLDER, keep, keep_best, writer.say, warn)
  reader = data.prefetch(
    lambda step: strategy.shard(train_batches.train(step, rows), config.batch_size), range(first_step, schedule.last)
  )

  def evaluate(step: int) -> dict[str, float]:
    """Loss and accuracy over the validation examples."""
    with clock("eval"):
      batches = eval_batches.evaluation(strategy.rows(config.eval_batch_size), eval_examples)
      total = evaluation_sums(strategy, state, batches, config.eval_batch_size)
      values = {"loss": total["loss"] / total["count"]}
      if program.model.is_image:
        values |= {"accuracy": total["correct"] / total["count"], "examples": total["count"]}
      elif dataset.bytes_per_token:
        values["bits_per_byte"] = values["loss"] / math.log(2) / dataset.bytes_per_token
    with clock("logging"):
      writer.write(step, "validation", values)
    meter.restart(step)
    return values

  with checkpoints, writer, reader:
    with clock("logging"):
      writer.say(f"devices   {report.device_line(devices, jax.process_count())}")
      writer.say(f"strategy  {strategy.describe(config.strategy)}")
      writer.say(f"data      {dataset.description}")
      writer.say(report.parameter_table(state.params))
      for line in start.told:
        writer.say(line)

    pending, result, stopped = None, {}, False
    timer = processes.Timer(config.checkpoint.minutes)
    if schedule.evaluates(first_step) and not evaluated:  # it was stopped before that
      result = evaluate(first_step)
    for step in range(first_step, schedule.last):
      with clock("data"):
        batch = next(reader)
      with clock("compile" if step == first_step else "train"):
        state, metrics = strategy.train_step(state, batch)  # dispatched, not awaited
      if step == first_step:
        meter.restart(step)
      if pending:
        progress.note(*pending)  # of the step before, while the device works on this one
      pending, done = (step + 1, metrics), step + 1
      checkpoints.check()
      wishes = requests.decide(save=timer.due)
      stopped = wishes.stop and done < schedule.last
      if schedule.saves(done) or wishes.save or stopped:
        progress.note(*pending)
        pending, evaluated = None, schedule.evaluates(done) and not stopped
        if evaluated:
          result = evaluate(done)
        with clock("checkpoint"):
          loop = {"step": done, "skipped": progress.skipped, "evaluated": evaluated}
          writer.sync()
          checkpoints.save(state, run | loop, result["loss"] if evaluated else None)
        timer.restart()
        meter.restart(done)
      if stopped:
        break
    with clock("checkpoint"):
      checkpoints.finish()

    if stopped:
      goes_on = "the same command goes on from there" if done not in checkpoints.failed else "but that is not saved"
      writer.say(f"stopped   by {requests.signal or 'a signal'} after step {done}; {goes_on}")
      return result
    if first_step >= schedule.last:
      told = [line for line in read(writer.path) if line["split"] == "validation"] if writer.path.exists() else []
      result = result or (told[-1] if told else evaluate(first_step))
      if (workdir / "loss.png").exists():
        writer.say(f"finished  at step {first_step}: nothing is left to do of {schedule.last} steps")
        return result

    baseline = None
    if dataset.bigram and jax.process_index() == 0:
      bits = dataset.bigram(eval_examples)
      baseline = ("byte bigram", bits * math.log(2) * dataset.bytes_per_token)
      better = 1 - result["bits_per_byte"] / bits
      writer.say(
        f"baseline   byte bigram model: loss {baseline[1]:.4f}  {bits:.3f} bits/byte; "
        f"this model is {abs(better):.1%} {'below' if better >= 0 else 'above'} it"
      )
    if prompt is not None:
      with clock("sample"):
        length = min(config.sample_length, program.model.seq_len - prompt.shape[1])
        text = strategy.generate(state, prompt, length=length, seed=config.seed, temperature=config.sample_temperature)
        sample = dataset.decode(np.asarray(text)[0].tolist())
      writer.say("sample\n" + "\n".join(f"  | {line}" for line in sample.splitlines()))
    if writer.enabled:
      with clock("logging"):
        report.plot_loss(workdir / "loss.png", read(writer.path), baseline)
    for line in report.wall_time_lines(clock):
      writer.say(line)
    writer.say(f"results in {workdir}: metrics.jsonl, loss.png, tensorboard/, config.json, checkpoints/")
  return result


def evaluation_sums(
  strategy: strategies.Strategy, state: TrainState, batches: Iterable[HostBatch], size: int
) -> dict[str, float]:
  """Loss, correct predictions and count over all batches, read two batches late so that the device does not wait."""
  total: collections.Counter = collections.Counter()
  waiting: collections.deque = collections.deque()

  def read_oldest() -> None:
    total.update({name: float(value) for name, value in jax.device_get(waiting.popleft()).items()})

  for batch in batches:
    waiting.append(strategy.eval_step(state, strategy.shard(batch, size)))
    if len(waiting) > 2:
      read_oldest()
  while waiting:
    read_oldest()
  return total


def default_workdir(config: Any) -> str:
  return f"runs/{config.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"


def run(config: Any, workdir: Path | None) -> None:
  """`train` as a program: a run that ended badly is one line on standard error, and exit status 1."""
  try:
    train(config, workdir)
  except (Diverged, NotSaved, NotWritten) as error:
    command_line.fail(error, status=1)


if __name__ == "__main__":
  command_line.run(lambda config: run(config, Path(WORKDIR.value) if WORKDIR.value else None))
