"""Measures what comparing replicas costs, and writes the table of docs/cluster.md.

    python -m tools.benchmark replica_check            # measures (a minute), writes the record and the table
    python -m tools.benchmark replica_check --tables   # writes the table from the existing record

There are two states, each held whole by every device: that of the preset `lm` under data parallelism on 8 simulated
devices, and 1 GB on 2 simulated devices. Each round times a check and, of the preset, a training step.
"""

import collections
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import strategies
from checkpointing import record
from configs import base
from lab.benchmarks.header import machine, source, started
from lab.benchmarks.pages import RESULTS, ROOT, command
from runtime.devices import start_jax
from runtime.replicas import Replicas
from training import settings

RECORD, PAGE = RESULTS / "replicas.json", ROOT / "docs" / "cluster.md"
GIGABYTE = 15  # arrays of 4096 × 4096 float32: 1.007 GB


def timed(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """The seconds of each part in each round. The parts take turns. The first round, which compiles, is left out."""
  seconds: dict[str, list[float]] = collections.defaultdict(list)
  for turn in range(rounds + 1):
    for name, run in parts.items():
      start = time.perf_counter()
      run()
      if turn:
        seconds[name].append(time.perf_counter() - start)
  return seconds


def compared(state: Any) -> Callable[[], Any]:
  replicas = Replicas(record.named(state), 1, print, print)
  return lambda: replicas.check(state, 1)


def of_preset(devices: Sequence[jax.Device], rounds: int) -> dict[str, Any]:
  """The preset `lm` under data parallelism."""
  asked = base.get_config("lm", "data_parallel")
  program = settings.program(asked, devices[0].platform)
  strategy = strategies.create(asked, program, list(devices))
  shapes = program.example_shapes()
  rows = {name: np.zeros((asked.batch_size, *field.shape), field.dtype) for name, field in shapes.items()}
  rows["mask"] = np.ones_like(rows["mask"])
  batch, state = strategy.shard(rows, asked.batch_size), strategy.init(0)
  trained = [strategy.init(0)]

  def step() -> None:
    trained[0], metrics = strategy.train_step(trained[0], batch)
    jax.block_until_ready(metrics)

  parts = {"step": step, "check": compared(state)}
  return {"bytes": _bytes(state), "copies": len(devices), "seconds": timed(parts, rounds)}


def of_gigabyte(devices: Sequence[jax.Device], rounds: int) -> dict[str, Any]:
  """One gigabyte of weights, held by each of the devices."""
  whole, random = NamedSharding(Mesh(np.array(devices), ("data",)), P()), np.random.default_rng(0)
  state = [jax.device_put(random.random((4096, 4096), np.float32), whole) for _ in range(GIGABYTE)]
  parts = {"check": compared(state)}
  return {"bytes": _bytes(state), "copies": len(devices), "seconds": timed(parts, rounds)}


def _bytes(state: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(state))


def measure(rounds: int) -> dict[str, Any]:
  begun, devices = started(), start_jax(base.get_config("lm", "data_parallel"))
  found = {"preset lm": of_preset(devices, rounds), "1 GB": of_gigabyte(devices[:2], rounds)}
  command = f"python -m tools.benchmark replica_check --rounds={rounds}"
  return {"command": command, **machine(devices), **begun, "states": found}


def tables(found: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/cluster.md."""
  rows = ["| State | On each of | One check | All that is read | One training step |", "|---|---|---|---|---|"]
  for name, state in found["states"].items():
    times = {part: statistics.median(seconds) for part, seconds in state["seconds"].items()}
    step = f"{1e3 * times['step']:,.0f} ms" if "step" in times else "-"
    size = f"{name}: {state['bytes'] / 1e6:,.0f} MB"
    rate = state["bytes"] * state["copies"] / times["check"] / 1e9
    shown = f"{1e3 * times['check']:,.0f} ms | {rate:.1f} GB/s"
    rows.append(f"| {size} | {state['copies']} devices | {shown} | {step} |")
  return {"check": "\n".join([*rows, "", source(found)])}


def main() -> None:
  command(__doc__, ("rounds", 15, "rounds to time"), PAGE, RECORD, measure, tables, "check")
