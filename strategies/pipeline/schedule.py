"""A pipeline schedule as a table: which units each stage runs at each tick, and in which slots values wait.

orders.py decides at which tick each unit runs, and slots.py makes the table. No JAX is used here.
"""

import dataclasses
import functools
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

    With weight units, both they and the backward units take as long without the other's products: `backward` - 1. Each
    repeats what remat repeats. Neighbours exchange in each tick, so a tick lasts as long as the work of its busiest
    stage.
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
    """At most three: before the first backward unit, until the last forward unit, and after it."""
    if not self.table[BACKWARD]["runs"].any():
      return (self._phase(0, self.ticks),)
    forward, backward = (np.flatnonzero(self.table[kind]["runs"].any(axis=1)) for kind in (FORWARD, BACKWARD))  # ticks
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
