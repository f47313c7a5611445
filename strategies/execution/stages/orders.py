"""Pipeline schedules: the order in which each stage runs its units, and the tick at which each unit runs.

In a tick, a stage runs at most one forward unit and then at most one backward unit, so neither kind has to wait for the
other on another stage. A schedule is defined by the order in which each stage runs its units (`ORDERS`). `build`
simulates these orders tick by tick: units run as soon as their inputs have arrived. `schedule.write` makes a table of
the result, stage.py runs it, and lab/analysis/timeline.py draws it. No JAX is used here.
"""

from collections.abc import Callable

from strategies.execution.stages.schedule import BACKWARD, FORWARD, WEIGHTS, Schedule, Unit, sender_of, write

Group = tuple[Unit, ...]  # what a stage runs in one tick: a forward unit, a backward unit, or first one, then the other


def gpipe(stage: int, stages: int, chunks: int, microbatches: int) -> list[Group]:
  """All forward units, then all backward units (Huang et al. 2018, arXiv:1811.06965)."""
  return [(Unit(kind, m, 0),) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, chunks: int, microbatches: int) -> list[Group]:
  """Forward units until the first cotangent can arrive, then a forward and a backward unit in each tick.

  A microbatch reaches the last stage `stages - 1 - stage` ticks later, and its cotangent needs as many ticks to come
  back. With several chunks, microbatches form groups of as many as there are stages. A group passes through one chunk
  after another (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, which also names the predecessors).
  """
  groups = [range(start, min(start + stages, microbatches)) for start in range(0, microbatches, stages)]
  forward = [Unit(FORWARD, m, c) for group in groups for c in range(chunks) for m in group]
  backward = [Unit(BACKWARD, m, c) for group in groups for c in reversed(range(chunks)) for m in group]
  ahead = min(2 * (stages - 1 - stage) + (chunks - 1) * stages, len(forward))
  pairs = zip(forward[ahead:], backward, strict=False)
  alone = forward[:ahead], backward[len(forward) - ahead :]
  return [*((unit,) for unit in alone[0]), *pairs, *((unit,) for unit in alone[1])]


def zero_bubble(stage: int, stages: int, chunks: int, microbatches: int) -> list[Group]:
  """1F1B with weight units, which `with_weights` adds: ZB-H1 of Qi et al. 2024, arXiv:2401.10241."""
  return one_forward_one_backward(stage, stages, chunks, microbatches)


def forward_only(stage: int, stages: int, chunks: int, microbatches: int) -> list[Group]:
  """Only forward units, for evaluation."""
  return [(Unit(FORWARD, m, 0),) for m in range(microbatches)]


Order = Callable[[int, int, int, int], list[Group]]  # (stage, stages, chunks, microbatches) → the stage's groups
ORDERS: dict[str, Order] = {
  "gpipe": gpipe,
  "1f1b": one_forward_one_backward,
  "interleaved": one_forward_one_backward,
  "zero_bubble": zero_bubble,
}


def fills_groups(stages: int, microbatches: int, chunks: int) -> bool:
  """Whether the microbatches form whole groups, or a single one. With several chunks the stages deadlock otherwise."""
  return chunks == 1 or microbatches <= stages or microbatches % stages == 0


def build(order: Order, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
  """Builds a schedule: every stage runs each group of its order at the first tick at which its inputs are ready.

  Raises ValueError if an order leaves a unit out or repeats one, or if the stages deadlock.
  """
  orders = [order(stage, stages, chunks, microbatches) for stage in range(stages)]
  kinds = {unit.kind for group in orders[0] for unit in group}
  wanted = sorted(Unit(kind, m, c) for kind in kinds for m in range(microbatches) for c in range(chunks))
  if any(sorted(unit for group in groups for unit in group) != wanted for groups in orders):
    raise ValueError("an order leaves a unit out or repeats one")
  queues = [iter(groups) for groups in orders]
  heads = [next(queue, None) for queue in queues]
  ticks: dict[tuple[int, Unit], int] = {}  # (stage, unit) → the tick it runs at
  tick = 0
  while any(heads):
    ready = [
      (stage, group)
      for stage, group in enumerate(heads)
      if group and all(need in ticks for need in needs(stage, group, stages, chunks))
    ]
    if not ready:
      raise ValueError(f"deadlock: at tick {tick} every stage waits for another one: {heads}")
    for stage, group in ready:
      ticks |= {(stage, unit): tick for unit in group}
      heads[stage] = next(queues[stage], None)
    tick += 1
  if order is zero_bubble:
    ticks = with_weights(ticks, stages, microbatches)
  return write(ticks, stages, chunks, microbatches)


def with_weights(ticks: dict[tuple[int, Unit], int], stages: int, microbatches: int) -> dict[tuple[int, Unit], int]:
  """Adds a weight unit for each backward unit, at the same tick or later.

  A stage may hold the residuals of as many microbatches as under 1f1b. So some weight units must run before the next
  forward unit. All must run by the last tick. A tick lasts as long as what must run in it on the busiest stage, if
  units of all kinds take equally long. Other stages use the time for weight units that wait.
  """
  held, last, found = min(2 * stages - 1, microbatches), max(ticks.values()), dict(ticks)
  units = {(stage, tick, unit.kind): unit for (stage, unit), tick in ticks.items()}
  waiting: list[list[Unit]] = [[] for _ in range(stages)]
  holds = [0] * stages
  for tick in range(last + 1):
    must, works = [0] * stages, [0] * stages
    for stage in range(stages):
      works[stage] = sum((stage, tick, kind) in units for kind in (FORWARD, BACKWARD))
      holds[stage] += (stage, tick, FORWARD) in units
      if unit := units.get((stage, tick, BACKWARD)):
        waiting[stage].append(unit._replace(kind=WEIGHTS))
      must[stage] = holds[stage] + ((stage, tick + 1, FORWARD) in units) - held
      must[stage] = len(waiting[stage]) if tick == last else max(0, must[stage])
    length = max(map(sum, zip(works, must, strict=True)))
    for stage, queue in enumerate(waiting):
      runs = min(len(queue), length - works[stage])
      found |= {(stage, unit): tick for unit in queue[:runs]}
      holds[stage] -= runs
      del queue[:runs]
  return found


def needs(stage: int, group: Group, stages: int, chunks: int) -> list[tuple[int, Unit]]:
  """The (stage, unit) pairs, outside this group, that must run before its units."""
  found = [sender_of(stage, unit, stages, chunks) for unit in group]
  found += [(stage, unit._replace(kind=FORWARD)) for unit in group if unit.kind == BACKWARD]
  return [need for need in found if need and need not in [(stage, unit) for unit in group]]
