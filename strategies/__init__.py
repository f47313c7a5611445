"""Every way to shard the one Transformer: one file, one idea.

Read layout.py and base.py first, then data_parallel.py, zero1.py, zero2.py, fsdp.py, hsdp.py, tensor_parallel.py and
two_d.py, then the package pipeline/, and last three_d.py. Every module here that defines `LAYOUT` is a strategy, under
the module's name. Nothing else needs to be registered.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from errors import ConfigError, one_of
from strategies.base import Strategy
from strategies.compiler_options import CHOICES, options
from strategies.layout import Layout
from strategies.mesh import OnMesh, make_mesh, resolve
from training.program import Program

__all__ = ["Layout", "OnMesh", "Strategy", "build", "create", "layout_of", "names"]


def _modules() -> dict[str, ModuleType]:
  modules = {info.name: importlib.import_module(f"strategies.{info.name}") for info in pkgutil.iter_modules(__path__)}
  return {name: module for name, module in modules.items() if hasattr(module, "LAYOUT")}


def names() -> list[str]:
  """The names of all strategies, sorted."""
  return sorted(_modules())


def layout_of(name: str) -> Layout:
  """The Layout of a strategy, with unresolved mesh sizes. Raises ConfigError for an unknown name."""
  return _modules()[one_of("strategy", name, names())].LAYOUT


def create(config: Mapping[str, Any], program: Program, devices: Sequence[jax.Device]) -> Strategy:
  """The strategy of a config, on these devices.

  Reads `strategy`, `mesh`, `gather`, `sequence_parallel`, `compiler_options` and the strategy's own section.
  """
  resolved = resolve(layout_of(config["strategy"]), len(devices), config["mesh"])
  mesh = make_mesh(resolved, list(devices))
  used = len({device.process_index for device in mesh.devices.flat})
  if used < jax.process_count():
    raise ConfigError(
      f"strategy={config['strategy']!r} uses the devices of {used} process, but the job has {jax.process_count()} "
      "processes; start one, or use a mesh over all devices"
    )
  strategy = build(config, resolved, program, mesh)
  choice = one_of("compiler_options", config.get("compiler_options", "recommended"), CHOICES)
  strategy.compile_with(options(choice, mesh.devices.flat[0]))
  return strategy


def build(config: Mapping[str, Any], layout: Layout, program: Program, mesh: Mesh | AbstractMesh) -> Strategy:
  """The strategy of a config, with a resolved layout, on a mesh that may be abstract."""
  implementation = getattr(_modules()[config["strategy"]], "STRATEGY", Strategy)
  layout = layout.for_positions(program.model.positions, config.get("sequence_parallel", True))
  fields = config[implementation.section] if implementation.section else {}
  return implementation(layout, program, mesh, gather=config.get("gather", "auto"), **fields)
