"""Measures what checkpoints cost, and writes the tables of docs/checkpoints.md.

    python -m tools.benchmark checkpoint_cost            # measures (minutes), writes the record and the tables
    python -m tools.benchmark checkpoint_cost --tables   # writes the tables from the existing record

The model is a transformer whose state has half a gigabyte, under FSDP on 8 simulated devices. Each round times:

- some training steps
- the same steps while a checkpoint is written
- the same steps while the state is kept in the host's memory, without a neighbour
- a plain copy of the checkpoint's files, with fsync, as a checkpoint's files are written
- a save and a restore while nothing else runs
"""

import argparse
import collections
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging

import data
import strategies
from checkpointing import reading, record
from checkpointing.memory.tier import Tier
from checkpointing.save import Checkpoints
from configs import base
from errors import positive
from lab.benchmarks.header import machine, source, started, write
from lab.benchmarks.pages import RESULTS, ROOT, rewrite
from runtime import command_line
from runtime.devices import start_jax
from training import settings
from training.loop import LoopState
from training.program import TrainState

RECORD, PAGE = RESULTS / "checkpoint.json", ROOT / "docs" / "checkpoints.md"
STEPS = 4  # timed together; they take longer than writing a checkpoint


def config() -> Any:
  """A model of 47 million parameters, with small batches."""
  c = base.get_config("lm", "fsdp")
  c.data.name = "synthetic"
  c.model.update(width=512, depth=12, heads=8, kv_heads=8, mlp_width=1536, seq_len=64, vocab_size=8192)
  c.batch_size, c.checkpoint.memory_every = 8, 1
  return c


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
  start = time.perf_counter()
  yield
  seconds[name] = time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
  """Copies a folder and calls fsync on every file."""
  shutil.copytree(source, target)
  for file in target.rglob("*"):
    if file.is_file():
      with file.open("rb") as opened:
        os.fsync(opened.fileno())


def measure(rounds: int, folder: Path) -> dict[str, Any]:
  """The record: seconds of each part in each round, and the bytes of the state and of its files."""
  asked = config()
  begun, devices = started(), start_jax(asked)
  program = settings.program(asked, devices[0].platform)
  strategy = strategies.create(asked, program, devices)
  dataset = data.load(asked)
  run = record.make(asked, dataset, strategy)
  batches = data.Batches(data.mixture(dataset), asked.batch_size, asked.seed)
  batch = strategy.shard(batches.read(0, strategy.rows(asked.batch_size)), asked.batch_size)
  state = strategy.init(0)

  def steps(state: TrainState) -> TrainState:
    for _ in range(STEPS):
      state, metrics = strategy.train_step(state, batch)
      jax.block_until_ready(metrics)
    return state

  seconds: dict[str, list[float]] = collections.defaultdict(list)
  abstract = record.named(strategy.abstract_state())
  (folder / "run").mkdir()
  with (
    Tier(asked, folder / "run", print) as tier,
    Checkpoints(folder / "checkpoints", 1, 0, lambda _: None, print) as writer,
  ):
    tier.prepare(abstract)
    for turn in range(rounds + 1):
      taken: dict[str, float] = {}
      saved = folder / "checkpoints" / str(turn + 1)
      with timed(taken, "steps"):
        state = steps(state)
      with timed(taken, "steps_with_save"):
        with timed(taken, "blocked"):
          writer.save(state, run, LoopState(turn + 1))
        state = steps(state)
      writer.finish()
      with timed(taken, "steps_with_memory"):
        with timed(taken, "memory"):
          tier.save(state, run, LoopState(turn + 1))
        state = steps(state)
      tier.wait()
      shutil.rmtree(folder / "copy", ignore_errors=True)
      with timed(taken, "copy"):
        copy(saved, folder / "copy")
      with timed(taken, "save"), Checkpoints(folder / "alone", 1, 0, lambda _: None, print) as alone:
        alone.save(state, run, LoopState(turn + 1))  # nothing else runs meanwhile
      with timed(taken, "restore"):
        jax.block_until_ready(reading.read_arrays(saved, abstract))
      if turn:  # the first round compiles
        for name, value in taken.items():
          seconds[name].append(value)
  return {
    "command": f"python -m tools.benchmark checkpoint_cost --rounds={rounds}",
    **machine(devices),
    **begun,
    "steps": STEPS,
    "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
    "file_bytes": sum(f.stat().st_size for f in saved.rglob("*") if f.is_file()),
    "minutes": asked.checkpoint.minutes,
    "seconds": seconds,
  }


def tables(found: dict[str, Any]) -> dict[str, str]:
  """The generated parts of docs/checkpoints.md, by the names of their places."""
  seconds, steps = found["seconds"], found["steps"]
  step = statistics.median(seconds["steps"]) / steps
  blocked = statistics.median(seconds["blocked"])
  lost = statistics.median(b - a for a, b in zip(seconds["steps"], seconds["steps_with_save"], strict=True))
  interval = 60 * found["minutes"]
  speed = {name: found["file_bytes"] / statistics.median(seconds[name]) / 1e9 for name in ("save", "restore", "copy")}
  relative = {
    name: statistics.median(a / b for a, b in zip(seconds["copy"], seconds[name], strict=True))
    for name in ("save", "restore", "copy")
  }
  in_memory = []
  if "memory" in seconds:  # older records are without it
    waited = statistics.median(seconds["memory"])
    pairs = zip(seconds["steps"], seconds["steps_with_memory"], strict=True)
    slower = statistics.median(b - a for a, b in pairs)
    in_memory = [
      f"| training waits for a save in the host's memory (the same, into `/dev/shm`) | {waited:.2f} s = "
      f"{waited / step:.2f} steps |",
      f"| such a save slows {steps} steps down by this much in total, waiting included | {slower:.2f} s |",
    ]
  rows = [
    "| Time | Median |",
    "|---|---|",
    f"| one training step | {step:.2f} s |",
    f"| training waits for a checkpoint (digests, copy to the host) | {blocked:.2f} s = {blocked / step:.2f} steps |",
    f"| a checkpoint slows {steps} steps down by this much in total, waiting included | {lost:.2f} s |",
    f"| share of all time, with a checkpoint every {found['minutes']:g} minutes (default) | {lost / interval:.2%} |",
    *in_memory,
    "",
    f"| {found['file_bytes'] / 1e6:,.0f} MB of files | GB/s | Speed, plain copy = 1 |",
    "|---|---|---|",
    *(f"| {name} | {speed[name]:.2f} | {relative[name]:.2f} |" for name in ("save", "restore", "copy")),
    "",
    source(found),
  ]
  return {"cost": "\n".join(rows)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the tables from the existing record")
  parser.add_argument("--rounds", type=int, default=7, help="rounds to time (default: 7)")
  parser.add_argument("--folder", help="a folder on the disk to measure (default: the system's temporary folder)")
  options = parser.parse_args()
  with command_line.bad_input_ends_the_program():
    positive("rounds", options.rounds)
  logging.set_verbosity(logging.WARNING)
  if not options.tables:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
      write(RECORD, measure(options.rounds, Path(folder)))
  print(rewrite(PAGE, RECORD, tables)["cost"])
