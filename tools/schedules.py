"""Prints the timelines of the pipeline schedules: who works on what when, the bubble, and what must be held.

    python -m tools.schedules --stages=4 --microbatches=8 --chunks=2

docs/pipeline.md explains what is to be seen.
"""

from absl import app, flags

from analysis.timeline import describe, schedules

_STAGES = flags.DEFINE_integer("stages", 4, "Stages.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a batch.", lower_bound=1)
_CHUNKS = flags.DEFINE_integer("chunks", 2, "Chunks of a stage, for the interleaved schedule.", lower_bound=1)


def main(_: list[str]) -> None:
  for name, schedule in schedules(_STAGES.value, _MICROBATCHES.value, _CHUNKS.value).items():
    print(describe(name, schedule), end="\n\n")


if __name__ == "__main__":
  app.run(main)
