"""A pipeline schedule as a table: which units each stage runs at each tick, and in which slots values wait.

schedule.py decides at which tick each unit runs, and `write` makes the table. No JAX is used here.
"""

import dataclasses
import functools
import heapq
from typing import NamedTuple

import numpy as np

FORWARD, BACKWARD = "forward", "backward"
KINDS = (FORWARD, BACKWARD)


class Unit(NamedTuple):
  """The forward or backward pass (`kind`) of one microbatch through one chunk of a stage's layers.

  Chunk c of stage s is part c · stages + s of the model.
  """

  kind: str
  microbatch: int
  chunk: int


# The values that wait on a stage: the input of a forward unit, the residuals it saves for its backward unit, and the
# cotangent that a backward unit starts from. The columns of the table name the slots that a unit reads or writes.
WAITS = ("activation", "residuals", "cotangent")
SENDS = {FORWARD: "activation", BACKWARD: "cotangent"}  # what a unit sends to a neighbour
COLUMNS = {
  FORWARD: ("runs", "microbatch", "chunk", *WAITS),
  BACKWARD: ("runs", "microbatch", "chunk", "residuals", "cotangent"),
  "arrivals": tuple(SENDS.values()),
}
# What happens in a tick, in this order. Cotangents of the tick before arrive while the forward units run, and
# activations of this tick while the backward units run. A value that arrives can be read in what follows.
MOMENTS = {what: i for i, what in enumerate((FORWARD, "cotangent", BACKWARD, "activation"))}


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
      cotangent. "arrivals" holds the slots for the values that arrive from the neighbours during the tick. Values that
      nobody needs go to a spare slot, after the last one.
    slots: for each name in `WAITS`, how many of these values wait at the same time on the busiest stage.
  """

  stages: int
  chunks: int
  microbatches: int
  table: dict[str, dict[str, np.ndarray]]
  slots: dict[str, int]

  @property
  def ticks(self) -> int:
    return len(self.table[FORWARD]["runs"])

  def idle_time(self, backward: float = 2.0) -> float:
    """The bubble: the share of time in which stages wait, if a backward unit takes `backward` times a forward unit.

    Neighbours exchange in each tick, so a tick lasts as long as the work of its busiest stage.
    """
    work = self.table[FORWARD]["runs"] + backward * self.table[BACKWARD]["runs"]  # [ticks, stages]
    return float(1 - work.mean() / work.max(axis=1).mean())

  @functools.cached_property
  def phases(self) -> tuple[Phase, ...]:
    """At most three: before the first backward unit, until the last forward unit, and after it."""
    if not self.table[BACKWARD]["runs"].any():
      return (self._phase(0, self.ticks),)
    forward, backward = (np.flatnonzero(self.table[kind]["runs"].any(axis=1)) for kind in KINDS)  # ticks
    end = int(forward[-1]) + 1
    cuts = sorted({0, min(int(backward[0]), end), end, self.ticks})
    return tuple(self._phase(a, b) for a, b in zip(cuts, cuts[1:], strict=False))

  def _phase(self, first: int, end: int) -> Phase:
    """The phase of these ticks. A route is in it if in one of the ticks a stage needs what arrives by it."""
    units = tuple(kind for kind in KINDS if self.table[kind]["runs"][first:end].any())
    routes = {}
    for what, step in (("activation", 1), ("cotangent", -1)):
      wanted = (self.table["arrivals"][what][first:end] < self.slots[what]).any(axis=0)  # [stages]
      if pairs := tuple(((int(s) - step) % self.stages, int(s)) for s in np.flatnonzero(wanted)):
        routes[what] = pairs
    forward = {name: column[first:end, -1] for name, column in self.table[FORWARD].items()}  # of the last stage
    finishes = bool((forward["runs"] * (forward["chunk"] == self.chunks - 1)).any())
    return Phase(first, end, units, finishes, routes)


def sender_of(stage: int, unit: Unit, stages: int, chunks: int) -> tuple[int, Unit] | None:
  """The (stage, unit) that sends this unit its input: the previous part of the model or, backward, the next one."""
  part = unit.chunk * stages + stage + (-1 if unit.kind == FORWARD else 1)
  inside = 0 <= part < stages * chunks
  return (part % stages, unit._replace(chunk=part // stages)) if inside else None


class _Use(NamedTuple):
  """The first or the last use of a slot: a column of the table, for a stage at a tick."""

  tick: int
  moment: int
  kind: str


def write(ticks: dict[tuple[int, Unit], int], stages: int, chunks: int, microbatches: int) -> Schedule:
  """Writes the table and assigns slots. A value keeps its slot from the moment it arrives to its last read."""
  shape = (max(ticks.values()) + 1, stages)
  table = {kind: {name: np.zeros(shape, np.int32) for name in columns} for kind, columns in COLUMNS.items()}
  waits: dict[tuple[str, int], list[tuple[_Use, _Use]]] = {}  # (what, stage) → [(first use, last use)]
  for (stage, unit), tick in ticks.items():
    for name, value in zip(COLUMNS[unit.kind], (1, *unit[1:]), strict=False):
      table[unit.kind][name][tick, stage] = value
    what, read = SENDS[unit.kind], _Use(tick, MOMENTS[unit.kind], unit.kind)
    if sender := sender_of(stage, unit, stages, chunks):
      # A cotangent is sent at the next tick. Both kinds of values arrive after the forward units of their tick.
      sent = ticks[sender] + (unit.kind == BACKWARD)
      waits.setdefault((what, stage), []).append((_Use(sent, MOMENTS[what], "arrivals"), read))
    if unit.kind == BACKWARD:
      saved = _Use(ticks[stage, unit._replace(kind=FORWARD)], MOMENTS[FORWARD], FORWARD)
      waits.setdefault(("residuals", stage), []).append((saved, read))
      if not sender:  # the forward unit goes on to the loss and writes its cotangent
        waits.setdefault(("cotangent", stage), []).append((saved, read))

  given: dict[str, list[tuple[_Use, int, int]]] = {what: [] for what in WAITS}  # (use, stage, slot)
  slots = dict.fromkeys(WAITS, 0)
  for (what, stage), lives in waits.items():
    busy: list[tuple[_Use, int]] = []  # (last use, slot)
    free = list(range(len(lives)))
    for first, last in sorted(lives):
      while busy and busy[0][0] < first:
        heapq.heappush(free, heapq.heappop(busy)[1])
      slot = heapq.heappop(free)
      heapq.heappush(busy, (last, slot))
      given[what] += [(first, stage, slot), (last, stage, slot)]
      slots[what] = max(slots[what], slot + 1)
  for what, entries in given.items():
    for columns in table.values():
      if what in columns:
        columns[what][:] = slots[what]
    for use, stage, slot in entries:
      table[use.kind][what][use.tick, stage] = slot
  return Schedule(stages, chunks, microbatches, table, slots)
