"""The ways to shard the one Transformer: one file, one idea.

Read layout.py first, then data_parallel.py, zero1.py, zero2.py, fsdp.py, hsdp.py, tensor_parallel.py and two_d.py: each
is a layout. Then how a layout runs: transfers.py (what moves), runner.py, by_hand.py and base.py. Then the package
pipeline/, and last three_d.py. Every module here that defines `LAYOUT` is a strategy, under the module's name. Nothing
else needs to be registered.
"""

import dataclasses
import importlib
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from errors import ConfigError, one_of
from models.ops import experts
from models.ops.context import choose
from models.ops.positions import chunks
from models.sizes import ModelSizes
from strategies.base import Strategy
from strategies.by_hand import ByHand
from strategies.compiler_options import CHOICES, options, scatters
from strategies.layout import Layout
from strategies.mesh import OnMesh, make_mesh, resolve
from strategies.pipeline.staged import Staged, check_compiler, check_fields
from strategies.runner import Limit, Runner, within_limits
from strategies.transfers import GATHER, Transfers
from training.optimizer import Optimizer
from training.program import Program

__all__ = [
  "Layout", "Limit", "OnMesh", "Strategy", "Transfers", "build", "create", "layout_of", "limits", "names",
  "with_way", "within_limits",
]  # fmt: skip


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
  layout = layout.for_positions(program.sizes.positions, config["sequence_parallel"])
  layout.check_used()
  layout.check_divides(program.sizes.shardable())
  program = dataclasses.replace(program, sizes=with_way(program.sizes, layout))
  if layout.axes("layers"):
    check_fields(**pipeline)
  found = limits(name, layout, program.sizes, program.optimizer)
  program, fallbacks = dataclasses.replace(program, sizes=within_limits(program.sizes, found)), tuple(found)
  for limit in fallbacks:
    warnings.warn(str(limit), stacklevel=2)

  kind, device = runner_kind(name, layout), mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
  if kind is Staged:
    check_compiler(layout, program.sizes, device.platform if device else "")
    runner: Runner = Staged.make(program, layout, fallbacks, **pipeline)
  else:
    by_hand = kind is not Runner or not scatters(device, layout, program.sizes)
    transfers = Transfers.of(layout, parts=program.accumulation, gather=gather, by_hand=by_hand)
    kind = ByHand if kind is Runner and transfers.by_hand else kind
    runner = kind(program, layout, transfers, fallbacks)
  return _implementation(name)(runner, mesh, options(choice, device, layout) if device else {})


def limits(name: str, layout: Layout, sizes: ModelSizes, optimizer: Optimizer) -> list[Limit]:
  """What this strategy cannot do of such a program, under this layout."""
  return runner_kind(name, layout).limits(layout, sizes, optimizer)


def with_way(sizes: ModelSizes, layout: Layout) -> ModelSizes:
  """The model with the ways in which it reads positions and experts of other devices (models/ops/).

  Raises ConfigError if its positions or heads do not split as this layout asks.
  """
  if sizes.experts:
    transport = experts.choose(sizes.expert_transport, layout.shards("experts"), sizes.experts_per_token)
    sizes = dataclasses.replace(sizes, expert_transport=transport)
  count = layout.shards("positions")
  if count == 1:
    return sizes
  unit = chunks(count)
  if sizes.positions % unit:
    fields = " × ".join(f"mesh.{axis}={layout.mesh[axis]}" for axis in layout.axes("positions"))
    better = -(-sizes.positions // unit) * unit
    fix = f"model.seq_len={better}" if sizes.inputs == "tokens" else "fewer devices along it"
    raise ConfigError(
      f"{fields} gives each device two equal pieces of an example, but its {sizes.positions} positions are not a "
      f"multiple of {unit}; use {fix}"
    )
  heads = layout.shards("heads")
  own_heads, in_stages = (sizes.heads // heads, sizes.kv_heads // heads), layout.shards("layers") > 1
  chosen = choose(sizes.attention_context, count, sizes.positions, *own_heads, permutes=not in_stages)
  return dataclasses.replace(sizes, attention_context=chosen.name, context_why=chosen.why)


def runner_kind(name: str, layout: Layout) -> type[Runner]:
  """The runner that a strategy or its layout asks for. `Runner` becomes `ByHand` if `Transfers.by_hand` has axes."""
  return Staged if layout.shards("layers") > 1 else _implementation(name).RUNNER


def _implementation(name: str) -> type[Strategy]:
  return getattr(_modules()[name], "STRATEGY", Strategy)
