"""Measures the throughput of every strategy at 1, 2, 4 and 8 devices, and of transformers' Llama in PyTorch.

    python -m tools.benchmark throughput                                       # all rows (45 minutes); writes the pages
    python -m tools.benchmark throughput --rows=fsdp,data_parallel --devices=8 --rounds=3       # some rows, into runs/
    python -m tools.benchmark throughput --config=configs/single.py:cifar10 --config.batch_size=128    # another model
    python -m tools.benchmark throughput --check=lab/benchmarks/results/NAME.json   # reproduced? (10 minutes at most)
    python -m tools.benchmark throughput --tables                              # writes pages and plots from the records

On a machine with GPUs or TPUs it measures those and makes another record. Elsewhere it simulates devices on the CPU.
The Llama needs `pip install '.[peer]'`, or `--peer-python=` with a Python that has it. lab/benchmarks/README.md and
lab/benchmarks/rounds.py explain how the measuring works.
"""

import argparse
import functools
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from configs import base
from errors import ConfigError, positive
from lab.benchmarks import cells, figures, header, rounds, sections, tables
from lab.benchmarks.comparison import compare
from lab.benchmarks.figures import Record
from lab.benchmarks.options import ROUNDS, STEPS, parse
from lab.benchmarks.pages import ROOT
from runtime import command_line, folders
from training import settings

CHECKING = 570.0  # seconds for --check; with its start and end it takes less than ten minutes
UNSTEADY = 4  # exit status of --check without a verdict
CONFIG = str(ROOT / "configs" / "single.py")


def machine(run: rounds.Run = rounds.run) -> Record:
  """The `hardware` and `versions` of this machine, as a process of its own reports them."""
  found = run(cells.WORKER, {"task": "machine"})
  if "error" in found:
    raise ConfigError(f"the devices here cannot be used: {found['error']}")
  return found


def measure(
  config: Any,
  options: argparse.Namespace,
  found: Record,
  run: rounds.Run = rounds.run,
  among: Iterable[str] | None = None,
  deadline: float = math.inf,
) -> Record:
  """Measures the table on this machine and returns the record.

  Args:
    options: as `parse` returns them.
    found: what `machine` returns.
    among: the names of the cells to measure; None for all.
    deadline: when to end, by time.monotonic; what there is no time for is left out.

  Raises ConfigError if the table cannot be measured here.
  """
  wanted = options.rows or [row for row in cells.rows() if cells.applies(row, config.model.experts)]
  hardware = found["hardware"]
  devices = _devices(options.devices, hardware["devices"])
  cells.check(config)
  program = settings.program(config, hardware["platform"])
  unit, per_example = program.sizes.reads.unit()
  asked = cells.select(config, wanted, devices, options.peer_python, hardware["platform"], program.sizes.dtype)
  asked = [cell for cell in asked if among is None or cell.name in among]
  reason = cells.without_peer(config, hardware["platform"], program.sizes.dtype)
  state = jax.eval_shape(program.init, jax.random.key(0))
  begun = header.started()
  say = functools.partial(print, flush=True)
  with tempfile.TemporaryDirectory() as cache:
    measured = rounds.measure(asked, options.rounds, options.steps, Path(cache), say, run, deadline)
  if all("error" in measured[cell.name] for cell in asked if cell.compiled):
    raise ConfigError(f"no row can be measured: {measured[asked[0].name]['error']}")
  return {
    "kind": "throughput",
    "command": options.command,
    "machine": described(hardware),
    "hardware": hardware | {"peak_flops": hardware["peak_flops"] if program.sizes.dtype == "bfloat16" else None},
    "versions": found["versions"],
    **begun,
    "config": cells.training(config, cells.REFERENCE, 1)["config"],
    "unit": unit,
    "items": config.batch_size * per_example,
    "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
    "rounds": max((turn["turn"] + 1 for cell in measured.values() for turn in cell["rounds"]), default=0),
    "steps": options.steps,
    "left_out": {cells.PEER: reason} if reason else {},
    "cells": measured,
  }


def _devices(asked: Sequence[int], available: int | None) -> list[int]:
  """The numbers of devices to measure at. `available` is None for simulated devices."""
  for count in asked:
    positive("devices", count)
    if available is not None and count > available:
      raise ConfigError(f"devices={count}, but this machine has {available}; use at most {available}")
  return sorted(set(asked)) or [count for count in cells.DEVICES if available is None or count <= available]


def described(hardware: dict[str, Any]) -> str:
  """One line about a machine."""
  host = f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_bytes'] / 2**30:.0f} GiB"
  return (
    f"devices simulated on {host}" if hardware["simulated"] else f"{hardware['devices']} × {hardware['kind']}; {host}"
  )


def read(path: Path) -> Record:
  """Reads a throughput record. Raises ConfigError if the file is not one."""
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    known = ", ".join(f"lab/benchmarks/results/{name}.json" for name in tables.read())
    raise ConfigError(
      f"check={str(path)!r} cannot be read ({error}); use one of: {known or 'no record yet'}"
    ) from error
  whole = {"kind", "hardware", "machine", "versions", "config", "rounds", "steps", "cells"}
  if not isinstance(found, dict) or found.get("kind") != "throughput" or not whole <= found.keys():
    raise ConfigError(f"check={str(path)!r} is not a throughput record; name one that this command has written")
  return found


def again(path: Path, options: argparse.Namespace, run: rounds.Run | None = None) -> int:
  """Measures a record's rows again, in CHECKING seconds, and prints which are reproduced.

  Returns the exit status: 0 if all are reproduced, 1 if some are not, and UNSTEADY if the machine allows no verdict.
  """
  deadline, old = time.monotonic() + CHECKING, read(path)
  run = run or rounds.in_time(deadline)
  options.devices = options.devices or sorted({row.devices for row in figures.rows(old)})
  options.steps = old["steps"]
  config = base.get_config("lm", "single")
  try:
    config.update(old["config"])
  except (KeyError, TypeError, ValueError) as error:
    raise ConfigError(f"check={str(path)!r} has a config of another version ({error}); make a new record") from error
  found = machine(run)
  if found["hardware"]["simulated"] != old["hardware"]["simulated"]:
    raise ConfigError(f"check={str(path)!r} was made on {old['machine']}; measure it again on such a machine")
  lines, good = compare(old, measure(config, options, found, run, old["cells"], deadline))
  print("\n".join(lines))
  return UNSTEADY if good is None else 0 if good else 1


def keep(config: Any, preset: str, options: argparse.Namespace, found: Record) -> None:
  """Measures and writes the record: a complete one, with pages and plots, into results/; a partial one into runs/."""
  name, is_whole = _name(config, preset, found["hardware"]), not (options.rows or options.devices)
  is_whole = is_whole and options.rounds >= ROUNDS and options.steps >= STEPS
  place = lambda whole: options.record or (tables.RESULTS if whole else ROOT / "runs") / name
  folders.writable_file(place(is_whole), "record")
  made = measure(config, options, found)
  whole = is_whole and made["rounds"] == options.rounds  # a run that was stopped is partial too
  path = folders.writable_file(place(whole), "record")
  header.write(path, made)
  print(sections.summary(path.stem, made), sections.details(path.stem, made), sep="\n\n")
  if path.parent.resolve() == tables.RESULTS:
    tables.write()
  print(f"\nrecord in {path}")


def _name(config: Any, preset: str, hardware: dict[str, Any]) -> str:
  """The file name of a record: machine and preset, and a digest of the config if it differs from the preset."""
  cores = f"{hardware['cores']}-cores-of-{hardware['cpu']}"
  words = [cores if hardware["simulated"] else f"{hardware['kind']}-x{hardware['devices']}", preset]
  asked = cells.training(config, cells.REFERENCE, 1)
  if asked != cells.training(base.get_config(preset, "single"), cells.REFERENCE, 1):
    words.append(tables.digest(asked)[:8])
  return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") + ".json"


def main() -> None:
  jax.config.update("jax_platforms", "cpu")  # leaves the accelerators to the processes that measure
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for ^C, complete rounds are kept
  try:
    measure_or_check()
  except KeyboardInterrupt:
    print("stopped: the processes that measured are ended, and nothing was written", file=sys.stderr)
    sys.exit(command_line.INTERRUPTED)


def measure_or_check() -> None:
  """What the command line asks for."""
  with command_line.bad_input_ends_the_program():
    options, rest = parse(sys.argv[1:], __doc__)
    if options.tables:
      return tables.write()
    if options.check:
      sys.exit(again(options.check, options))
    found = machine()
  presets = [word.partition(":")[2] or "lm" for word in rest if word.startswith("--config=")]
  if not presets:
    presets = ["throughput" if found["hardware"]["simulated"] else "throughput_gpu"]
    rest = [f"--config={CONFIG}:{presets[0]}", *rest]
  preset = presets[0] if presets[0] in base.PRESETS else "lm"
  sys.argv[1:] = rest
  command_line.run(lambda config: keep(config, preset, options, found))
