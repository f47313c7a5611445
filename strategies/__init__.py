"""Every way to shard the one Transformer: one file, one idea.

Read layout.py and base.py, then data_parallel.py, fsdp.py, tensor_parallel.py and two_d.py. A module of this package
that defines `LAYOUT` is a strategy: it is found here by that and needs no other registration.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType

import jax

from errors import one_of
from strategies.base import Strategy
from strategies.layout import Layout
from training.program import Program

__all__ = ["Layout", "Strategy", "create", "layout", "names"]


def _modules() -> dict[str, ModuleType]:
  modules = {info.name: importlib.import_module(f"strategies.{info.name}") for info in pkgutil.iter_modules(__path__)}
  return {name: module for name, module in modules.items() if hasattr(module, "LAYOUT")}


def names() -> list[str]:
  """The registered strategies."""
  return sorted(_modules())


def layout(name: str) -> Layout:
  """The Layout of a strategy by its name, mesh sizes not yet resolved."""
  return _modules()[one_of("strategy", name, names())].LAYOUT


def create(
  name: str, program: Program, devices: Sequence[jax.Device], sizes: Mapping[str, int | None] | None = None
) -> Strategy:
  """A strategy by its name on these devices; `sizes` overrides the layout's own mesh sizes where not None."""
  resolved = layout(name).resolve(len(devices), sizes)
  implementation = getattr(_modules()[name], "STRATEGY", Strategy)
  return implementation(resolved, program, resolved.make_mesh(list(devices)))
