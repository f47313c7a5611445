"""Searches layouts, meshes, remat policies and microbatches for the fastest step that fits into memory.

The search uses only the formulas of predict.py and theory.py, which tests compare with compilers. A case takes
milliseconds, so the search tries all of them.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import strategies
from errors import ConfigError
from lab.analysis import memory, predict, theory
from lab.analysis.case import ADAMW, Case
from lab.analysis.reached import RATES
from lab.analysis.roofline import Roofline
from lab.analysis.topology import Machine
from models.expert_sizes import WAYS as TRANSPORTS
from models.ops.context import WAYS
from models.ops.pieces import TILE
from models.sizes import REMAT, ModelSizes
from reporting.pages.units import duration
from strategies.execution.stages import orders
from strategies.execution.stages.schedule import Schedule
from strategies.execution.stages.staged import UNEVEN, each_has_layers
from strategies.layout import PLACES, Layout
from training.optimizer import Optimizer

ALIKE = 0.01  # the difference of expected times up to which plans are equally fast
DOUBT = 0.1  # the share of a step's time from which on an uncertain part of it is reported
# Devices along axes that split these dimensions wait for each other within a step, so such axes are at most this large.
WAITING, LARGEST = ("heads", "mlp", "vocab", "layers"), 32


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run a step, and its predicted memory and time.

  Attributes:
    fields: the config fields that select it.
    memory: bytes on one device.
    where: the devices.
  """

  strategy: str
  fields: Mapping[str, object]
  case: Case
  memory: float
  times: Roofline
  where: Machine

  @functools.cached_property
  def expected(self) -> float:
    """Seconds that a step is expected to take."""
    return RATES[self.where.platform].seconds(self.times)

  @property
  def simplicity(self) -> tuple[int, bool, bool]:
    """Plans with smaller values are simpler: few mesh axes, no pipeline, the batch as one part."""
    axes = sum(size > 1 for size in self.case.layout.mesh.values())
    return axes, self.case.schedule is not None, self.case.accumulation > 1

  @functools.cached_property
  def doubt(self) -> str:
    """Why compilers may be more than a tenth slower or faster; "" if they were not in recorded cases of this kind."""
    return doubt(self.case, self.times, self.where)


def chosen_fields(candidate: Candidate, config: Any) -> dict[str, Any]:
  """The fields that a plan chooses, and an evaluation batch size that splits."""
  case, size = candidate.case, config.eval_batch_size
  unit = case.layout.shards("batch") * (case.schedule.microbatches if case.schedule else 1)
  splits = {} if size % unit == 0 else {"eval_batch_size": math.ceil(size / unit) * unit}
  return dict(candidate.fields) | splits


def search(
  sizes: ModelSizes,
  batch_size: int,
  where: Machine,
  names: Sequence[str] = (),
  sequence_parallel: bool = True,
  optimizer: Optimizer = ADAMW,
) -> list[Candidate]:
  """Every candidate that fits into memory, the fastest first by the expected time; see `in_order`.

  Args:
    names: the strategies to try; all if not given.
    sequence_parallel: the config's field.
  """
  found = []
  for name, layout in _layouts(names or strategies.names(), sizes, where.count, sequence_parallel):
    for asked in _variants(sizes, layout):
      try:
        case = Case(layout, asked, batch_size, optimizer=optimizer)
        chosen = strategies.within_limits(asked, strategies.limits(name, layout, case))
        chosen = strategies.with_way(chosen, layout)
      except ConfigError:
        continue
      if sizes.attention_context == "auto" and chosen.attention_context != asked.attention_context:
        continue  # it would run as another of these ways
      for case, pipeline in _cases(Case(layout, chosen, batch_size, compiler=where.platform, optimizer=optimizer)):
        candidate = _candidate(name, case, where, pipeline)
        if candidate.memory <= where.chip.memory:
          found.append(candidate)
  return in_order(found)


def in_order(found: Sequence[Candidate]) -> list[Candidate]:
  """The fastest first. Of those within `ALIKE` of the fastest that is left, the simplest first, then the fastest."""
  left = sorted(found, key=lambda c: c.expected)
  ordered: list[Candidate] = []
  while left:
    count = bisect.bisect_right(left, left[0].expected * (1 + ALIKE), key=lambda c: c.expected)
    ordered += sorted(left[:count], key=lambda c: (c.simplicity, c.expected, c.times.communication, c.memory))
    left = left[count:]
  return ordered


def _variants(sizes: ModelSizes, layout: Layout) -> Iterator[ModelSizes]:
  """The model with every remat policy, and every way to reach the positions and experts of other devices."""
  ask = lambda way, ways, dim: ways[1:] if way == "auto" and layout.shards(dim) > 1 else [way]
  contexts = ask(sizes.attention_context, WAYS, "positions") if sizes.mixes.per_pair(sizes) else ["auto"]
  transports = ask(sizes.experts.transport, TRANSPORTS, "experts") if sizes.experts else [""]
  for remat, context, transport in itertools.product(REMAT, contexts, transports):
    experts = sizes.experts and dataclasses.replace(sizes.experts, transport=transport)
    yield dataclasses.replace(sizes, remat=remat, attention_context=context, experts=experts)


def _cases(case: Case) -> Iterator[tuple[Case, tuple[str, int, int, int] | None]]:
  """The case in parts, by accumulation or by a pipeline's schedule, with that schedule as in `_pipelines`."""
  layout = case.layout
  for accumulation, pipeline in itertools.product(
    (1, 2, 4, 8, 16), _pipelines(layout, case.sizes.depth - case.sizes.first_layers)
  ):
    schedule = _schedule(*pipeline) if pipeline else None
    if schedule and accumulation > 1:
      continue
    made = dataclasses.replace(case, accumulation=accumulation, schedule=schedule)
    # Devices need not divide the batch (`Case.rows`), but less than half of what they compute may be padding.
    rows = made.rows * made.batch_parts * layout.shards("batch")
    if case.batch_size % made.batch_parts == 0 and rows < 2 * case.batch_size:
      yield made, pipeline
      if accumulation > 1 and set(layout.axes("embed")) & set(layout.axes("batch")):
        yield dataclasses.replace(made, gather="step"), pipeline


def best(found: Sequence[Candidate], count: int, of_one: int = 2) -> list[Candidate]:
  """The first `count` candidates in their order, at most `of_one` of each strategy if there are enough others."""
  seen: collections.Counter[str] = collections.Counter()
  chosen: list[int] = []
  rest: list[int] = []
  for number, candidate in enumerate(found):
    seen[candidate.strategy] += 1
    (chosen if seen[candidate.strategy] <= of_one else rest).append(number)
  return [found[number] for number in sorted((chosen + rest)[:count])]


def _layouts(
  names: Sequence[str], sizes: ModelSizes, devices: int, sequence_parallel: bool = True
) -> Iterator[tuple[str, Layout]]:
  """Every strategy on every mesh of this many devices that may split the model, without equal layouts."""
  seen = set()
  # Of equal layouts, keep the strategy with the fewest mesh axes; on one device, keep `single`.
  simplest_first = lambda name: (len(strategies.layout_of(name).mesh), strategies.layout_of(name).uses_every_axis())
  for name in sorted(names, key=simplest_first):
    template = strategies.layout_of(name)
    axes = list(template.mesh)
    for factors in _factors(devices, len(axes)):
      mesh = dict(zip(axes, factors, strict=True))
      layout = template.on(**mesh).for_positions(sizes.positions, sequence_parallel)
      idle = devices > 1 and not layout.uses_every_axis()
      waiting = {axis for dim in WAITING for axis in layout.axes(dim)}
      idle |= layout.shards("experts") > 1 and not sizes.experts
      sharers = layout.shards("positions")
      idle |= not each_has_layers(layout.shards("layers"), sizes.depth - sizes.first_layers)
      idle |= sharers > 1 and sizes.positions // sharers < TILE  # kernels of attention work on no fewer positions
      if idle or any(mesh[axis] > LARGEST for axis in waiting):
        continue
      try:
        layout.check_divides(sizes.shardable())
      except ConfigError:
        continue
      # Without its axes of size 1, a layout may equal another strategy's layout, except for the names of axes.
      split = [(size, [p for p in PLACES if axis in layout.axes(p)]) for axis, size in mesh.items() if size > 1]
      if str(split) not in seen:
        seen.add(str(split))
        yield name, layout


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
  """All ways to write a number as a product of `parts` factors."""
  if parts == 1:
    yield (number,)
    return
  for first in (n for n in range(1, number + 1) if number % n == 0):
    for rest in _factors(number // first, parts - 1):
      yield first, *rest


def _pipelines(layout: Layout, depth: int) -> list[tuple[str, int, int, int] | None]:
  """Schedules to try: (name, stages, microbatches, chunks), or None if the layout has only one stage."""
  stages = layout.shards("layers")
  if stages == 1:
    return [None]
  tried: list[tuple[str, int, int, int] | None] = []
  for microbatches in (2 * stages, 4 * stages, 8 * stages):
    names = UNEVEN if depth % stages else (*UNEVEN, "zero_bubble")
    tried += [(name, stages, microbatches, 1) for name in names]
    if depth % (2 * stages) == 0:
      tried.append(("interleaved", stages, microbatches, 2))
  return tried


@functools.cache
def _schedule(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
  return orders.build(orders.ORDERS[name], stages, microbatches, chunks)


def _candidate(name: str, case: Case, where: Machine, pipeline: tuple[str, int, int, int] | None) -> Candidate:
  """A case with its predictions."""
  fields: dict[str, object] = {f"mesh.{axis}": size for axis, size in case.layout.mesh.items()}
  fields |= {"model.remat": case.sizes.remat}
  if case.sharers > 1 and case.sizes.mixes.per_pair(case.sizes):
    fields["model.attention_context"] = case.sizes.attention_context
  if case.sizes.experts and case.layout.shards("experts") > 1:
    fields["model.expert_transport"] = case.sizes.experts.transport
  if case.accumulation > 1:
    fields["accumulation"] = case.accumulation
  if case.gather == "step":
    fields["gather"] = "step"
  if pipeline:
    schedule, _, microbatches, chunks = pipeline
    fields |= {"pipeline.schedule": schedule, "pipeline.microbatches": microbatches}
    fields |= {"pipeline.chunks": chunks} if chunks > 1 else {}
  return Candidate(
    strategy=name,
    fields=fields,
    case=case,
    memory=memory.of(case).total,
    times=predict.times(case, where.chip, where.links(case.layout.mesh)),
    where=where,
  )


def doubt(case: Case, times: Roofline, where: Machine) -> str:
  """Why the time of a step may be off by more than `DOUBT`; "" if nothing is known (lab/benchmarks/planned.py)."""
  links, split = where.links(case.layout.mesh), {*case.axes("heads"), *case.axes("mlp")}
  rows = theory.sent(case)
  seconds = lambda row, numbers: numbers / links.bandwidth(row.kind, row.axes)
  if times.memory > (1 + DOUBT) * times.compute:
    return "memory binds, and its traffic is only an estimate"
  if case.sizes.experts:
    return "the loads of experts may be unequal"
  exchanged = sum(seconds(row, row.bytes - row.edges) for row in rows if split & set(row.axes))
  if exchanged > DOUBT * times.seconds:
    return f"tensor parallelism exchanges activations for {duration(exchanged)}, and compilers differ in what they hide"
  reduced = sum(seconds(row, row.bytes) for row in rows if row.kind == "all-reduce")
  if case.compiler == "gpu" and reduced > DOUBT * times.seconds:
    return f"gradients are all-reduced for {duration(reduced)}, and kernels may wait for that"
  return ""
