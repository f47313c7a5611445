"""A program for test_processes.py. Restores a checkpoint and prints how much memory this process needed to do so.

python restore_memory.py --config=... --checkpoints=FOLDER     (started by tools.launch)
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from absl import flags
from own_memory import peak_bytes

import strategies
from checkpointing import reading, record
from runtime import command_line
from runtime.devices import start_jax
from training import settings

FOLDER = flags.DEFINE_string("checkpoints", None, "The folder of checkpoints.")


def main(config: Any) -> None:
  devices = start_jax(config)
  strategy = strategies.create(config, settings.program(config, "cpu"), devices)
  folder = Path(FOLDER.value)
  (step,) = reading.steps(folder)
  saved = reading.read_record(folder / str(step))
  reading.READ_BYTES = 0  # one array at a time, as with arrays of gigabytes
  abstract = strategy.abstract_state()
  small = [(name, x) for name, x in record.named(abstract) if x.size < 10_000]
  record.arrays(reading.read_arrays(folder / str(step), small))  # so that the libraries are loaded
  before = peak_bytes()
  state, why = reading.read_tree(folder / str(step), abstract, saved)
  assert state is not None, why
  jax.block_until_ready(state)
  print(f"needed {peak_bytes() - before} bytes")


if __name__ == "__main__":
  command_line.run(main)
