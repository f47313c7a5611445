"""Records what a device computes, sends and holds in a step of each strategy, one thing after another.

    python -m tools.benchmark moves              # compiles all strategies for 8 TPUs (an hour on two cores)
    python -m tools.benchmark moves --only=fsdp  # one, and leaves the other rows as they are

Writes lab/benchmarks/results/moves.json, which the site draws (lab/views/step_moves.py). Needs no TPU, only its
compiler: pip install '.[topology]'.
"""

import argparse
import json
import os
from importlib import metadata
from typing import Any

import jax

import strategies
from lab.analysis.compiled import CompiledStep, compile_step
from lab.analysis.moves import moves
from lab.analysis.overlap import Overlap
from lab.analysis.topology import machine_of
from lab.benchmarks import header
from lab.benchmarks.pages import RESULTS
from lab.benchmarks.predictions import COMPILER, Prediction, config
from training import settings

FILE = RESULTS / "moves.json"
TOPOLOGY, MODEL, LENGTH, BATCH, REMAT, EXPERTS = "v5p:2x2x2", "1B", 2048, 16, "dots", 8
WITHOUT = ("pmap_ddp",)  # a program of pmap runs only on devices that exist


def case(name: str) -> Prediction:
  """The step of a strategy: of a mixture if it shares experts."""
  fields = {"model.experts": EXPERTS} if strategies.layout_of(name).axes("experts") else {}
  return name, TOPOLOGY, MODEL, LENGTH, BATCH, REMAT, fields


def row(step: CompiledStep, found: Overlap) -> dict[str, Any]:
  """What the record has of a strategy: the compiler's figure for the memory of a device, and the moves."""
  written = [
    [*move[:7], round(1e6 * move.seconds, 2), round(1e6 * move.waits, 2), move.memory] for move in moves(step, found)
  ]
  return {"memory": step.bytes, "moves": written}


def measure(name: str) -> dict[str, Any]:
  """Compiles a strategy's step, and follows it."""
  asked, where = config(case(name)), machine_of(TOPOLOGY)
  made = strategies.create(asked, settings.program(asked, where.platform), where.devices())
  step = compile_step(made, asked.batch_size)
  return row(step, step.overlap(where.chip, where.links_of(made.mesh)))


def record(rows: dict[str, Any], started: dict[str, Any]) -> dict[str, Any]:
  """What the file holds. A move has the fields of `moves.Move`, with times in microseconds.

  Args:
    started: what `header.started` returned when the newest row was begun.
  """
  package = COMPILER[machine_of(TOPOLOGY).platform]
  return {
    "command": "python -m tools.benchmark moves",
    **started,
    "machine": f"compiled on {os.cpu_count()} cores of {header.cpu()}",
    "versions": {"jax": jax.__version__, package: metadata.version(package)},
    "case": [TOPOLOGY, MODEL, LENGTH, BATCH, REMAT, EXPERTS],
    "strategies": rows,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", help="the strategy to compile")
  only = parser.parse_args().only
  rows = json.loads(FILE.read_text())["strategies"] if only else {}
  for name in [only] if only else [name for name in strategies.names() if name not in WITHOUT]:
    started = header.started()
    rows[name] = measure(name)
    header.write(FILE, record(rows, started), indent=None)
    print(f"{name}: {len(rows[name]['moves'])} moves")
