"""Pipeline schedules: their timeline as text, the time that stages wait, and how often each kind of unit runs."""

import numpy as np

from strategies.base import Strategy
from strategies.pipeline.schedule import BACKWARD, FORWARD, IDLE, ORDERS, Schedule, Unit, build


def schedules(stages: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
  """Every training schedule for these sizes, by name. Only the interleaved schedule uses `chunks`."""
  return {
    name: build(order, stages, microbatches, chunks if name == "interleaved" else 1) for name, order in ORDERS.items()
  }


def idle_time(schedule: Schedule, backward: float = 2.0) -> float:
  """The share of time that stages wait if a backward unit takes `backward` times as long as a forward unit.

  Neighbours exchange after each tick, so a tick lasts as long as its slowest unit.
  """
  kind = schedule.table["kind"]
  lasts = np.select([(kind == BACKWARD).any(axis=1), (kind == FORWARD).any(axis=1)], [backward, 1.0])  # [ticks]
  works = np.select([kind == BACKWARD, kind == FORWARD], [backward, 1.0])  # [ticks, stages]
  return float(1 - works.sum() / (lasts.sum() * schedule.stages))


def unit_rounds(strategy: Strategy) -> dict[str, int]:
  """How often the busiest device runs each of a pipeline's optional loops in a step, by the name of the loop's scope.

  The names are those that strategies/pipeline/stage.py gives to `once`. The compiled program does not say how often
  these loops run, because it depends on the schedule's table.
  """
  if not strategy.schedule:
    return {}
  chunks = strategy.schedule.chunks
  each = strategy.schedule.microbatches * strategy.program.accumulation
  return {"forward": each * chunks, "backward": each * chunks, "finish": each, "embed_backward": each}


def timeline(schedule: Schedule) -> str:
  """The table as text, with a row for each stage and a column for each tick.

  3 is the forward pass of microbatch 3, and (3) its backward pass. 3' is in the stage's second chunk, 3" in its third.
  """

  def cell(kind: int, microbatch: int, chunk: int) -> str:
    text = f"{microbatch}" + ("'" * (chunk % 2) + '"' * (chunk // 2))
    return {IDLE: "·", FORWARD: text, BACKWARD: f"({text})"}[kind]

  units = np.stack([schedule.table[name] for name in Unit._fields], axis=-1)  # [ticks, stages, 3]
  rows = [[cell(*map(int, unit)) for unit in units[:, stage]] for stage in range(schedule.stages)]
  width = max(len(text) for row in rows for text in row)
  return "\n".join(f"stage {stage}  " + " ".join(text.rjust(width) for text in row) for stage, row in enumerate(rows))


def describe(name: str, schedule: Schedule) -> str:
  """A heading with the schedule's figures, and its timeline."""
  unit = "microbatches" if schedule.chunks == 1 else f"microbatches through 1/{schedule.chunks} of a stage"
  heading = (
    f"{name}: {schedule.ticks} ticks, bubble {schedule.bubble:.1%} of them ({idle_time(schedule):.1%} of the time if a "
    f"backward unit takes twice as long), holds the activations of {schedule.slots['residuals']} {unit}"
  )
  return f"{heading}\n{timeline(schedule)}"
