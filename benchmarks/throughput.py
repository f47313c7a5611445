"""The throughput table: every strategy at 1, 2, 4 and 8 devices, PyTorch and the input pipeline beside them.

    python -m benchmarks.throughput                                        # long; writes benchmarks/README.md
    python -m benchmarks.throughput --rows=fsdp,data_parallel --devices=8 --rounds=3          # a part of it, into runs/
    python -m benchmarks.throughput --config=configs/single.py:cifar10 --config.batch_size=128     # another model
    python -m benchmarks.throughput --check=benchmarks/results/NAME.json   # measures again: are the rows reproduced?
    python -m benchmarks.throughput --tables                               # writes page and plots from the records

Devices are simulated from the CPU where there is no accelerator; the same command on a GPU or TPU machine makes
another record. The peer needs `pip install '.[peer]'`, or `--peer-python=` with a Python that has PyTorch. How it is
measured: benchmarks/README.md, benchmarks/rounds.py.
"""

import argparse
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import cells, figures, rounds, tables
from benchmarks.comparison import compare
from benchmarks.figures import Record
from benchmarks.pages import ROOT
from configs import base
from errors import ConfigError, one_of, positive
from runtime import command_line, folders
from training import settings

CONFIG = str(ROOT / "configs" / "single.py")
ROUNDS, STEPS = 5, 3  # of a whole record: at least so many
# What can stand beside an option that says what the command does.
BESIDE = {"tables": {"tables"}, "check": {"check", "rows", "devices", "rounds", "peer_python"}}


def machine(run: rounds.Run = rounds.run) -> Record:
  """What there is to measure on: `hardware` and `versions`. Found by a process that has ended when this returns."""
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
) -> Record:
  """Measures the table on the machine that was found; see `parse` for the options.

  Args:
    among: names of cells; others are left out.

  Raises ConfigError for what cannot be measured here.
  """
  wanted = options.rows or cells.rows()
  hardware = found["hardware"]
  devices = _devices(options.devices, hardware["devices"])
  cells.check(config)
  program = settings.program(config, hardware["platform"])
  unit, per_example = program.model.unit
  asked = cells.plan(config, wanted, devices, options.peer_python, hardware["platform"], program.model.dtype)
  asked = [cell for cell in asked if among is None or cell.name in among]
  reason = cells.without_peer(config, hardware["platform"], program.model.dtype)
  state = jax.eval_shape(program.init, jax.random.key(0))
  (commit, dirty), load = _commit(), os.getloadavg()[0]  # by which a reader sees whether the machine was quiet
  say = functools.partial(print, flush=True)
  with tempfile.TemporaryDirectory() as cache:
    measured = rounds.measure(asked, options.rounds, options.steps, Path(cache), say, run)
  if all("error" in measured[cell.name] for cell in asked if cell.compiled):
    raise ConfigError(f"no row can be measured: {measured[asked[0].name]['error']}")
  return {
    "kind": "throughput",
    "command": options.command,
    "machine": _machine(hardware),
    "hardware": hardware | {"peak_flops": hardware["peak_flops"] if program.model.dtype == "bfloat16" else None},
    "versions": found["versions"],
    "commit": commit,
    "dirty": dirty,
    "load": load,
    "config": cells.training(config, cells.REFERENCE, 1)["config"],
    "unit": unit,
    "items": config.batch_size * per_example,
    "flops": config.batch_size * program.model.train_flops_per_example(),
    "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
    "rounds": max((turn["turn"] + 1 for cell in measured.values() for turn in cell["rounds"]), default=0),
    "steps": options.steps,
    "left_out": {cells.PEER: reason} if reason else {},
    "cells": measured,
  }


def _devices(asked: Sequence[int], there: int | None) -> list[int]:
  """The numbers of devices to measure at; `there` is how many there are, None where they are simulated."""
  for count in asked:
    positive("devices", count)
    if there is not None and count > there:
      raise ConfigError(f"devices={count}, but this machine has {there}; use at most {there}")
  return sorted(set(asked)) or [count for count in cells.DEVICES if there is None or count <= there]


def _machine(hardware: dict[str, Any]) -> str:
  host = f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_bytes'] / 2**30:.0f} GiB"
  return (
    f"devices simulated on {host}" if hardware["simulated"] else f"{hardware['devices']} × {hardware['kind']}; {host}"
  )


def _commit() -> tuple[str | None, bool]:
  """The commit of the repository, and whether files differ from it."""
  try:
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return git("rev-parse", "--short=12", "HEAD").stdout.strip(), bool(git("status", "--porcelain", "-uno").stdout)
  except (OSError, subprocess.CalledProcessError):
    return None, False


def read(path: Path) -> Record:
  """A throughput record. Raises ConfigError where there is none."""
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    known = ", ".join(f"benchmarks/results/{name}.json" for name in tables.read())
    raise ConfigError(f"check={str(path)!r} cannot be read ({error}); there is: {known or 'no record yet'}") from error
  whole = {"kind", "hardware", "machine", "versions", "config", "rounds", "steps", "cells"}
  if not isinstance(found, dict) or found.get("kind") != "throughput" or not whole <= found.keys():
    raise ConfigError(f"check={str(path)!r} is no throughput record; name one that this command has written")
  return found


def again(path: Path, options: argparse.Namespace, run: rounds.Run = rounds.run) -> int:
  """Measures a record's rows again and tells which are reproduced; exit status 1 if some are not."""
  old = read(path)
  options.devices = options.devices or sorted({row.devices for row in figures.rows(old)})
  options.steps = old["steps"]
  config = base.get_config("lm", "single")
  try:
    config.update(old["config"])
  except (KeyError, TypeError, ValueError) as error:
    raise ConfigError(f"check={str(path)!r} has a config of another version ({error}); measure it anew") from error
  found = machine(run)
  if found["hardware"]["simulated"] != old["hardware"]["simulated"]:
    raise ConfigError(f"check={str(path)!r} was made on {old['machine']}; measure it again on such a machine")
  lines, good = compare(old, measure(config, options, found, run, old["cells"]))
  print("\n".join(lines))
  return 0 if good else 1


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
  """The options of this command, and the rest, which are the config's. Raises ConfigError for bad ones."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--rows", default="", help=f"with commas: {', '.join(cells.rows())}; all if not given")
  parser.add_argument("--devices", default="", help="with commas; 1,2,4,8 as far as they are there if not given")
  parser.add_argument("--rounds", default="", help=f"in which each row is timed once; {ROUNDS} if not given")
  parser.add_argument("--steps", default="", help=f"that are timed in a round; {STEPS} if not given")
  parser.add_argument("--peer-python", default="", metavar="PATH", help="a Python that has PyTorch; else this one")
  parser.add_argument("--record", type=Path, metavar="FILE", help="to write; benchmarks/results/NAME.json if not given")
  parser.add_argument("--check", type=Path, metavar="FILE", help="a record to measure again")
  parser.add_argument("--tables", action="store_true", help="only write the page and its plots again")
  options, rest = parser.parse_known_args(arguments)
  given = [name for name, value in vars(options).items() if value]
  for mode, beside in BESIDE.items():
    extra = [*rest, *(f"--{name.replace('_', '-')}" for name in given if name not in beside)]
    if mode in given and extra:
      raise ConfigError(f"argument {extra[0]!r} has no place beside --{mode}; leave it out")
  # What is a place on this machine is no part of the command.
  said = [f"--{name}={getattr(options, name)}" for name in ("rows", "devices", "rounds", "steps") if name in given]
  options.command = shlex.join(["python", "-m", "benchmarks.throughput", *said, *rest])
  options.rows = [one_of("rows", row, cells.rows()) for row in options.rows.split(",") if row]
  options.devices = [_number("devices", count) for count in options.devices.split(",") if count]
  options.rounds = _number("rounds", options.rounds or str(ROUNDS))
  options.steps = _number("steps", options.steps or str(STEPS))
  options.peer_python = options.peer_python or sys.executable
  if shutil.which(options.peer_python) is None:
    raise ConfigError(f"peer-python={options.peer_python!r} is no program; name a Python that has PyTorch")
  return options, rest


def _number(field: str, text: str) -> int:
  if not text.isdigit():
    raise ConfigError(f"{field}={text!r} is no number; use a positive one, such as --{field}=3")
  return positive(field, int(text))


def keep(config: Any, preset: str, options: argparse.Namespace, found: Record) -> None:
  """Measures, and writes the record: a whole one among the results, with the page and the plots; a part into runs/."""
  name, is_whole = _name(config, preset, found["hardware"]), not (options.rows or options.devices)
  is_whole = is_whole and options.rounds >= ROUNDS and options.steps >= STEPS
  place = lambda whole: options.record or (tables.RESULTS if whole else ROOT / "runs") / name
  folders.writable_file(place(is_whole), "record")
  made = measure(config, options, found)
  whole = is_whole and made["rounds"] == options.rounds  # one that was stopped is a part too
  path = folders.writable_file(place(whole), "record")
  path.write_text(json.dumps(made, indent=1) + "\n")
  print(tables.section(path.stem, made))
  if path.parent.resolve() == tables.RESULTS:
    tables.write()
  print(f"\nrecord in {path}")


def _name(config: Any, preset: str, hardware: dict[str, Any]) -> str:
  """The file of a record: the machine and the preset; of a config that is no preset a digest besides."""
  cores = f"{hardware['cores']}-cores-of-{hardware['cpu']}"
  words = [cores if hardware["simulated"] else f"{hardware['kind']}-x{hardware['devices']}", preset]
  asked = cells.training(config, cells.REFERENCE, 1)
  if asked != cells.training(base.get_config(preset, "single"), cells.REFERENCE, 1):
    words.append(tables.digest(asked)[:8])
  return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") + ".json"


def main() -> None:
  jax.config.update("jax_platforms", "cpu")  # of this process: the accelerators are for those that measure
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # keeps whole rounds, as ^C does
  try:
    options, rest = parse(sys.argv[1:])
    if options.tables:
      return tables.write()
    if options.check:
      sys.exit(again(options.check, options))
    found = machine()
  except ConfigError as error:
    command_line.fail(error, status=2)
  presets = [word.partition(":")[2] or "lm" for word in rest if word.startswith("--config=")]
  if not presets:
    presets = ["throughput" if found["hardware"]["simulated"] else "throughput_gpu"]
    rest = [f"--config={CONFIG}:{presets[0]}", *rest]
  preset = presets[0] if presets[0] in base.PRESETS else "lm"
  sys.argv[1:] = rest
  command_line.run(lambda config: keep(config, preset, options, found))


if __name__ == "__main__":
  main()
