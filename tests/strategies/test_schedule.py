"""Pipeline schedules as tables: complete, in an order that can run, with the bubble and memory of the papers."""

import numpy as np
import pytest

from analysis.timeline import idle_time, timeline
from strategies.pipeline import schedule as schedules
from strategies.pipeline.schedule import BACKWARD, FORWARD, IDLE, Schedule, Unit

SIZES = [(s, m) for s in (2, 3, 4, 8) for m in (s, 2 * s, 4 * s)]
NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
CASES = [(name, s, m, chunks) for name, chunks in NAMES for s, m in SIZES]


def build(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
  return schedules.build(schedules.ORDERS[name], stages, microbatches, chunks)


def units(schedule: Schedule) -> dict[tuple[int, Unit], int]:
  """(stage, unit) → tick, from the table. Checks that no unit is in it twice."""
  found = {}
  for tick, stage in np.argwhere(schedule.table["kind"] != IDLE):
    unit = Unit(*(int(schedule.table[name][tick, stage]) for name in Unit._fields))
    assert (stage, unit) not in found
    found[int(stage), unit] = int(tick)
  return found


@pytest.mark.parametrize("name, stages, microbatches, chunks", CASES)
def test_every_unit_runs_once_and_after_what_it_needs(name: str, stages: int, microbatches: int, chunks: int):
  ticks = units(build(name, stages, microbatches, chunks))
  assert len(ticks) == 2 * stages * microbatches * chunks
  last = stages * chunks - 1
  for (stage, unit), tick in ticks.items():
    part = unit.chunk * stages + stage
    if unit.kind == FORWARD and part > 0:
      assert ticks[(part - 1) % stages, unit._replace(chunk=(part - 1) // stages)] < tick
    if unit.kind == BACKWARD:
      assert ticks[stage, unit._replace(kind=FORWARD)] < tick
    if unit.kind == BACKWARD and part < last:
      assert ticks[(part + 1) % stages, unit._replace(chunk=(part + 1) // stages)] < tick


@pytest.mark.parametrize("name, stages, microbatches, chunks", CASES)
def test_the_bubble_equals_the_formula_of_the_papers(name: str, stages: int, microbatches: int, chunks: int):
  """GPipe, section 2.3; Narayanan et al. 2021, sections 2.2.1 and 2.2.2."""
  schedule = build(name, stages, microbatches, chunks)
  assert schedule.bubble == pytest.approx((stages - 1) / (microbatches * chunks + stages - 1))
  assert schedule.ticks == 2 * (microbatches * chunks + stages - 1)


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_one_forward_one_backward_holds_no_more_microbatches_than_stages(stages: int, microbatches: int):
  assert build("1f1b", stages, microbatches, 1).slots["residuals"] == stages
  assert build("gpipe", stages, microbatches, 1).slots["residuals"] == microbatches


@pytest.mark.parametrize("name, stages, microbatches, chunks", [*CASES, ("1f1b", 4, 3, 1), ("interleaved", 4, 2, 2)])
def test_no_value_is_overwritten_while_it_waits(name: str, stages: int, microbatches: int, chunks: int):
  """Runs the table as the executor does, with names in place of arrays, and checks what each unit receives."""
  schedule = build(name, stages, microbatches, chunks)
  last = stages * chunks - 1
  stores = [{what: {} for what in schedules.WAITS} for _ in range(stages)]
  to_next, to_previous = [None] * stages, [None] * stages
  for tick in range(schedule.ticks):
    arrived = [(to_next[s - 1], to_previous[(s + 1) % stages]) for s in range(stages)]
    for stage in range(stages):
      row = {name: int(column[tick, stage]) for name, column in schedule.table.items()}
      store = stores[stage]
      store["activation"][row["put_activation"]], store["cotangent"][row["put_cotangent"]] = arrived[stage]
      microbatch, part = row["microbatch"], row["chunk"] * stages + stage
      if row["kind"] == FORWARD:
        assert part == 0 or store["activation"][row["activation"]] == ("activation", microbatch, part)
        store["residuals"][row["residuals"]] = ("residuals", microbatch, part)
        to_next[stage] = ("activation", microbatch, part + 1)
        if part == last:
          store["cotangent"][row["cotangent"]] = ("cotangent", microbatch, part)
      elif row["kind"] == BACKWARD:
        assert store["residuals"][row["residuals"]] == ("residuals", microbatch, part)
        assert store["cotangent"][row["cotangent"]] == ("cotangent", microbatch, part)
        to_previous[stage] = ("cotangent", microbatch, part - 1)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("name, chunks", NAMES)
def test_fewer_microbatches_than_stages_work(name: str, chunks: int, microbatches: int):
  assert len(units(build(name, 4, microbatches, chunks))) == 8 * microbatches * chunks


def test_evaluation_is_forward_only():
  schedule = schedules.build(schedules.forward_only, 4, 8)
  assert set(np.unique(schedule.table["kind"])) == {IDLE, FORWARD}
  assert schedule.ticks == 11


def test_a_deadlock_is_an_error():
  def backward_first(stage: int, stages: int, chunks: int, microbatches: int) -> list[Unit]:
    return [Unit(BACKWARD, 0, 0), Unit(FORWARD, 0, 0)]

  with pytest.raises(ValueError, match="waits for another"):
    schedules.build(backward_first, 2, 1)


def test_an_order_that_omits_a_unit_is_an_error():
  with pytest.raises(ValueError, match="leaves a unit out"):
    schedules.build(lambda *sizes: schedules.gpipe(*sizes)[1:], 2, 4)


def test_idle_time_includes_waiting_for_slower_units():
  """Backward units take twice as long. With two stages and one microbatch, each stage works for half of the time."""
  assert idle_time(build("gpipe", 2, 1, 1)) == pytest.approx(0.5)
  assert idle_time(build("gpipe", 4, 16, 1)) == pytest.approx(3 / 19)
  assert idle_time(build("1f1b", 4, 16, 1)) == pytest.approx(1 - 48 / 72)


def test_timeline_shows_units_and_the_bubble():
  assert timeline(build("1f1b", 2, 3, 1)) == (
    "stage 0    0   1   · (0)   2 (1)   · (2)\n"
    "stage 1    ·   0 (0)   1 (1)   2 (2)   ·"
  )  # fmt: skip
  assert "0'" in timeline(build("interleaved", 2, 2, 2))
