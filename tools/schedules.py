"""Prints the timelines of the pipeline schedules: who works on what when, the bubble, and what must be held.

    python -m tools.schedules --stages=4 --microbatches=8 --chunks=2

docs/pipeline.md explains what is to be seen.
"""

from absl import app, flags

from strategies.schedule import ORDERS, Schedule, build

_STAGES = flags.DEFINE_integer("stages", 4, "Stages.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a batch.", lower_bound=1)
_CHUNKS = flags.DEFINE_integer("chunks", 2, "Chunks of a stage, for the interleaved schedule.", lower_bound=1)


def schedules(stages: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
  """Every schedule by its name, for these sizes."""
  return {
    name: build(order, stages, microbatches, chunks if name == "interleaved" else 1) for name, order in ORDERS.items()
  }


def text(name: str, schedule: Schedule) -> str:
  """A heading with the figures, and the timeline."""
  held = schedule.slots["residuals"]
  unit = "microbatches" if schedule.chunks == 1 else f"microbatches through 1/{schedule.chunks} of a stage"
  heading = (
    f"{name}: {schedule.ticks} ticks, bubble {schedule.bubble:.1%} of them ({schedule.idle_time():.1%} of the time if "
    f"a backward unit takes twice as long), holds the activations of {held} {unit}"
  )
  return f"{heading}\n{schedule.timeline()}"


def main(_: list[str]) -> None:
  for name, schedule in schedules(_STAGES.value, _MICROBATCHES.value, _CHUNKS.value).items():
    print(text(name, schedule), end="\n\n")


if __name__ == "__main__":
  app.run(main)
