"""Writes the table of a schedule, and gives slots of memory to the values that wait on a stage."""

import heapq
from typing import NamedTuple

import numpy as np

from strategies.pipeline.schedule import BACKWARD, COLUMNS, FORWARD, SENDS, WAITS, WEIGHTS, Schedule, Unit, sender_of

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
  """For each (what, stage), the uses of each of these values: the first one writes it."""
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
  """Writes slots into the table. A value has one from the moment it arrives to its last read. Returns their number."""
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
