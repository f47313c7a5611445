"""Pipeline schedules as tables: complete, in an order that can run, with the bubble and memory of the papers."""

import numpy as np
import pytest

from lab.analysis.timeline import timeline
from strategies.execution.stages import orders
from strategies.execution.stages.schedule import BACKWARD, FORWARD, SENDS, WAITS, WEIGHTS, Schedule, Unit

SIZES = [(s, m) for s in (2, 3, 4, 8) for m in (s, 2 * s, 4 * s)]
NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]
CASES = [(name, s, m, chunks) for name, chunks in NAMES for s, m in SIZES]


def build(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
  return orders.build(orders.ORDERS[name], stages, microbatches, chunks)


def row(schedule: Schedule, kind: str, tick: int, stage: int) -> dict[str, int]:
  return {name: int(column[tick, stage]) for name, column in schedule.table[kind].items()}


def kept_units(schedule: Schedule, stage: int) -> list[tuple[int, dict[str, int]]]:
  """(tick, columns) of each weight unit of a stage."""
  found = []
  for tick in range(schedule.ticks):
    columns = row(schedule, WEIGHTS, tick, stage)
    for number in range(columns["first"], columns["first"] + columns["runs"]):
      found.append((tick, {name: int(column[number, stage]) for name, column in schedule.weights.items()}))
  assert len(found) == len(schedule.weights["microbatch"])
  return found


def units(schedule: Schedule) -> dict[tuple[int, Unit], int]:
  """(stage, unit) → tick, from the table. Checks that no unit is in it twice."""
  found = {}
  for stage in range(schedule.stages):
    for tick, kept in kept_units(schedule, stage):
      unit = Unit(WEIGHTS, kept["microbatch"], kept["chunk"])
      assert (stage, unit) not in found
      found[stage, unit] = tick
  for kind in (FORWARD, BACKWARD):
    for tick, stage in np.argwhere(schedule.table[kind]["runs"]):
      columns = row(schedule, kind, tick, stage)
      unit = Unit(kind, columns["microbatch"], columns["chunk"])
      assert (stage, unit) not in found
      found[int(stage), unit] = int(tick)
  return found


@pytest.mark.parametrize("name, stages, microbatches, chunks", CASES)
def test_every_unit_runs_once_and_after_what_it_needs(name: str, stages: int, microbatches: int, chunks: int):
  """A backward unit may share the tick of its own forward unit, which runs first."""
  ticks = units(build(name, stages, microbatches, chunks))
  assert len(ticks) == (3 if name == "zero_bubble" else 2) * stages * microbatches * chunks
  last = stages * chunks - 1
  for (stage, unit), tick in ticks.items():
    part = unit.chunk * stages + stage
    if unit.kind == FORWARD and part > 0:
      assert ticks[(part - 1) % stages, unit._replace(chunk=(part - 1) // stages)] < tick
    if unit.kind == BACKWARD:
      assert ticks[stage, unit._replace(kind=FORWARD)] <= tick
    if unit.kind == WEIGHTS:
      assert ticks[stage, unit._replace(kind=BACKWARD)] <= tick
    if unit.kind == BACKWARD and part < last:
      assert ticks[(part + 1) % stages, unit._replace(chunk=(part + 1) // stages)] < tick


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("name, stages, microbatches, chunks", [case for case in CASES if case[0] != "zero_bubble"])
def test_idle_time_equals_the_formula_of_the_papers(
  name: str, stages: int, microbatches: int, chunks: int, backward: float
):
  """GPipe, section 2.3; Narayanan et al. 2021, sections 2.2.1 and 2.2.2. For any `backward`."""
  schedule = build(name, stages, microbatches, chunks)
  assert schedule.idle_time(backward) == pytest.approx((stages - 1) / (microbatches * chunks + stages - 1))


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_weight_units_leave_a_third_of_the_bubble(stages: int, microbatches: int):
  """Qi et al. 2024, table 2: (S - 1)(F + B - W), where 1F1B has (S - 1)(F + B + W). Needs M >= 2 (S - 1).

  With remat "full" backward and weight units are twice as long as forward units, and more of the bubble is left.
  """
  schedule = build("zero_bubble", stages, microbatches, 1)
  if microbatches >= 2 * (stages - 1):
    assert schedule.idle_time() == pytest.approx((stages - 1) / (3 * microbatches + stages - 1))
  for backward in (2.0, 3.0):
    assert schedule.idle_time(backward) < build("1f1b", stages, microbatches, 1).idle_time(backward)
  assert schedule.ticks == build("1f1b", stages, microbatches, 1).ticks
  assert schedule.slots["residuals"] == min(2 * stages - 1, microbatches)
  assert schedule.slots["kept"] <= schedule.slots["residuals"]


def test_idle_time_is_that_of_the_busiest_stage_in_each_tick():
  """Two stages and one microbatch: forward, forward and backward, backward. Each stage works for half of the time."""
  schedule = build("1f1b", 2, 1, 1)
  assert schedule.ticks == 3
  assert schedule.idle_time(2.0) == pytest.approx(1 - (3 + 3) / (2 * (1 + 3 + 2)))


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_1f1b_holds_the_same_however_many_microbatches_there_are(stages: int, microbatches: int):
  assert build("1f1b", stages, microbatches, 1).slots["residuals"] == min(2 * stages - 1, microbatches)
  assert build("gpipe", stages, microbatches, 1).slots["residuals"] == microbatches
  held = build("interleaved", stages, microbatches, 3).slots["residuals"]
  assert held == min(2 * (stages - 1) + 2 * stages + 1, 3 * microbatches)


@pytest.mark.parametrize("name, stages, microbatches, chunks", [*CASES, ("1f1b", 4, 3, 1), ("interleaved", 4, 2, 2)])
def test_no_value_is_overwritten_while_it_waits(name: str, stages: int, microbatches: int, chunks: int):
  """Runs the table as the executor does, with names in place of arrays, and checks what each unit receives."""
  schedule = build(name, stages, microbatches, chunks)
  last = stages * chunks - 1
  stores = [{what: {} for what in WAITS} for _ in range(stages)]
  to_next, to_previous = [None] * stages, [None] * stages
  late = [kept_units(schedule, stage) for stage in range(stages)]
  for phase in schedule.phases:
    for tick in range(phase.first, phase.end):
      cotangents = {to: to_previous[sender] for sender, to in phase.routes.get("cotangent", ())}
      for stage, store in enumerate(stores):
        unit = row(schedule, FORWARD, tick, stage)
        if unit["runs"]:
          microbatch, part = unit["microbatch"], unit["chunk"] * stages + stage
          assert FORWARD in phase.units
          assert part == 0 or store["activation"][unit["activation"]] == ("activation", microbatch, part)
          store["residuals"][unit["residuals"]] = ("residuals", microbatch, part)
          to_next[stage] = ("activation", microbatch, part + 1)
          if part == last:
            assert phase.finishes
            store["cotangent"][unit["cotangent"]] = ("cotangent", microbatch, part)
        store["cotangent"][row(schedule, "arrivals", tick, stage)["cotangent"]] = cotangents.get(stage)
      activations = {to: to_next[sender] for sender, to in phase.routes.get("activation", ())}
      for stage, store in enumerate(stores):
        unit = row(schedule, BACKWARD, tick, stage)
        if unit["runs"]:
          microbatch, part = unit["microbatch"], unit["chunk"] * stages + stage
          assert BACKWARD in phase.units
          assert store["residuals"][unit["residuals"]] == ("residuals", microbatch, part)
          assert store["cotangent"][unit["cotangent"]] == ("cotangent", microbatch, part)
          to_previous[stage] = ("cotangent", microbatch, part - 1)
          store["kept"][unit["kept"]] = ("kept", microbatch, part)
        for _, unit in (found for found in late[stage] if found[0] == tick):
          part = unit["chunk"] * stages + stage
          assert WEIGHTS in phase.units
          assert store["residuals"][unit["residuals"]] == ("residuals", unit["microbatch"], part)
          assert store["kept"][unit["kept"]] == ("kept", unit["microbatch"], part)
        store["activation"][row(schedule, "arrivals", tick, stage)["activation"]] = activations.get(stage)


@pytest.mark.parametrize("name, stages, microbatches, chunks", CASES)
def test_nothing_is_sent_around_the_ends_of_the_model_or_in_a_phase_without_a_receiver(
  name: str, stages: int, microbatches: int, chunks: int
):
  """A phase has one kind of unit, and nothing for the other kind, or both. A ring is needed only between chunks."""
  schedule = build(name, stages, microbatches, chunks)
  assert [phase.first for phase in schedule.phases] == [0, *(phase.end for phase in schedule.phases[:-1])]
  for phase in schedule.phases:
    sent = {SENDS[kind] for kind in phase.units if kind in SENDS}
    assert set(phase.routes) <= sent
    assert chunks > 1 or all(abs(sender - to) == 1 for pairs in phase.routes.values() for sender, to in pairs)
  exchanges = [phase.ticks for phase in schedule.phases for _ in phase.routes]
  assert sum(exchanges) <= 2 * (microbatches * chunks + stages - 1)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("name, chunks", NAMES)
def test_fewer_microbatches_than_stages_work(name: str, chunks: int, microbatches: int):
  kinds = 3 if name == "zero_bubble" else 2
  assert len(units(build(name, 4, microbatches, chunks))) == kinds * 4 * microbatches * chunks


def test_evaluation_is_forward_only():
  schedule = orders.build(orders.forward_only, 4, 8)
  assert {unit.kind for _, unit in units(schedule)} == {FORWARD}
  assert [(phase.ticks, phase.units, set(phase.routes)) for phase in schedule.phases] == [
    (11, (FORWARD,), {"activation"})
  ]


def test_a_deadlock_is_an_error():
  def backward_first(stage: int, stages: int, chunks: int, microbatches: int) -> list[orders.Group]:
    return [(Unit(BACKWARD, 0, 0),), (Unit(FORWARD, 0, 0),)]

  with pytest.raises(ValueError, match="waits for another"):
    orders.build(backward_first, 2, 1)


def test_an_order_that_omits_a_unit_is_an_error():
  with pytest.raises(ValueError, match="leaves a unit out"):
    orders.build(lambda *sizes: orders.gpipe(*sizes)[1:], 2, 4)


def test_timeline_shows_units_and_the_bubble():
  assert timeline(build("1f1b", 2, 3, 1)) == (
    "stage 0  0    1 2(0)  (1) (2)\n"
    "stage 1  · 0(0) 1(1) 2(2)   ·"
  )  # fmt: skip
  assert "0'" in timeline(build("interleaved", 2, 2, 2))
  assert timeline(build("zero_bubble", 2, 3, 1)) == (
    "stage 0  0    1 2(0) (1)[0] (2)[1][2]\n"
    "stage 1  · 0(0) 1(1)   2(2) [0][1][2]"
  )  # fmt: skip


def test_microbatches_fill_groups_of_as_many_as_there_are_stages():
  """With several chunks; a single group may be smaller. With one chunk any number runs."""
  fills = lambda microbatches, chunks: orders.fills_groups(4, microbatches, chunks)
  assert [m for m in range(1, 14) if fills(m, 2)] == [1, 2, 3, 4, 8, 12]
  assert [m for m in range(1, 14) if fills(m, 1)] == list(range(1, 14))
