"""Prints where the time of a run's recorded steps went.

    python train.py --config=configs/fsdp.py --workdir=WORKDIR --config.profile.steps=5
    python -m tools.profile WORKDIR [--top=20]

Reads the newest recording in WORKDIR/profile: the longest operations, the collectives with their measured and predicted
times, and the share of time in which the devices wait. docs/profile.md explains each line. To predict, it compiles the
step for this machine's devices, if they are of the kind and number that the run had.
"""

import argparse
import collections
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from checkpointing import form
from errors import ConfigError, first_line
from lab.analysis import communication, profile, trace
from lab.analysis.compiled import CompiledStep, DoesNotFit, compile_step
from lab.analysis.links import of_devices
from lab.views.communication import table
from reporting import source
from reporting.pages.units import duration
from runtime import command_line, profiling
from runtime.devices import start_jax
from runtime.hardware import chip
from strategies.execution.strategy import Strategy
from tools.explain import create, cut


class Expected(NamedTuple):
  """What is predicted of one collective. `seconds`: to send, at the links' peak, in a step; None if unknown."""

  kind: str
  axes: tuple[str, ...]
  seconds: float | None


def recording(workdir: Path) -> Path:
  """The folder of the newest recording in a workdir. Raises ConfigError if there is none."""
  folders = (workdir / profiling.FOLDER / profiling.SESSIONS).glob("steps-*")
  found = [file for folder in folders for file in folder.glob("*.xplane.pb")]
  if not found:
    raise ConfigError(
      f"workdir={str(workdir)!r} holds no profile; record one with --config.profile.steps=5 in the command of the run"
    )
  return max(found, key=lambda file: file.stat().st_mtime).parent


def config_of(workdir: Path) -> ConfigDict:
  """The config of the run in a workdir, as far as it says what a step computes. Raises ConfigError if it cannot be."""
  file = workdir / "config.json"
  try:
    return source.config_of(form.read(file), repr(str(file)), source.STEP)
  except (OSError, ValueError) as error:
    if isinstance(error, ConfigError):
      raise
    raise ConfigError(f"{str(file)!r} cannot be read ({first_line(error)}); copy it from the run again") from error


def predicted(config: ConfigDict, devices: tuple[trace.Device, ...]) -> tuple[dict[str, Expected], str]:
  """What is predicted of each collective, by the name of its instruction, and why times are missing ("" if none are).

  Compiles the step. Returns nothing, and the reason, if this machine's devices differ from the run's.
  """
  config.simulated_devices = len(devices)  # which several processes may have shared
  here = start_jax(config)
  kind = {"cpu": "CPU", "tpu": "TPU"}.get(here[0].platform, here[0].device_kind)
  if (kind, len(here)) != (devices[0].kind, len(devices)):
    return {}, f"the run had {len(devices)} × {devices[0].kind}, and this machine has {len(here)} × {kind}"
  try:
    strategy = create(config, None)
    step = compile_step(strategy, config.batch_size)
  except (ConfigError, DoesNotFit) as error:
    return {}, f"the step could not be compiled here ({error})"
  figures = chip(here[0].device_kind)
  missing = "" if figures else f"the peak speeds of {here[0].device_kind!r} are not known"
  return _expected(step, strategy), missing


def _expected(step: CompiledStep, strategy: Strategy) -> dict[str, Expected]:
  mesh = strategy.mesh
  assert isinstance(mesh, Mesh)  # with devices
  figures = chip(mesh.devices.flat[0].device_kind)
  links = figures and of_devices(figures, mesh)
  found: dict[str, Expected] = {}
  # A collective inside a kernel has the kernel's name in a trace.
  kernels = {i.attribute("calls"): name for body in step.module.computations.values() for name, i in body.items()}
  for visit in step.module.walk(step.rounds):
    if collective := communication.collective(visit, step.mesh):
      name = kernels.get(visit.name, visit.instruction.name)
      before = (found[name].seconds if name in found else 0.0) or 0.0
      seconds = before + collective.sent_in_step / links.bandwidth(collective.kind, collective.axes) if links else None
      found[name] = Expected(collective.kind, collective.axes, seconds)
  return found


def text(workdir: Path, top: int) -> str:
  """The page that the command prints."""
  folder = recording(workdir)
  found = trace.read([file.read_bytes() for file in sorted(folder.glob("*.xplane.pb"))], profiling.STEP)
  try:
    figures = profile.profile(found)
  except profile.Unreadable as error:
    raise ConfigError(f"the profile in {str(folder)!r} cannot be used, because {error}; record another") from error
  expected, missing = predicted(config_of(workdir), found.devices)
  steps, kind = found.steps, found.devices[0].kind
  numbers = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
  parts = [
    f"{numbers}, on {len(found.devices)} × {kind}: {duration(figures.median)} a step (median)",
    _operations(figures, found, top),
    _collectives_table(found, expected, missing),
    _waiting(figures),
  ]
  if kind == "CPU":
    parts.append("Simulated devices share the CPU's cores: these times include waiting for a core.")
  return "\n\n".join(part for part in parts if part) + "\n"


def _operations(figures: profile.Profile, found: trace.Trace, top: int) -> str:
  rows: list[tuple[str, ...]] = [("operation", "scope", "a step", "time a step", "of the step")]
  for name, cost in list(figures.operations.items())[:top]:
    origin = profile.scope(figures.origins[name].op_name) if name in figures.origins else ""
    rows.append(
      (name, cut(origin, 60), f"{cost.count:g}", duration(cost.seconds), f"{cost.seconds / figures.mean:.1%}")
    )
  rest = list(figures.operations.values())[top:]
  if rest:
    seconds = sum(cost.seconds for cost in rest)
    rows.append((f"{len(rest)} more", "", "", duration(seconds), f"{seconds / figures.mean:.1%}"))
  return table(rows)


def _collectives_table(found: trace.Trace, expected: Mapping[str, Expected], missing: str) -> str:
  axes = lambda name: expected[name].axes if name in expected else ()
  measured = profile.collectives(found, axes)
  if not measured:
    return "no collectives"
  sums: dict[Any, float] = collections.defaultdict(float)
  for one in expected.values():
    sums[one.kind, one.axes] += one.seconds or 0
  known = any(one.axes for one in expected.values())
  rows: list[tuple[str, ...]] = [
    ("collective", *(["over"] if known else []), "a step", "measured", *([] if missing else ["predicted"]))
  ]
  for (kind, over), cost in sorted(measured.items(), key=lambda item: -item[1].seconds):
    prediction = duration(sums[kind, over]) if (kind, over) in sums else ""
    cells = (kind, *(["+".join(over)] if known else []), f"{cost.count:g}", duration(cost.seconds))
    rows.append(cells if missing else (*cells, prediction))
  return table(rows) + (f"\nNo times are predicted: {missing}." if missing else "")


def _waiting(figures: profile.Profile) -> str:
  rows: list[tuple[str, ...]] = [("of the time, a device", "mean", "least", "most")]
  for what, spread in (("runs nothing", figures.idle), ("runs nothing but collectives", figures.exposed)):
    rows.append((what, f"{spread.mean:.1%}", f"{spread.low:.1%}", f"{spread.high:.1%}"))
  return table(rows)


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("workdir", type=Path)
  parser.add_argument("--top", type=int, default=20, help="how many operations to list (default: 20)")
  options = parser.parse_args(arguments)
  print(text(options.workdir, options.top), end="")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
