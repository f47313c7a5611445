"""Compares what models learn in float32, bfloat16 and float8, and writes the table of docs/float8.md.

    python -m tools.benchmark float8            # trains (40 minutes on a free core), writes record and table
    python -m tools.benchmark float8 --tables   # writes the table from the existing record

The models are those of the presets `lm`, on the source of Python's standard library, and `throughput`, on made-up text.
Each trains from each seed in three ways, with the same batches. In float8, products of blocks multiply float8 numbers,
and all else is in bfloat16.
"""

import statistics
from typing import Any

from configs import base
from lab.benchmarks.header import machine, source, started
from lab.benchmarks.optimizers import SEEDS, trained
from lab.benchmarks.pages import RESULTS, ROOT, command
from runtime.devices import start_jax

RECORD, PAGE = RESULTS / "float8.json", ROOT / "docs" / "float8.md"
PRESETS = {"lm": 1.0, "throughput": 0.5}  # and what share of the steps each trains
WAYS = {"float32": ("float32", "dtype"), "bfloat16": ("bfloat16", "dtype"), "float8": ("bfloat16", "float8")}
LIMIT = 0.01  # how far the mean loss in float8 may be from that in float32


def config(preset: str, way: str, seed: int, steps: int) -> Any:
  c = base.get_config(preset, "single")
  c.model.dtype, c.model.products = WAYS[way]
  c.update(seed=seed, steps=round(steps * PRESETS[preset]), simulated_devices=1, eval_examples=1024)
  return c


def measure(steps: int) -> dict[str, Any]:
  """The record: the validation loss of each preset, way and seed."""
  begun, devices = started(), start_jax(config("lm", "float32", SEEDS[0], steps))
  losses: dict[str, dict[str, list[float]]] = {}
  for preset in PRESETS:
    losses[preset] = {way: [trained(config(preset, way, seed, steps), devices) for seed in SEEDS] for way in WAYS}
    print(preset, losses[preset], flush=True)
  return {
    "command": f"python -m tools.benchmark float8 --steps={steps}",
    **machine(devices),
    **begun,
    "steps": {preset: config(preset, "float32", SEEDS[0], steps).steps for preset in PRESETS},
    "losses": losses,
  }


def apart(record: dict[str, Any], preset: str, way: str) -> float:
  """How far the mean loss of a way is from that in float32, relative to it."""
  means = {name: statistics.mean(found) for name, found in record["losses"][preset].items()}
  return means[way] / means["float32"] - 1


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/float8.md."""
  rows = ["| Preset, steps | Computed in | Validation loss, each seed | Mean | To float32 |", "|---|---|---|---|---|"]
  for preset, found in record["losses"].items():
    for way, losses in found.items():
      each = ", ".join(f"{loss:.4f}" for loss in losses)
      beside = f"{statistics.mean(losses):.4f} | {apart(record, preset, way):+.2%} |"
      rows.append(f"| {preset}, {record['steps'][preset]} | {way} | {each} | {beside}")
  return {"float8": "\n".join([*rows, "", source(record)])}


def main() -> None:
  command(__doc__, ("steps", 300, "updates of each run of `lm`"), PAGE, RECORD, measure, tables, "float8")
