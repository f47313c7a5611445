"""The ways to shard the one Transformer: one file, one idea.

Read layout.py first, then data_parallel.py, zero1.py, zero2.py, fsdp.py, hsdp.py, tensor_parallel.py and two_d.py: each
is a layout. Then pipeline.py and three_d.py. The package execution/ says how a layout runs. Every other file here
defines `LAYOUT` and is a strategy, under the file's name. Nothing else needs to be registered. A file of a project is a
strategy under its full name, such as `projects.sounds.pairs`.
"""

import contextlib
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from errors import ConfigError, one_of
from models.dimensions import leaves_of
from strategies.execution.choice import asked_kind, on_device, runner_of, with_way
from strategies.execution.mesh import OnMesh, make_mesh, resolve
from strategies.execution.options import CHOICES, options
from strategies.execution.runner import Asked, Limit, check_limits, within_limits
from strategies.execution.stages.staged import check_fields
from strategies.execution.strategy import Strategy
from strategies.execution.transfers import GATHER, Transfers
from strategies.layout import Layout
from training.program import Program

__all__ = [
  "Layout", "Limit", "OnMesh", "Strategy", "Transfers", "build", "create", "layout_of", "limits", "names",
  "with_way", "within_limits",
]  # fmt: skip


def _modules() -> dict[str, ModuleType]:
  return _modules_in(tuple(__path__))


@functools.cache  # predictions ask for layouts thousands of times
def _modules_in(folders: tuple[str, ...]) -> dict[str, ModuleType]:
  modules = {info.name: importlib.import_module(f"strategies.{info.name}") for info in pkgutil.iter_modules(folders)}
  return {name: module for name, module in modules.items() if hasattr(module, "LAYOUT")}


def _module(name: str) -> ModuleType:
  """The file of a strategy. Raises ConfigError for an unknown name."""
  _, is_of_project, file = name.rpartition("projects.")
  if is_of_project and all(part.isidentifier() for part in file.split(".")):
    with contextlib.suppress(ModuleNotFoundError):
      if hasattr(module := importlib.import_module(f"projects.{file}"), "LAYOUT"):
        return module
  return _modules()[one_of("strategy", name, names())]


def names() -> list[str]:
  """The names of all strategies, sorted."""
  return sorted(_modules())


def layout_of(name: str) -> Layout:
  """The Layout of a strategy, with unresolved mesh sizes. Raises ConfigError for an unknown name."""
  layout: Layout = _module(name).LAYOUT
  return layout


def create(config: Mapping[str, Any], program: Program, devices: Sequence[jax.Device]) -> Strategy:
  """The strategy of a config, on these devices.

  Reads `strategy`, `mesh`, `gather`, `sequence_parallel`, `compiler_options` and `pipeline`.
  """
  resolved = resolve(layout_of(config["strategy"]), len(devices), config["mesh"])
  mesh = make_mesh(resolved, list(devices))
  used = len({device.process_index for device in mesh.devices.flat})
  if used < jax.process_count():
    raise ConfigError(
      f"strategy={config['strategy']!r} uses the devices of {used} process, but the job has {jax.process_count()} "
      "processes; start one, or use a mesh over all devices"
    )
  return build(config, resolved, program, mesh)


def build(config: Mapping[str, Any], layout: Layout, program: Program, mesh: Mesh | AbstractMesh) -> Strategy:
  """The strategy of a config, with a resolved layout, on a mesh that may be abstract."""
  name = config["strategy"]
  gather, pipeline = one_of("gather", config["gather"], GATHER), config["pipeline"]
  choice = one_of("compiler_options", config["compiler_options"], CHOICES)
  layout = layout.for_positions(program.traits.positions, config["sequence_parallel"])
  layout.check_used({*program.traits.activations, *(dim for dims in leaves_of(program.dims()) for dim in dims)})
  layout.check_divides(program.shardable())
  device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
  program = program.with_sizes(lambda sizes: on_device(with_way(sizes, layout), layout, device))
  if layout.axes("layers"):
    check_fields(**pipeline)
  found = limits(name, layout, program)
  check_limits(found)
  program, fallbacks = program.with_sizes(lambda sizes: within_limits(sizes, found)), tuple(found)
  for limit in fallbacks:
    warnings.warn(str(limit), stacklevel=2)

  runner = runner_of(_named(name, "RUNNER", None), program, layout, fallbacks, device, gather, pipeline)
  compiled = options(choice, device, layout, program.traits.products) if device else {}
  return _named(name, "STRATEGY", Strategy)(runner, mesh, compiled)


def limits(name: str, layout: Layout, program: Asked) -> list[Limit]:
  """What this strategy cannot do of such a program, under this layout."""
  asked = asked_kind(_named(name, "RUNNER", None), layout)
  return asked.limits(layout, program) if asked else []


def _named(name: str, what: str, otherwise: Any) -> Any:
  """What a strategy's file defines under this name."""
  return getattr(_module(name), what, otherwise)
