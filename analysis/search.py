"""Searches layouts, meshes, remat policies and microbatches for the fastest step that fits, by formula alone.

The formulas are those of predict.py and theory.py, which tests hold to the compiler; a case costs milliseconds, so all
of them are tried. Sizes of mesh axes are powers of two where the number of devices is one.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import strategies
from analysis import predict, theory
from analysis.case import Case
from analysis.roofline import Roofline, bandwidth
from analysis.topology import Slice
from errors import ConfigError
from models.config import REMAT, ModelConfig
from models.dimensions import DIMENSIONS
from strategies.layout import Layout
from strategies.pipeline import schedule as schedules

USABLE = 0.95  # of a device's memory: the rest is the runtime's
LARGEST = {"model": 32, "stage": 32}  # of mesh axes that wait for each other within a step


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run a step: the fields of a config that say so, and what is predicted of it; `memory` in bytes."""

  strategy: str
  fields: Mapping[str, object]
  case: Case
  memory: float
  times: Roofline


def search(model: ModelConfig, batch_size: int, where: Slice, names: Sequence[str] = ()) -> list[Candidate]:
  """Every candidate that fits into memory, the fastest first; of equally fast ones that which sends least.

  `names` are the strategies to try, all if not given.
  """
  found = []
  for name, layout in _layouts(names or strategies.names(), model, where.devices):
    for remat, accumulation, pipeline in itertools.product(REMAT, (1, 2, 4, 8, 16), _pipelines(layout, model.depth)):
      schedule = _schedule(*pipeline) if pipeline else None
      units = accumulation * (schedule.microbatches if schedule else 1)
      if batch_size % (units * layout.shards("batch")) or (schedule and accumulation > 1):
        continue
      case = Case(layout, dataclasses.replace(model, remat=remat), batch_size, accumulation, schedule)
      candidate = _judge(name, case, where, pipeline)
      if candidate.memory <= USABLE * where.chip.memory:
        found.append(candidate)
  return sorted(found, key=lambda c: (c.times.seconds, c.times.communication + c.times.waiting, c.memory))


def best(found: Sequence[Candidate], count: int, of_one: int = 2) -> list[Candidate]:
  """The first `count`, in their order: each strategy at most `of_one` times, unless there are not enough others."""
  seen: collections.Counter[str] = collections.Counter()
  chosen: list[int] = []
  rest: list[int] = []
  for number, candidate in enumerate(found):
    seen[candidate.strategy] += 1
    (chosen if seen[candidate.strategy] <= of_one else rest).append(number)
  return [found[number] for number in sorted((chosen + rest)[:count])]


def _layouts(names: Sequence[str], model: ModelConfig, devices: int) -> Iterator[tuple[str, Layout]]:
  """Every strategy on every mesh of that many devices that splits the model evenly; equal layouts once."""
  seen = set()
  # Of equals the simplest comes first: it has the fewest axes and, on one device, is made for one.
  simplest_first = lambda name: (len(strategies.layout_of(name).mesh), strategies.layout_of(name).uses_every_axis())
  for name in sorted(names, key=simplest_first):
    template = strategies.layout_of(name)
    axes = list(template.mesh)
    for sizes in _factors(devices, len(axes)):
      mesh = dict(zip(axes, sizes, strict=True))
      layout = template.on(**mesh)
      idle = devices > 1 and not layout.uses_every_axis()
      if idle or any(size > LARGEST.get(axis, size) for axis, size in mesh.items()):
        continue
      try:
        layout.check_divides(model.sizes())
      except ConfigError:
        continue
      # An axis of one device splits nothing: what is left of the layout may be another strategy's, by other names.
      split = [(size, [n for n in DIMENSIONS if axis in layout.axes(n)]) for axis, size in mesh.items() if size > 1]
      if str(split) not in seen:
        seen.add(str(split))
        yield name, layout


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
  """All ways to write a number as a product of so many."""
  if parts == 1:
    yield (number,)
    return
  for first in (n for n in range(1, number + 1) if number % n == 0):
    for rest in _factors(number // first, parts - 1):
      yield first, *rest


def _pipelines(layout: Layout, depth: int) -> list[tuple[str, int, int, int] | None]:
  """Schedules to try: (name, stages, microbatches, chunks). Only where the layout has stages."""
  stages = layout.shards("layers")
  if stages == 1:
    return [None]
  tried: list[tuple[str, int, int, int] | None] = []
  for microbatches in (2 * stages, 4 * stages, 8 * stages):
    tried += [("gpipe", stages, microbatches, 1), ("1f1b", stages, microbatches, 1)]
    if depth % (2 * stages) == 0:
      tried.append(("interleaved", stages, microbatches, 2))
  return tried


@functools.cache
def _schedule(name: str, stages: int, microbatches: int, chunks: int) -> schedules.Schedule:
  return schedules.build(schedules.ORDERS[name], stages, microbatches, chunks)


def _judge(name: str, case: Case, where: Slice, pipeline: tuple[str, int, int, int] | None) -> Candidate:
  spans = spread(case.layout.mesh, (*where.shape, where.cores))

  def to_send(row: theory.Sent) -> float:
    reaches = [math.prod(spans[axis][i] for axis in row.axes) for i in range(len(where.shape))]
    twice = 2 if row.kind in ("all-gather", "reduce-scatter") and where.is_whole(reaches) else 1
    return twice * row.bytes / bandwidth(where.chip, reaches, where.shape)

  fields: dict[str, object] = {f"mesh.{axis}": size for axis, size in case.layout.mesh.items()}
  fields |= {"model.remat": case.model.remat}
  if case.accumulation > 1:
    fields["accumulation"] = case.accumulation
  if pipeline:
    schedule, _, microbatches, chunks = pipeline
    fields |= {"pipeline.schedule": schedule, "pipeline.microbatches": microbatches}
    fields |= {"pipeline.chunks": chunks} if chunks > 1 else {}
  return Candidate(
    strategy=name,
    fields=fields,
    case=case,
    memory=predict.memory(case).total,
    times=predict.times(case, where.chip, to_send),
  )


def spread(mesh: Mapping[str, int], shape: Sequence[int]) -> dict[str, list[int]]:
  """How far each mesh axis reaches along each dimension of a torus: whole dimensions where sizes allow, else parts.

  What `jax.make_mesh` does with the devices themselves, near enough: the innermost axis first.
  """
  left = list(shape)
  spans = {axis: [1] * len(shape) for axis in mesh}
  for axis in reversed(list(mesh)):
    size = mesh[axis]
    whole = next(
      (
        chosen
        for count in range(1, len(left) + 1)
        for chosen in itertools.combinations(range(len(left)), count)
        if math.prod(left[i] for i in chosen) == size
      ),
      (),
    )
    for i in whole:
      spans[axis][i], left[i] = left[i], 1
    size = 1 if whole else size
    while size > 1:
      i = max(range(len(left)), key=lambda i: left[i])
      part = next(n for n in range(min(size, left[i]), 0, -1) if left[i] % n == 0 and size % n == 0)
      if part == 1:  # sizes without a common factor: along one dimension, and over its end
        spans[axis][i] *= size
        break
      spans[axis][i], left[i], size = spans[axis][i] * part, left[i] // part, size // part
  return spans
