"""Compares Muon with AdamW on real text, each with its best learning rate, and writes the table of docs/optimizers.md.

    python -m tools.benchmark optimizers            # trains (25 minutes on a free core), writes record and table
    python -m tools.benchmark optimizers --tables   # writes the table from the existing record

The model is that of the `lm` preset, on the source of Python's standard library. Each optimizer trains with each
learning rate of a grid from one seed, and with its best rate from all seeds. Everything else is equal: the steps, the
batches of a seed, the shape of the learning rate, weight decay and clipping.
"""

import statistics
from typing import Any

import jax

import data
import strategies
from configs import base
from lab.analysis.weights import weights
from lab.benchmarks.header import machine, source, started
from lab.benchmarks.pages import RESULTS, ROOT, command
from reporting.evaluation.evaluator import Evaluator
from runtime.devices import start_jax
from training import settings

RECORD, PAGE = RESULTS / "optimizers.json", ROOT / "docs" / "optimizers.md"
NAMES = ("adamw", "muon")
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
SEEDS = (0, 1, 2)


def config(name: str, rate: float, seed: int, steps: int) -> Any:
  c = base.get_config("lm", "single")
  c.optimizer.update(name=name, learning_rate=rate)
  c.update(seed=seed, steps=steps, simulated_devices=1, eval_examples=2048)
  return c


def trained(asked: Any, devices: list[jax.Device]) -> float:
  """The validation loss, in nats a byte, after a run."""
  strategy = strategies.create(asked, settings.program(asked, devices[0].platform), devices)
  dataset = data.load(asked)
  batches, rows = data.Batches(data.mixture(dataset), asked.batch_size, asked.seed), strategy.rows(asked.batch_size)
  state = strategy.init(asked.seed)
  for step in range(asked.steps):
    state, _ = strategy.train_step(state, strategy.shard(batches.read(step, rows), asked.batch_size))
  return Evaluator(strategy, dataset, asked)(state)["loss"]


def measure(steps: int) -> dict[str, Any]:
  """The record: the validation loss of each optimizer, learning rate and seed."""
  begun, devices = started(), start_jax(config(NAMES[0], RATES[0], SEEDS[0], steps))
  run = lambda name, rate, seed: trained(config(name, rate, seed, steps), devices)
  losses: dict[str, list[dict[str, float]]] = {}
  for name in NAMES:
    found = [{"rate": rate, "seed": SEEDS[0], "loss": run(name, rate, SEEDS[0])} for rate in RATES]
    best = min(found, key=lambda one: one["loss"])["rate"]
    losses[name] = found + [{"rate": best, "seed": seed, "loss": run(name, best, seed)} for seed in SEEDS[1:]]
    print(name, losses[name], flush=True)
  fields = config(NAMES[0], RATES[0], SEEDS[0], steps)
  return {
    "command": f"python -m tools.benchmark optimizers --steps={steps}",
    **machine(devices),
    **begun,
    "steps": steps,
    "tokens": fields.batch_size * fields.model.seq_len,
    "parameters": sum(weight.size for weight in weights(settings.program(fields, "cpu").sizes)),
    "losses": losses,
  }


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/optimizers.md."""
  rates = sorted({one["rate"] for found in record["losses"].values() for one in found})
  rows = [
    f"| Optimizer | {' | '.join(f'{rate:g}' for rate in rates)} | Best rate, each seed | Mean | Spread |",
    "|---|" + "---|" * (len(rates) + 3),
  ]
  for name, found in record["losses"].items():
    grid = {one["rate"]: one["loss"] for one in found if one["seed"] == found[0]["seed"]}
    best = min(grid, key=lambda rate: grid[rate])
    losses = seeds(record, name)
    cells = [f"**{grid[rate]:.3f}**" if rate == best else f"{grid[rate]:.3f}" for rate in rates]
    each = ", ".join(f"{loss:.3f}" for loss in losses)
    spread = max(losses) - min(losses)
    rows.append(f"| {name} | {' | '.join(cells)} | {each} | {statistics.mean(losses):.3f} | {spread:.3f} |")
  runs = (
    f"Runs of {record['steps']} steps of {record['tokens']:,} tokens, {record['parameters'] / 1e6:.2f} M parameters."
  )
  return {"muon": "\n".join([*rows, "", f"{runs} {source(record)}"])}


def seeds(record: dict[str, Any], name: str) -> list[float]:
  """The loss of an optimizer's best learning rate from each seed."""
  found = record["losses"][name]
  return [one["loss"] for one in found if one["rate"] == found[-1]["rate"]]


def main() -> None:
  command(__doc__, ("steps", 400, "updates of each run"), PAGE, RECORD, measure, tables, "muon")
