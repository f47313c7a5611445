"""What a jitted function of one's own needs and sends, with the lines of its source, without running it.

`python -m tools.explain --program=MODULE:FUNCTION` calls the function with the devices, and compiles what it returns.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import NamedSharding

from errors import ConfigError
from lab.analysis.compiled import DoesNotFit, compile_quietly, options_of, planned
from lab.analysis.origins import origins
from lab.views.communication import with_lines
from reporting.pages.units import amount

FORM = "use MODULE:FUNCTION, a function that takes the devices and returns jax.jit(...).lower(...)"
PARTS = {"argument": "arguments", "output": "results", "temp": "temporary", "total": "in all"}  # `planned`'s names


def lowered(name: str, devices: Sequence[jax.Device]) -> jax.stages.Lowered:
  """The program of a name such as "my.module:step", which is looked for in this folder, too.

  Raises ConfigError if there is none. What the function itself raises is not caught, so its traceback shows the line.
  """
  module, _, function = name.partition(":")
  sys.path.insert(0, os.getcwd())
  try:
    make = getattr(importlib.import_module(module), function)
  except (ModuleNotFoundError, ValueError, AttributeError) as error:
    raise ConfigError(f"program={name!r} does not exist ({error}); {FORM}") from error
  found = make(devices)
  if not isinstance(found, jax.stages.Lowered):
    raise ConfigError(f"program={name!r} returns a {type(found).__name__}; {FORM}")
  return found


def explain(name: str, devices: Sequence[jax.Device]) -> str:
  """What explain prints of a program: its memory, what it sends because of which lines, and XLA's warnings."""
  about = f"{name}, for {len(devices)} × {devices[0].device_kind}"
  try:
    compiled, text, warnings = compile_quietly(lowered(name, devices), options_of(devices[0]))
  except DoesNotFit as error:
    return f"{about}\nThe compiler refuses it: {error}\n"
  sizes = planned(compiled)
  lines = [about, "of a device's memory: " + ", ".join(f"{what} {amount(sizes[key])}" for key, what in PARTS.items())]
  for one in origins(text, _mesh(compiled) or {"devices": len(devices)}):
    lines += with_lines(one)
  return "\n".join([*lines, *warned(warnings)]) + "\n"


def warned(warnings: Sequence[str]) -> list[str]:
  """XLA's warnings as lines."""
  return [f"XLA warns of {one}" for one in warnings]


def _mesh(program: jax.stages.Compiled) -> Mapping[str, int]:
  """The axes of the largest mesh on which an argument or a result is."""
  placed = jax.tree.leaves([program.input_shardings, program.output_shardings])
  meshes = [one.mesh for one in placed if isinstance(one, NamedSharding)]
  return dict(max(meshes, key=lambda mesh: mesh.size).shape) if meshes else {}
