"""A pipeline schedule as a table: which units each stage runs at each tick, and in which slots values wait.

orders.py decides at which tick each unit runs; `write` makes the table. No JAX is used here.
"""

import dataclasses
import functools
import heapq
from typing import NamedTuple

import numpy as np

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
KINDS = (FORWARD, BACKWARD, WEIGHTS)


class Unit(NamedTuple):
  """The forward or backward pass (`kind`) of one microbatch through one chunk of a stage's layers.

  With weight units (`Schedule.splits`), the backward unit computes only the cotangent of its input, and the weight unit
  the gradient of the weights. Chunk c of stage s is part c · stages + s of the model.
  """

  kind: str
  microbatch: int
  chunk: int


# The values that wait on a stage: the input of a forward unit, the residuals that it saves for the other units, the
# cotangent that a backward unit starts from, and what that unit keeps for its weight unit. Columns of these names hold
# the slots that a unit reads or writes.
WAITS = ("activation", "residuals", "cotangent", "kept")
SENDS = {FORWARD: "activation", BACKWARD: "cotangent"}  # what a unit sends to a neighbour
COLUMNS = {
  FORWARD: ("runs", "microbatch", "chunk", "activation", "residuals", "cotangent"),
  BACKWARD: ("runs", "microbatch", "chunk", "residuals", "cotangent", "kept"),
  WEIGHTS: ("runs", "first"),
  "arrivals": tuple(SENDS.values()),
}


class Phase(NamedTuple):
  """Consecutive ticks, from `first` to before `end`, in which the same kinds of units run.

  Attributes:
    units: the kinds of units that run.
    finishes: whether a forward unit reaches the end of the model, and goes on to the loss.
    routes: for "activation" and "cotangent" the (sender, receiver) pairs of stages that exchange it; {} if none does.
  """

  first: int
  end: int
  units: tuple[str, ...]
  finishes: bool
  routes: dict[str, tuple[tuple[int, int], ...]]

  @property
  def ticks(self) -> int:
    return self.end - self.first


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
  """What every stage does at every tick.

  Attributes:
    table: kind of unit → column → int32 [ticks, stages]. `runs` is 1 if such a unit runs, and `microbatch` and `chunk`
      define it. `activation`, `residuals` and `cotangent` are slots. A forward unit reads its activation and writes
      its residuals. At the end of the model it also writes its cotangent. A backward unit reads its residuals and its
      cotangent, and writes what it keeps. Of "weights" several units may run, so `runs` counts them, and `first` is the
      row of the first one in `weights`. "arrivals" holds the slots for the values that arrive from the neighbours
      during the tick. Values that nobody needs go to a spare slot, after the last one.
    weights: column → int32 [weight units of a stage, stages], in the order in which they run. They read their residuals
      and what was kept. Without weight units there are no rows.
    slots: for each name in `WAITS`, how many of these values wait at the same time on the busiest stage.
  """

  stages: int
  chunks: int
  microbatches: int
  table: dict[str, dict[str, np.ndarray]]
  weights: dict[str, np.ndarray]
  slots: dict[str, int]

  @property
  def ticks(self) -> int:
    return len(self.table[FORWARD]["runs"])

  def idle_time(self, backward: float = 2.0) -> float:
    """The bubble: the share of time in which stages wait, if a backward unit takes `backward` times a forward unit.

    Weight units and backward units each leave out the other's products, and so take `backward` - 1. Each repeats what
    remat repeats. Neighbours exchange in each tick, so a tick lasts as long as the work of its busiest stage.
    """
    each = (1.0, backward - 1, backward - 1) if self.splits else (1.0, backward, 0.0)
    work = np.sum([time * self.table[kind]["runs"] for kind, time in zip(KINDS, each, strict=True)], axis=0)
    return float(1 - work.mean() / work.max(axis=1).mean())

  @property
  def splits(self) -> bool:
    """Whether weight units compute the gradients of weights."""
    return len(self.weights["microbatch"]) > 0

  @functools.cached_property
  def phases(self) -> tuple[Phase, ...]:
    """At most three phases: before the first backward unit, until the last forward unit, and after it."""
    if not self.table[BACKWARD]["runs"].any():
      return (self._phase(0, self.ticks),)
    forward, backward = (np.flatnonzero(self.table[kind]["runs"].any(axis=1)) for kind in (FORWARD, BACKWARD))  # ticks
    end = int(forward[-1]) + 1
    cuts = sorted({0, min(int(backward[0]), end), end, self.ticks})
    return tuple(self._phase(a, b) for a, b in zip(cuts, cuts[1:], strict=False))

  def _phase(self, first: int, end: int) -> Phase:
    """The phase of these ticks. It has a route if in one of the ticks a stage needs what arrives by the route."""
    units = tuple(kind for kind in KINDS if self.table[kind]["runs"][first:end].any())
    routes = {}
    for what, step in (("activation", 1), ("cotangent", -1)):
      wanted = (self.table["arrivals"][what][first:end] < self.slots[what]).any(axis=0)  # [stages]
      if pairs := tuple(((int(s) - step) % self.stages, int(s)) for s in np.flatnonzero(wanted)):
        routes[what] = pairs
    forward = {name: column[first:end, -1] for name, column in self.table[FORWARD].items()}  # the last stage's
    finishes = bool((forward["runs"] * (forward["chunk"] == self.chunks - 1)).any())
    return Phase(first, end, units, finishes, routes)


def sender_of(stage: int, unit: Unit, stages: int, chunks: int) -> tuple[int, Unit] | None:
  """The (stage, unit) that sends this unit its input: the previous part of the model or, backward, the next one."""
  part = unit.chunk * stages + stage + (-1 if unit.kind == FORWARD else 1)
  inside = 0 <= part < stages * chunks
  return (part % stages, unit._replace(chunk=part // stages)) if inside else None


# What happens in a tick, in this order. Cotangents of the tick before arrive while the forward units run, and
# activations of this tick while the backward units run. A value that arrives can be read in what follows.
MOMENTS = {what: i for i, what in enumerate((FORWARD, "cotangent", BACKWARD, WEIGHTS, "activation"))}


class _Use(NamedTuple):
  """A write or read of a slot: the row of a stage in the columns of this kind of unit. Uses are in order of time."""

  tick: int
  moment: int
  row: int
  kind: str


def write(ticks: dict[tuple[int, Unit], int], stages: int, chunks: int, microbatches: int) -> Schedule:
  """Writes the table, from the tick of every (stage, unit), and assigns slots."""
  shape = (max(ticks.values()) + 1, stages)
  zeros = lambda names, *shape: {name: np.zeros(shape, np.int32) for name in names}
  table = {kind: zeros(names, *shape) for kind, names in COLUMNS.items()}
  late = sum(unit.kind == WEIGHTS for _, unit in ticks) // stages
  weights = zeros(("microbatch", "chunk", "residuals", "kept"), late, stages)
  uses: dict[tuple[int, Unit], _Use] = {}
  rows = [0] * stages  # weight units so far
  for (stage, unit), tick in sorted(ticks.items(), key=lambda item: item[1]):
    row, columns = (rows[stage], weights) if unit.kind == WEIGHTS else (tick, table[unit.kind])
    columns["microbatch"][row, stage], columns["chunk"][row, stage] = unit.microbatch, unit.chunk
    table[unit.kind]["runs"][tick, stage] += 1
    rows[stage] += unit.kind == WEIGHTS
    uses[stage, unit] = _Use(tick, MOMENTS[unit.kind], row, unit.kind)
  runs = table[WEIGHTS]["runs"]
  table[WEIGHTS]["first"][:] = runs.cumsum(axis=0) - runs
  slots = _give_slots(table | {WEIGHTS: weights}, _lives(uses, stages, chunks))
  return Schedule(stages, chunks, microbatches, table, weights, slots)


def _lives(uses: dict[tuple[int, Unit], _Use], stages: int, chunks: int) -> dict[tuple[str, int], list[list[_Use]]]:
  """For each kind of value and stage, the uses of each value: the first use writes it, the others read it."""
  lives: dict[tuple[str, int], list[list[_Use]]] = {}
  for (stage, unit), use in uses.items():
    if unit.kind == WEIGHTS:
      continue
    what, sender = SENDS[unit.kind], sender_of(stage, unit, stages, chunks)
    forward = uses[stage, unit._replace(kind=FORWARD)]
    if sender:
      # A cotangent is sent at the next tick. Both kinds of values arrive after the forward units of their tick.
      sent = uses[sender].tick + (unit.kind == BACKWARD)
      lives.setdefault((what, stage), []).append([_Use(sent, MOMENTS[what], sent, "arrivals"), use])
    elif unit.kind == BACKWARD:  # the forward unit goes on to the loss and writes its cotangent
      lives.setdefault((what, stage), []).append([forward, use])
    if unit.kind == BACKWARD:
      late = [uses[key] for key in [(stage, unit._replace(kind=WEIGHTS))] if key in uses]
      lives.setdefault(("residuals", stage), []).append([forward, use, *late])
      if late:
        lives.setdefault(("kept", stage), []).append([use, *late])
  return lives


def _give_slots(
  table: dict[str, dict[str, np.ndarray]], lives: dict[tuple[str, int], list[list[_Use]]]
) -> dict[str, int]:
  """Writes slots into the table. A value has a slot from its arrival to its last read. Returns the numbers of slots."""
  given: dict[str, list[tuple[_Use, int, int]]] = {what: [] for what in WAITS}  # (use, stage, slot)
  slots = dict.fromkeys(WAITS, 0)
  for (what, stage), values in lives.items():
    busy: list[tuple[_Use, int]] = []  # (last use, slot)
    free = list(range(len(values)))
    for uses in sorted(values):
      while busy and busy[0][0] < uses[0]:
        heapq.heappush(free, heapq.heappop(busy)[1])
      slot = heapq.heappop(free)
      heapq.heappush(busy, (uses[-1], slot))
      given[what] += [(use, stage, slot) for use in uses]
      slots[what] = max(slots[what], slot + 1)
  for what, entries in given.items():
    for columns in table.values():
      if what in columns:
        columns[what][:] = slots[what]
    for use, stage, slot in entries:
      table[use.kind][what][use.row, stage] = slot
  return slots
