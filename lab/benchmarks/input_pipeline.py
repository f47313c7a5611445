"""Measures how fast batches are read, beside PyTorch's DataLoader and grain, and writes a table of docs/data.md.

    python -m tools.benchmark input_pipeline            # measures (20 minutes), writes the record and the table
    python -m tools.benchmark input_pipeline --tables   # writes the table from the existing record

The peers need `pip install '.[peer]'`, or `--peer-python=` with a Python that has them. CIFAR-10 must be in
TFDS_DATA_DIR. What is missing is left out.

All read the same records, globally shuffled, from prepared files that are in memory (the page cache) already. Each cell
runs in a fresh process for each round, and the cells take turns. input_worker.py measures ours, peer_input.py theirs.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs import base
from errors import ConfigError, above_zero, positive
from lab.benchmarks import rounds
from lab.benchmarks.cells import Cell
from lab.benchmarks.figures import Figure
from lab.benchmarks.header import host, source, started
from lab.benchmarks.pages import RESULTS, ROOT, keep
from lab.benchmarks.sections import table
from runtime import command_line

RECORD, PAGE = RESULTS / "input.json", ROOT / "docs" / "data.md"
WORKER = (sys.executable, "-m", "lab.benchmarks.input_worker")
DEVICES, WORKERS = (1, 2, 4, 8), (0, 2)
AIM = 2.0  # our batches on the host, over those of a peer
# A peer's speed is that of its fastest interface and number of workers.
PEERS = {"PyTorch": {"torch": "DataLoader"}, "grain": {"grain_loader": "DataLoader", "grain_dataset": "MapDataset"}}

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Load:
  """Data and the size of its batches: a preset with some fields changed, and the unit of an example."""

  label: str
  preset: str
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)

  def config(self) -> dict[str, Any]:
    config = base.get_config(self.preset, "data_parallel")
    config.update_from_flattened_dict(self.fields)
    return config.to_dict()


LOADS = {
  "text": Load("text, 16 × 128 tokens", "lm"),
  "long": Load("text, 64 × 2,048 tokens", "lm", {"batch_size": 64, "model.seq_len": 2048}),
  "cifar10": Load("CIFAR-10, 64 images", "cifar10"),
}


def cells(name: str, records: dict[str, Any], seconds: float, peer_python: str) -> list[Cell]:
  """The cells of a case: ours on devices and on the host, and each peer with each number of workers."""
  ours = {"config": LOADS[name].config(), "seconds": seconds}
  found = [
    *(Cell(f"{name}/placed/{n}", name, n, WORKER, ours | {"task": "placed", "devices": n}) for n in DEVICES),
    Cell(f"{name}/host", name, 0, WORKER, ours | {"task": "host"}),
  ]
  # -P keeps this folder off sys.path, so that its modules cannot shadow the peers' imports.
  command = (peer_python, "-P", str(Path(__file__).with_name("peer_input.py")))
  theirs = {key: records[key] for key in ("fields", "count", "batch_size")} | {"seconds": seconds}
  for peer in (kind for kinds in PEERS.values() for kind in kinds):
    for n in WORKERS:
      found.append(Cell(f"{name}/{peer}/{n}", name, 0, command, theirs | {"peer": peer, "workers": n}))
  return found


def measure(options: argparse.Namespace, say: Callable[[str], None], run: rounds.Run = rounds.run) -> Record:
  """Measures all cells and returns the record."""
  records = {}
  for name, case in LOADS.items():
    records[name] = run(WORKER, {"task": "records", "config": case.config()})
    say(f"{case.label}: {records[name].get('error', 'ready')}")
  left_out = {name: found["error"] for name, found in records.items() if "error" in found}
  records = {name: found for name, found in records.items() if name not in left_out}
  if not records:
    raise ConfigError(f"no data can be measured: {'; '.join(left_out.values())}")
  asked = [cell for name in records for cell in cells(name, records[name], options.seconds, options.peer_python)]
  found: dict[str, dict[str, Any]] = {cell.name: {"rounds": []} for cell in asked}
  begun = started()
  versions: dict[str, str] = {}
  for turn in range(options.rounds):
    start = turn * len(asked) // options.rounds
    for place, cell in enumerate(asked[start:] + asked[:start]):
      if "error" in found[cell.name]:
        continue
      into_memory(records[cell.row])
      result = run(cell.command, cell.spec)
      error = result.get("error") or difference(records[cell.row], result)
      if error:
        found[cell.name]["error"] = error
      else:
        kept = {key: result[key] for key in ("batches", "seconds")}
        found[cell.name]["rounds"].append({"turn": turn, "place": place} | kept)
        versions |= {name: v for name, v in result.get("versions", {}).items() if name in ("torch", "grain")}
      shown = error or f"{result['batches'] / result['seconds']:,.0f} batches/s"
      say(f"round {turn + 1}/{options.rounds}  {cell.name:<28} {shown}")
  described = host()
  return {
    "kind": "input",
    "command": f"python -m tools.benchmark input_pipeline --rounds={options.rounds} --seconds={options.seconds:g}",
    **described,
    "versions": described["versions"] | versions,
    **begun,
    "rounds": options.rounds,
    "cases": {name: {key: r[key] for key in ("count", "batch_size", "shapes")} for name, r in records.items()},
    "left_out": left_out,
    "cells": found,
  }


def into_memory(records: dict[str, Any]) -> None:
  """Reads the files of the records, so that they are in the page cache."""
  for field in records["fields"].values():
    with open(field["path"], "rb") as file:
      while file.read(1 << 24):
        pass


def difference(records: dict[str, Any], result: dict[str, Any]) -> str | None:
  """How a process's batches differ from those that it should make; None if they do not."""
  for key in ("shapes", "sums"):
    got = {name: value for name, value in result.get(key, records[key]).items() if name in records[key]}
    if got != records[key]:
      return f"it made other batches: their {key} are {got} and should be {records[key]}"
  return None


def speeds(record: Record, name: str) -> dict[int, float]:
  """The batches a second of a cell in each round."""
  return {turn["turn"]: turn["batches"] / turn["seconds"] for turn in record["cells"][name]["rounds"]}


def fastest(record: Record, case: str, peer: str) -> str | None:
  """The name of a peer's fastest cell; None if it was not measured."""
  names = [f"{case}/{kind}/{n}" for kind in PEERS[peer] for n in WORKERS]
  medians = {name: Figure.of(speeds(record, name).values()).median for name in names if speeds(record, name)}
  return max(medians, key=lambda name: medians[name], default=None)


def ratio(record: Record, case: str, peer: str) -> Figure | None:
  """Our batches on the host over those of a peer, in the rounds in which both were measured."""
  other = fastest(record, case, peer)
  theirs = speeds(record, other) if other else {}
  values = [speed / theirs[turn] for turn, speed in speeds(record, f"{case}/host").items() if turn in theirs]
  return Figure.of(values) if values else None


def tables(record: Record) -> dict[str, str]:
  """The generated part of docs/data.md."""
  cases = list(record["cases"])
  heads = ("Batches/s (examples/s), on the host", "Meshwright", *PEERS, *(f"{peer} = 1" for peer in PEERS))
  on_host, placed, said, missed = [], [], [f"{LOADS[n].label}: {why}" for n, why in record["left_out"].items()], []
  for case in cases:
    label, ratios = LOADS[case].label, {peer: ratio(record, case, peer) for peer in PEERS}
    theirs = [fastest(record, case, peer) for peer in PEERS]
    on_host.append((
      label, _speed(record, f"{case}/host"), *(_speed(record, name) + _how(name) for name in theirs),
      *(found.show(".2f") if found else "–" for found in ratios.values()),
    ))  # fmt: skip
    placed.append((label, *(_speed(record, f"{case}/placed/{n}") for n in DEVICES)))
    missed += [
      f"{label}, {peer}: {found.median:.2f}" for peer, found in ratios.items() if found and round(found.median, 2) < AIM
    ]
  errors = {name.partition("/")[2]: cell["error"] for name, cell in record["cells"].items() if "error" in cell}
  said += [f"{name}: {why}" for name, why in errors.items()]
  compared = any(ratio(record, case, peer) for case in cases for peer in PEERS)
  aim = f"The aim is {AIM:g} times both. " + (f"Missed: {'; '.join(missed)}." if missed else "It is met.")
  parts = [
    "\n".join(table(heads, on_host)),
    *([aim] if compared else []),
    "\n".join(table(("Batches/s (examples/s), placed", *(f"{n} device{'s'[: n > 1]}" for n in DEVICES)), placed)),
    *(f"Not measured: {why}" for why in said),
    source(record),
  ]
  return {"input": "\n\n".join(parts)}


def _speed(record: Record, name: str | None) -> str:
  found = speeds(record, name) if name else {}
  if not name or not found:
    return "–"
  speed = Figure.of(found.values()).median
  return f"{speed:,.0f} ({speed * record['cases'][name.partition('/')[0]]['batch_size']:,.0f})"


def _how(name: str | None) -> str:
  """The interface and the workers of a peer's cell."""
  if name is None:
    return ""
  _, kind, workers = name.split("/")
  return f", {next(kinds[kind] for kinds in PEERS.values() if kind in kinds)}, {workers} workers"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The options of the command. Raises ConfigError for bad values."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the table from the existing record")
  parser.add_argument("--rounds", type=int, default=5, help="each measures every cell once (default: 5)")
  parser.add_argument("--seconds", type=float, default=2.0, help="to measure a cell for (default: 2)")
  parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="a Python with the peers")
  parser.add_argument("--record", type=Path, metavar="FILE", help="write the record there, and no table")
  options = parser.parse_args(arguments)
  positive("rounds", options.rounds)
  above_zero("seconds", options.seconds, "--seconds=2")
  return options


def main() -> None:
  with command_line.bad_input_ends_the_program():
    options = parse(sys.argv[1:])
    keep(options, PAGE, RECORD, lambda: measure(options, lambda line: print(line, flush=True)), tables)
