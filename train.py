"""Trains the one Transformer with a strategy, on text or images.

    python train.py --config=configs/fsdp.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE ...]

Reads top to bottom: what there is to run on, what is trained on what, the loop, and what is told at the end.
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
from training import command_line, report, runtime, settings
from training.hardware import memory_in_use, peak_flops
from training.metrics import Clock, Meter, Writer, read
from training.program import TrainState

WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results; default runs/STRATEGY-TIME.")


class Diverged(RuntimeError):
  """Too many updates in a row had a loss or gradient that was not finite."""


def train(config: Any, workdir: Path) -> dict[str, float]:
  """Trains as `config` says, writes the results into `workdir`, and returns the last evaluation's values."""
  clock = Clock()
  with clock("set-up"):
    devices = runtime.start(config)
    schedule = settings.Schedule.of(config)
    program = settings.program(config, devices[0].platform)
    strategy = strategies.create(config, program, devices)
    strategy.check_batch("batch_size", config.batch_size, config.accumulation)
    strategy.check_batch("eval_batch_size", config.eval_batch_size)
    runtime.writable(workdir, "workdir")
    dataset = data.load(config.data, program.model)
    prompt = report.prompt(config, dataset, program.model)
  with clock("compile"):
    state = strategy.init(config.seed)

  train_batches = data.Batches(dataset.train, config.batch_size, config.seed)
  eval_batches = data.Batches(dataset.validation, config.eval_batch_size)
  eval_examples = config.eval_examples or len(dataset.validation)
  rows = strategy.rows(config.batch_size)

  used = list(strategy.mesh.devices.flat)  # of all processes
  peak = peak_flops(used[0], program.model.dtype)
  unit, per_example = ("images", 1) if program.model.is_image else ("tokens", program.model.seq_len)
  meter = Meter(
    clock,
    items=config.batch_size * per_example,
    unit=unit,
    flops=config.batch_size * program.model.train_flops_per_example(),
    peak=peak and peak * len(used),
  )
  first_step, result, pending = 0, {}, None
  skipped_in_a_row = skipped_since_line = 0
  writer = Writer(workdir, first_step, schedule.last, enabled=jax.process_index() == 0)
  reader = data.prefetch(
    lambda step: strategy.shard(train_batches.train(step, rows), config.batch_size), range(first_step, schedule.last)
  )

  def note(step: int, metrics: dict[str, jax.Array]) -> None:
    """Reads the metrics of a step, which waits until it is done, and tells them if it is time to."""
    nonlocal skipped_in_a_row, skipped_since_line
    with clock("train"):
      values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    skipped = int(values.pop("skipped"))
    skipped_since_line += skipped
    skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
    with clock("logging"):
      writer.progress(step)
      if step % schedule.log_every == 0 or step == schedule.last:
        if skipped_since_line:
          values["skipped_updates"] = skipped_since_line
          skipped_since_line = 0
        writer.write(step, "train", values | meter.read(step) | memory_in_use(used))
    if skipped_in_a_row >= schedule.max_skipped:
      raise Diverged(
        f"the last {skipped_in_a_row} updates, up to step {step}, had a loss or gradient that was not finite and were "
        f"not applied; lower optimizer.learning_rate={config.optimizer.learning_rate}, or raise optimizer.warmup"
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

  with writer, reader:
    with clock("logging"):
      if writer.enabled:
        (workdir / "config.json").write_text(config.to_json(indent=2))
      writer.say(f"devices   {report.device_line(devices, jax.process_count())}")
      writer.say(f"strategy  {strategy.describe(config.strategy)}")
      writer.say(f"data      {dataset.description}")
      writer.say(report.parameter_table(state.params))

    for step in range(first_step, schedule.last):
      with clock("data"):
        batch = next(reader)
      with clock("compile" if step == first_step else "train"):
        state, metrics = strategy.train_step(state, batch)  # dispatched, not awaited
      if step == first_step:
        meter.restart(step)
      if pending:
        note(*pending)  # of the step before, while the device works on this one
      pending = (step + 1, metrics)
      if schedule.evaluates(step + 1):
        note(*pending)
        pending, result = None, evaluate(step + 1)

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
    writer.say(f"results in {workdir}: metrics.jsonl, loss.png, tensorboard/, config.json")
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


def main(config: Any) -> None:
  workdir = Path(WORKDIR.value or f"runs/{config.strategy}-{time.strftime('%Y%m%d-%H%M%S')}")
  try:
    train(config, workdir)
  except Diverged as error:
    command_line.fail(error, status=1)


if __name__ == "__main__":
  command_line.run(main)
