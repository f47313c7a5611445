"""Every way to shard the one Transformer: one file, one idea.

Read layout.py and base.py, then data_parallel.py, fsdp.py, hsdp.py, tensor_parallel.py and two_d.py; then the package
pipeline/. A module of this package that defines `LAYOUT` is a strategy. It is found by that name and needs no other
registration.
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
from strategies.layout import Layout
from strategies.mesh import make_mesh, resolve
from training.program import Program

__all__ = ["Layout", "Strategy", "build", "create", "layout_of", "names"]


def _modules() -> dict[str, ModuleType]:
  modules = {info.name: importlib.import_module(f"strategies.{info.name}") for info in pkgutil.iter_modules(__path__)}
  return {name: module for name, module in modules.items() if hasattr(module, "LAYOUT")}


def names() -> list[str]:
  """The registered strategies."""
  return sorted(_modules())


def layout_of(name: str) -> Layout:
  """The Layout of a strategy, its mesh sizes not yet resolved. Raises ConfigError for an unknown name."""
  return _modules()[one_of("strategy", name, names())].LAYOUT


def create(config: Mapping[str, Any], program: Program, devices: Sequence[jax.Device]) -> Strategy:
  """The strategy that a config names (configs/base.py: `strategy`, `mesh` and the strategy's own section)."""
  resolved = resolve(layout_of(config["strategy"]), len(devices), config["mesh"])
  mesh = make_mesh(resolved, list(devices))
  used = len({device.process_index for device in mesh.devices.flat})
  if used < jax.process_count():
    raise ConfigError(
      f"strategy={config['strategy']!r} uses the devices of {used} process, but the job has "
      f"{jax.process_count()}; start one, or use a mesh over all devices"
    )
  return build(config, resolved, program, mesh)


def build(config: Mapping[str, Any], layout: Layout, program: Program, mesh: Mesh | AbstractMesh) -> Strategy:
  """The strategy that a config names, on a given mesh, which may be abstract. `layout` is resolved."""
  implementation = getattr(_modules()[config["strategy"]], "STRATEGY", Strategy)
  fields = config[implementation.section] if implementation.section else {}
  return implementation(layout, program, mesh, **fields)
