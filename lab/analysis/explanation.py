"""Collects the placement, memory, communication and time of a training step in one dict of numbers and texts.

tools/explain.py prints it. Sizes are bytes on one device; times are seconds.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lab.analysis import any_program, gpus, host, memory, predict, spans, theory
from lab.analysis.case import Case
from lab.analysis.communication import Collective
from lab.analysis.compiled import CompiledStep, DoesNotFit, compile_step
from lab.analysis.excess import excess
from lab.analysis.fixes import fixes
from lab.analysis.links import of_devices, spans_slices
from lab.analysis.overlap import Overlap
from lab.analysis.profile import scope
from lab.analysis.reached import RATES
from lab.analysis.roofline import Roofline
from lab.analysis.timeline import timeline
from lab.analysis.topology import Cluster, Machine
from lab.analysis.weights import weights
from models.dimensions import Dims, Sharding
from runtime.hardware import Chip, chip, peak_flops, usable_memory
from strategies.execution.options import options
from strategies.execution.strategy import Strategy
from strategies.layout import Layout, axes_of
from training.transformer import TransformerProgram

WHOLE_STREAM = ("batch", None, None)  # recorded where a layout splits it elsewhere

# Activations by their dimensions.
ACTIVATIONS = {
  ("batch", None): "documents, and positions in them",
  ("batch", "sequence"): "padding",
  ("batch", "sequence", None): "residual stream",
  WHOLE_STREAM: "residual stream, for products",
  ("batch", None, None, None): "images",
  ("batch", None, "heads", None): "heads",
  ("batch", None, "mlp"): "hidden units of the MLP",
  ("vocab", None): "embedding table for lookup",
}
OF_POSITIONS = (WHOLE_STREAM, ("batch", None, "heads", None), ("batch", None, "mlp"))


class Recorder(Sharding):
  """Only records which activations the model constrains."""

  def __init__(self) -> None:
    self.seen: dict[tuple[tuple[int, ...], str, Dims], None] = {}  # in order, without duplicates

  def activation(self, x: jax.Array, *dims: str | None) -> jax.Array:
    self.seen[x.shape, x.dtype.name, dims] = None
    return x

  def whole_sequence(self, x: jax.Array) -> jax.Array:
    return self.activation(x, *WHOLE_STREAM)

  def split_sequence(self, x: jax.Array) -> jax.Array:
    return self.activation(x, "batch", "sequence", None)


def explain(
  name: str,
  strategy: Strategy,
  batch_size: int,
  where: Machine | None = None,
  network: float | None = None,
  compiled: bool = True,
  in_hosts: bool = False,
) -> dict[str, Any]:
  """Compiles the strategy's step for a global batch and reports its placement, memory, communication and time.

  Args:
    where: the slice or cluster of the strategy's devices, if they are not those of this machine.
    network: of this machine's GPUs: bytes/s from each to GPUs that NVLink does not connect to it.
    compiled: whether to compile. If not, everything that only a compiler knows is None.
    in_hosts: whether checkpoints are also saved in the memory of the hosts.
  """
  device = strategy.mesh.devices.flat[0]
  figures = chip(device.device_kind)
  step, error = _compiled(strategy, batch_size) if compiled else (None, None)
  mesh = strategy.mesh
  assert isinstance(mesh, Mesh)  # with devices, which a compiler needs
  links = figures and (where.links_of(mesh) if where else of_devices(figures, mesh, network))
  collectives, dtype = step.collectives() if step else [], strategy.program.traits.dtype
  timed = step.overlap(figures, links) if step and figures and links and peak_flops(device, dtype) else None
  known = {
    "strategy": name,
    "about": strategy.describe(name),
    "mesh": dict(strategy.layout.mesh),
    "device": device.device_kind,
    "network": where.described if where else "",
    "batch_size": batch_size,
    "transfers": _transfers(strategy),
    "communication": _communication(collectives, timed) if step else None,
    "network_known": figures is None or links is not None,
    "compile_seconds": step.seconds if step else None,
    "warnings": step.warnings if step else (),
  }
  capacity = usable_memory(list(mesh.devices.flat))
  if not isinstance(strategy.program, TransformerProgram):
    return known | any_program.facts(strategy, step, error, capacity)
  case = Case.of(strategy, batch_size, device.platform)
  sent = theory.sent(case)
  return known | {
    "weights": _weights(strategy, case),
    "activations": _activations(strategy, case),
    "memory": _memory(name, case, step, error, capacity, device.platform == "tpu")
    | ({"in_hosts": memory.in_hosts(case)} if in_hosts else {}),
    "theory": [row._asdict() for row in sent],
    "excess": excess(case, collectives, sent, _has_default_options(strategy)),
    "timeline": timeline(strategy.schedule) if strategy.schedule else None,
    "bubble": strategy.schedule.idle_time() if strategy.schedule else None,
    "time": _time(strategy, case, step, figures, timed) if step and figures and timed else None,
    "panels": spans.panels(timed) if timed else None,
    "not_known": gpus.NOT_KNOWN if isinstance(where, Cluster) else "",
  }


def _compiled(strategy: Strategy, batch_size: int) -> tuple[CompiledStep | None, DoesNotFit | None]:
  """The compiled step, or why the compiler refuses it."""
  try:
    return compile_step(strategy, batch_size), None
  except DoesNotFit as error:
    return None, error


def _has_default_options(strategy: Strategy) -> bool:
  """Whether there are recommended compiler options that the step is compiled without."""
  device = strategy.mesh.devices.flat[0]
  return strategy.compiler_options != options("recommended", device, strategy.layout, strategy.program.traits.products)


def _weights(strategy: Strategy, case: Case) -> list[dict[str, Any]]:
  shown = strategy.layout.compact
  return [
    {
      "name": weight.name,
      "shape": weight.shape,
      "dims": weight.dims,
      "spec": tuple(shown.spec(weight.dims)),
      "state": tuple(shown.stored_as("state").spec(weight.dims)),  # of the optimizer's moments
      "bytes": case.held(weight) * case.stored_item(weight),
    }
    for weight in weights(strategy.program.sizes)
  ]


def _activations(strategy: Strategy, case: Case) -> list[dict[str, Any]]:
  """The activations of one part of the batch, with their global shapes."""
  recorder, layout = Recorder(), strategy.layout
  # Any kernel has the same. Splash attention would list the blocks of a mask of the whole text: minutes for a long one.
  program = strategy.program.with_sizes(lambda sizes: dataclasses.replace(sizes, attention="plain"))
  size = case.rows * layout.shards("batch")
  fields = program.example_shapes()
  batch = {name: jax.ShapeDtypeStruct((size, *field.shape), field.dtype) for name, field in fields.items()}
  state = program.abstract_state()
  jax.eval_shape(lambda state, batch: program.loss_sums(state.params, batch, state.step, recorder), state, batch)
  # Token ids are pinned as documents are, but no activations.
  seen = [array for array in recorder.seen if program.sizes.segments or array[1] != "int32"]
  shown = {dims: _with_positions(layout, dims) for _, _, dims in seen}
  return [
    {
      "what": "dropout" if dtype == "bool" else ACTIVATIONS.get(dims, ""),
      "shape": shape,
      "dtype": dtype,
      "dims": shown[dims],
      "spec": tuple(layout.compact.spec(shown[dims])),
      "bytes": math.prod(shape) * jnp.dtype(dtype).itemsize // _shards(layout, shown[dims]),
    }
    for shape, dtype, dims in seen
    if dims != WHOLE_STREAM or layout.shards("sequence") > 1
  ]


def _with_positions(layout: Layout, dims: Dims) -> Dims:
  """The dimensions of an activation, where devices share positions. The model constrains own positions, or all."""
  own = layout.shards("positions") > 1 and dims in OF_POSITIONS
  return (dims[0], "positions", *dims[2:]) if own else dims


def _shards(layout: Layout, dims: Dims) -> int:
  """The number of pieces of an array with these dimensions."""
  return math.prod(layout.mesh[axis] for place in layout.spec(dims) for axis in axes_of(place))


def _memory(
  name: str,
  case: Case,
  step: CompiledStep | None,
  error: DoesNotFit | None,
  capacity: float | None,
  compiler_knows: bool,
) -> dict[str, Any]:
  predicted = memory.of(case)
  total: float | None = step.bytes if step else None
  if error:
    total = error.needed or (error.temporary and error.temporary + predicted.state)
  # A compiler that knows its devices' memory rejects a step that does not fit. For others, compare the figures.
  fits = None
  if capacity is not None and (step or error):
    fits = step is not None and (compiler_knows or step.bytes <= capacity)
  return {
    "optimizer": f"{case.optimizer.name}, moments in {case.optimizer.moments}",
    "predicted": dataclasses.asdict(predicted) | {"total": predicted.total},
    "arguments": step.arguments if step else None,
    "temporary": step.temporary if step else error and error.temporary,
    "total": total,
    "host": step.host if step else None,
    "device": capacity,
    "fits": fits,
    "fixes": fixes(name, case, capacity) if fits is False and capacity else [],
  }


def _transfers(strategy: Strategy) -> dict[str, Any]:
  """What the layout makes move, by field of `Transfers`, and in words."""
  transfers = strategy.transfers
  return dataclasses.asdict(transfers) | {"described": transfers.described(strategy.layout.mesh)}


def _communication(collectives: list[Collective], timed: Overlap | None) -> list[dict[str, Any]]:
  """A step's collectives, grouped by kind, mesh axes, and how often they run; with seconds where they are known."""
  seconds = {one.collective.name: one for one in timed.collectives} if timed else {}
  rows: dict[tuple, dict[str, Any]] = {}
  for collective in collectives:
    key = (collective.kind, collective.axes, collective.times, collective.ring)
    row = rows.setdefault(
      key,
      {
        "kind": collective.label,
        "axes": collective.axes,
        "times": collective.times,
        "count": 0,
        "sent": 0.0,
        "sent_in_step": 0.0,
        "seconds": 0.0 if timed else None,
        "exposed": 0.0 if timed else None,
        "scopes": [],
      },
    )
    if (named := scope(collective.op_name)) and named not in row["scopes"]:
      row["scopes"].append(named)
    row["count"] += 1
    row["sent"] += collective.sent
    row["sent_in_step"] += collective.sent_in_step
    if one := seconds.pop(collective.name, None):
      row["seconds"] += one.sent
      row["exposed"] += one.exposed
  return sorted(rows.values(), key=lambda row: -row["sent_in_step"])


def _time(strategy: Strategy, case: Case, step: CompiledStep, figures: Chip, timed: Overlap) -> dict[str, Any]:
  flops, traffic = step.flops(), step.traffic()
  times = Roofline(
    compute=figures.seconds(flops, step.float8_flops()),
    memory=traffic / figures.bandwidth,
    communication=timed.sent,
    exposed=timed.exposed,
    idle=case.idle,
    **host.host_times(case, figures),
    attention=predict.attention_flops(case) / figures.flops,
  )
  rates, peak = RATES["tpu" if figures.torus else "gpu"], figures.flops
  expected = rates.seconds(times)
  sizes, mesh = strategy.program.sizes, strategy.mesh
  assert isinstance(mesh, Mesh)  # with devices: the step has been compiled
  unit, items = sizes.reads.unit()
  used = {one.collective.axes for one in timed.collectives}
  return {
    **dataclasses.asdict(times),
    "seconds": times.seconds,
    "binds": times.binds,
    "expected": expected,
    "expected_mfu": case.model_flops / expected / peak,
    "expected_palm_mfu": case.palm_flops / expected / peak,
    "rests_on": rates.described(strategy.mesh.devices.flat[0].device_kind),
    "mfu": times.mfu(case.model_flops, figures),
    "palm_mfu": times.mfu(case.palm_flops, figures),
    "flops": flops,
    "float8_flops": step.float8_flops(),
    "model_flops": case.model_flops,
    "predicted_flops": predict.flops(case),
    "traffic": traffic,
    "to_host": sum(host.to_host(case)),
    "host_link": figures.host,
    "backward": case.backward,
    "left_out": step.left_out(),
    "beyond": sorted(axes for axes in used if figures.torus and spans_slices(mesh, axes)),
    "per_second": case.batch_size * items / times.seconds,
    "unit": unit,
  }
