"""Pipeline schedules: their timeline as text, the time that stages wait, and how often each kind of unit runs."""

import numpy as np

from strategies.execution.stages.orders import ORDERS, build
from strategies.execution.stages.schedule import BACKWARD, FORWARD, KINDS, WEIGHTS, Schedule
from strategies.execution.strategy import Strategy


def schedules(stages: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
  """Every training schedule for these sizes, by name. Only the interleaved schedule uses `chunks`."""
  return {
    name: build(order, stages, microbatches, chunks if name == "interleaved" else 1) for name, order in ORDERS.items()
  }


def unit_rounds(strategy: Strategy) -> dict[str, int]:
  """How often the busiest device runs each of a pipeline's optional loops in a step, by the name of the loop's scope.

  The names are those that strategies/execution/stages/stage.py gives to its loops. The compiled program does not say
  how often these loops run, because it depends on the schedule's table. Forward units are counted on the last stage,
  which also runs the head, and the others on the first, which also runs the embedding's gradient.
  """
  schedule, rounds = strategy.schedule, {}
  if not schedule:
    return rounds
  for number, phase in enumerate(schedule.phases):
    ticks = slice(phase.first, phase.end)
    forward, backward, weights = ({k: c[ticks] for k, c in schedule.table[kind].items()} for kind in KINDS)
    found = {
      "forward": forward["runs"][:, -1],
      "backward": backward["runs"][:, 0],
      "weights": weights["runs"][:, 0],
      "finish": forward["runs"][:, -1] * (forward["chunk"][:, -1] == schedule.chunks - 1),
      "embed_backward": backward["runs"][:, 0] * (backward["chunk"][:, 0] == 0),
    }
    rounds |= {f"{name}_{number}": strategy.program.accumulation * int(runs.sum()) for name, runs in found.items()}
  return rounds


def units(schedule: Schedule) -> list[list[list[tuple[str, str]]]]:
  """What each stage does in each tick: [stage][tick] is a list of units, each with its kind and its microbatch.

  3 is microbatch 3; 3' is its part in the stage's second chunk, 3" in its third.
  """

  def name(columns: dict[str, np.ndarray], row: int, stage: int) -> str:
    chunk = columns["chunk"][row, stage]
    return f"{columns['microbatch'][row, stage]}" + "'" * (chunk % 2) + '"' * (chunk // 2)

  def cell(tick: int, stage: int) -> list[tuple[str, str]]:
    runs = {kind: schedule.table[kind]["runs"][tick, stage] for kind in KINDS}
    first = schedule.table[WEIGHTS]["first"][tick, stage]
    found = [(kind, name(schedule.table[kind], tick, stage)) for kind in (FORWARD, BACKWARD) for _ in range(runs[kind])]
    return found + [(WEIGHTS, name(schedule.weights, row, stage)) for row in range(first, first + runs[WEIGHTS])]

  return [[cell(tick, stage) for tick in range(schedule.ticks)] for stage in range(schedule.stages)]


def timeline(schedule: Schedule) -> str:
  """The table as text, with a row for each stage and a column for each tick.

  3 is the forward pass of microbatch 3, (3) its backward pass, and [3] the gradient of the weights where that is a unit
  of its own.
  """
  form = {FORWARD: "{}", BACKWARD: "({})", WEIGHTS: "[{}]"}
  rows = [["".join(form[kind].format(name) for kind, name in tick) or "·" for tick in row] for row in units(schedule)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  line = lambda row: " ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
  return "\n".join(f"stage {stage}  {line(row)}" for stage, row in enumerate(rows))


def describe(name: str, schedule: Schedule) -> str:
  """A heading with the schedule's figures, and its timeline."""
  unit = "microbatches" if schedule.chunks == 1 else f"microbatches through 1/{schedule.chunks} of a stage"
  heading = (
    f"{name}: {schedule.ticks} ticks, bubble {schedule.idle_time():.1%} of the time if a backward unit takes twice as "
    f"long as a forward unit, holds the activations of {schedule.slots['residuals']} {unit}"
    + (f", and cotangents of {schedule.slots['kept']}" if schedule.splits else "")
  )
  return f"{heading}\n{timeline(schedule)}"
