"""Pipeline schedules as tables: what each stage does at each tick.

A unit is the forward or backward pass of one microbatch through one chunk of layers. A schedule is defined by the order
in which each stage runs its units (`ORDERS`). `build` simulates these orders tick by tick: a unit runs as soon as its
inputs have arrived, and every value that has to wait gets a slot of memory. This file does not use JAX; stage.py runs
the tables, and analysis/timeline.py draws them.
"""

import dataclasses
import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

IDLE, FORWARD, BACKWARD = 0, 1, 2


class Unit(NamedTuple):
  """The forward or backward pass (`kind`) of one microbatch through one chunk of a stage's layers.

  Chunk c of stage s is part c · stages + s of the model.
  """

  kind: int
  microbatch: int
  chunk: int


# The values that wait on a stage: the input of a forward unit, the residuals it saves for its backward unit, and the
# cotangent that a backward unit starts from.
WAITS = ("activation", "residuals", "cotangent")
COLUMNS = (*Unit._fields, *WAITS, "put_activation", "put_cotangent")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """What every stage does at every tick.

  Attributes:
    table: column → int32 [ticks, stages]. `kind`, `microbatch` and `chunk` define the unit. `activation`, `residuals`
      and `cotangent` are the slots that it reads. A forward unit writes `residuals`, and at the end of the model also
      `cotangent`. `put_activation` and `put_cotangent` are the slots for the values that arrive from the neighbours
      before the unit runs. Values that nobody needs go to a spare slot, after the last one.
    slots: for each name in `WAITS`, how many of these values wait at the same time on the busiest stage.
  """

  stages: int
  chunks: int
  microbatches: int
  table: dict[str, np.ndarray]
  slots: dict[str, int]

  @property
  def ticks(self) -> int:
    return len(self.table["kind"])

  @property
  def bubble(self) -> float:
    """The share of (tick, stage) pairs in which a stage is idle."""
    return float(np.mean(self.table["kind"] == IDLE))


def gpipe(stage: int, stages: int, chunks: int, microbatches: int) -> list[Unit]:
  """All forward units, then all backward units (Huang et al. 2018, arXiv:1811.06965)."""
  return [Unit(kind, m, 0) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, chunks: int, microbatches: int) -> list[Unit]:
  """Forward units until the first cotangent can arrive, then forward and backward units in turn.

  With several chunks, microbatches form groups of as many as there are stages. A group passes through one chunk after
  another (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, which also names the predecessors).
  """
  groups = [range(start, min(start + stages, microbatches)) for start in range(0, microbatches, stages)]
  forward = [Unit(FORWARD, m, c) for group in groups for c in range(chunks) for m in group]
  backward = [Unit(BACKWARD, m, c) for group in groups for c in reversed(range(chunks)) for m in group]
  ahead = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
  ahead = min(ahead, len(forward))
  pairs = zip(forward[ahead:], backward, strict=False)
  return forward[:ahead] + [unit for pair in pairs for unit in pair] + backward[len(forward) - ahead :]


def forward_only(stage: int, stages: int, chunks: int, microbatches: int) -> list[Unit]:
  """Only forward units, for evaluation."""
  return [Unit(FORWARD, m, 0) for m in range(microbatches)]


Order = Callable[[int, int, int, int], list[Unit]]  # (stage, stages, chunks, microbatches) → the stage's units in order
ORDERS: dict[str, Order] = {
  "gpipe": gpipe,
  "1f1b": one_forward_one_backward,
  "interleaved": one_forward_one_backward,
}


def fills_groups(stages: int, microbatches: int, chunks: int) -> bool:
  """Whether the microbatches form whole groups, or a single one. With several chunks the stages deadlock otherwise."""
  return chunks == 1 or microbatches <= stages or microbatches % stages == 0


def build(order: Order, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
  """Builds a schedule: every stage runs each unit of its order at the first tick at which the unit's inputs are ready.

  Raises ValueError if an order leaves a unit out or repeats one, or if the stages deadlock.
  """
  orders = [order(stage, stages, chunks, microbatches) for stage in range(stages)]
  kinds = {unit.kind for unit in orders[0]}
  wanted = sorted(Unit(kind, m, c) for kind in kinds for m in range(microbatches) for c in range(chunks))
  if any(sorted(units) != wanted for units in orders):
    raise ValueError("an order leaves a unit out or repeats one")
  queues = [iter(units) for units in orders]
  heads = [next(queue, None) for queue in queues]
  ticks: dict[tuple[int, Unit], int] = {}  # (stage, unit) → the tick it runs at
  tick = 0
  while any(heads):
    ready = [
      (stage, unit)
      for stage, unit in enumerate(heads)
      if unit and all(need in ticks for need in needs(stage, unit, stages, chunks))
    ]
    if not ready:
      raise ValueError(f"deadlock: at tick {tick} every stage waits for another one: {heads}")
    for stage, unit in ready:
      ticks[stage, unit] = tick
      heads[stage] = next(queues[stage], None)
    tick += 1
  return _with_slots(ticks, stages, chunks, microbatches)


def needs(stage: int, unit: Unit, stages: int, chunks: int) -> list[tuple[int, Unit]]:
  """The (stage, unit) pairs that must run before this unit, at an earlier tick."""
  if unit.kind == FORWARD:
    sender = _sender(stage, unit, stages, chunks)
    return [sender] if sender else []
  own = (stage, unit._replace(kind=FORWARD))
  sender = _sender(stage, unit, stages, chunks)
  return [own, sender] if sender else [own]


def _sender(stage: int, unit: Unit, stages: int, chunks: int) -> tuple[int, Unit] | None:
  """The (stage, unit) that sends this unit its input: the previous part of the model or, backward, the next one."""
  part = unit.chunk * stages + stage + (-1 if unit.kind == FORWARD else 1)
  inside = 0 <= part < stages * chunks
  return (part % stages, unit._replace(chunk=part // stages)) if inside else None


def _with_slots(ticks: dict[tuple[int, Unit], int], stages: int, chunks: int, microbatches: int) -> Schedule:
  """Writes the table and assigns slots. A value keeps its slot from the tick it arrives to its last read."""
  table = {name: np.full((max(ticks.values()) + 1, stages), IDLE, np.int32) for name in COLUMNS}
  waits: dict[tuple[str, int], list] = {}  # (what, stage) → [(first tick, last tick, column written for the first)]
  for (stage, unit), tick in ticks.items():
    for name, value in zip(Unit._fields, unit, strict=True):
      table[name][tick, stage] = value
    what = "activation" if unit.kind == FORWARD else "cotangent"
    sender = _sender(stage, unit, stages, chunks)
    if sender:
      waits.setdefault((what, stage), []).append((ticks[sender] + 1, tick, f"put_{what}"))
    if unit.kind == BACKWARD:
      forward = ticks[stage, unit._replace(kind=FORWARD)]
      waits.setdefault(("residuals", stage), []).append((forward, tick, "residuals"))
      if not sender:  # the forward unit goes on to the loss and writes its cotangent
        waits.setdefault(("cotangent", stage), []).append((forward, tick, "cotangent"))

  given: dict[str, list] = {what: [] for what in WAITS}  # (tick, stage, column, slot)
  slots = dict.fromkeys(WAITS, 0)
  for (what, stage), lives in waits.items():
    busy: list[tuple[int, int]] = []  # (last tick, slot)
    free = list(range(len(lives)))
    for first, last, column in sorted(lives):
      while busy and busy[0][0] < first:
        heapq.heappush(free, heapq.heappop(busy)[1])
      slot = heapq.heappop(free)
      heapq.heappush(busy, (last, slot))
      given[what] += [(first, stage, column, slot), (last, stage, what, slot)]
      slots[what] = max(slots[what], slot + 1)
  for what, entries in given.items():
    for column in {what, f"put_{what}"} & table.keys():
      table[column][:] = slots[what]
    for tick, stage, column, slot in entries:
      table[column][tick, stage] = slot
  return Schedule(stages, chunks, microbatches, table, slots)
