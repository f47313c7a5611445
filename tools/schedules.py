"""Prints the timelines of the pipeline schedules: each stage's work at each tick, the bubble, and the memory.

    python -m tools.schedules --stages=4 --microbatches=8 --chunks=2

docs/pipeline.md explains the timelines.
"""

import argparse
import sys

from errors import ConfigError, positive
from lab.analysis.timeline import describe, schedules
from runtime import command_line
from strategies.execution.stages.orders import fills_groups


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--stages", type=int, default=4, help="stages of the pipeline (default: 4)")
  parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a batch (default: 8)")
  parser.add_argument("--chunks", type=int, default=2, help="chunks of a stage, if interleaved (default: 2)")
  options = parser.parse_args(arguments)
  for name, value in vars(options).items():
    positive(name, value)
  if not fills_groups(options.stages, options.microbatches, options.chunks):
    raise ConfigError(
      f"microbatches={options.microbatches} must be a multiple of stages={options.stages}, or at most that, for the "
      "interleaved schedule; or use chunks=1"
    )
  for name, schedule in schedules(options.stages, options.microbatches, options.chunks).items():
    print(describe(name, schedule), end="\n\n")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
