"""Compares the pipeline schedules with a single device in speed and memory, and writes the tables of docs/pipeline.md.

    python -m tools.benchmark pipeline_schedules            # measures (minutes), writes the record and the tables
    python -m tools.benchmark pipeline_schedules --tables   # writes the tables from the existing record

8 simulated devices as 4 stages × 2 data, 16 microbatches, one global batch. In each round every program runs one step,
in an order that rotates. Only steps of the same round are compared, so a machine that slows down slows all of them.
"""

import statistics
import time
from typing import Any

import jax

import data
import strategies
from configs import base
from lab.analysis.timeline import describe, schedules
from lab.benchmarks.header import machine, source, started
from lab.benchmarks.pages import RESULTS, ROOT, command
from runtime.devices import start_jax
from training import settings

RECORD, PAGE = RESULTS / "pipeline.json", ROOT / "docs" / "pipeline.md"
STAGES, MICROBATCHES, EXAMPLES = 4, 16, 4  # the strategy's default number of stages; examples in a microbatch


def config(strategy: str, schedule: str = "1f1b", microbatches: int = MICROBATCHES) -> Any:
  """The lm preset with 8 blocks, so that the interleaved schedule can split it into 4 stages of 2 chunks."""
  c = base.get_config("lm", strategy)
  c.model.depth = 8
  c.pipeline.update(schedule=schedule, microbatches=microbatches)
  c.batch_size = microbatches * EXAMPLES
  return c


def measure(rounds: int) -> dict[str, Any]:
  """The record: seconds of each step of each program, and temporary bytes for several numbers of microbatches."""
  asked = {"single": config("single")} | {name: config("pipeline", name) for name in schedules(1, 1, 1)}
  begun, devices = started(), start_jax(asked["single"])
  runs = {}
  for name, c in asked.items():
    program = settings.program(c, devices[0].platform)
    strategy = strategies.create(c, program, devices)
    batches = data.Batches(data.mixture(data.load(c)), c.batch_size, c.seed)
    batch = strategy.shard(batches.read(0, strategy.rows(c.batch_size)), c.batch_size)
    runs[name] = [strategy, strategy.init(0), batch]
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for turn in range(rounds + 1):
    order = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
    for name in order:
      run = runs[name]
      start = time.perf_counter()
      run[1], metrics = run[0].train_step(run[1], run[2])
      jax.block_until_ready(metrics)
      if turn:  # the first round compiles
        seconds[name].append(time.perf_counter() - start)
  memory: dict[str, dict[int, int]] = {}
  for name in schedules(1, 1, 1):
    for microbatches in (STAGES, 2 * STAGES, 4 * STAGES):
      c = config("pipeline", name, microbatches)
      lowered = strategies.create(c, settings.program(c, "cpu"), devices).lower_train_step(c.batch_size)
      held = lowered.compile().memory_analysis().temp_size_in_bytes
      memory.setdefault(name, {})[microbatches] = held
  return {
    "command": f"python -m tools.benchmark pipeline_schedules --rounds={rounds}",
    **machine(devices),
    **begun,
    "seconds": seconds,
    "temporary_bytes": memory,
  }


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated parts of docs/pipeline.md, by the names of their places."""
  made = {f"timeline {name}": f"```\n{describe(name, s)}\n```" for name, s in schedules(4, 8, 2).items()}
  seconds = record["seconds"]
  rows = [
    "| Program | Median step | Throughput, single device = 1 (median over rounds) |",
    "|---|---|---|",
  ]
  for name, steps in seconds.items():
    ratio = statistics.median(a / b for a, b in zip(seconds["single"], steps, strict=True))
    rows.append(f"| {name} | {statistics.median(steps) * 1e3:,.0f} ms | {ratio:.2f} |")
  made["speed"] = "\n".join([*rows, "", source(record)])
  counts = list(next(iter(record["temporary_bytes"].values())))
  rows = [f"| Schedule | {' | '.join(f'{m} microbatches' for m in counts)} |", "|---|" + "---|" * len(counts)]
  for name, held in record["temporary_bytes"].items():
    rows.append(f"| {name} | {' | '.join(f'{held[m] / 1e6:.1f} MB' for m in counts)} |")
  return made | {"memory": "\n".join(rows)}


def main() -> None:
  command(__doc__, ("rounds", 15, "steps of each program"), PAGE, RECORD, measure, tables, "speed")
