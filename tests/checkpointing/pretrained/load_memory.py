"""A program for test_load.py. Loads a model folder and prints how much memory this process needed to do so.

python load_memory.py --config=... --config.init_from=FOLDER     (started by tools.launch)
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
from own_memory import peak_bytes

import strategies
from checkpointing import pretrained
from runtime import command_line
from runtime.devices import start_jax
from training import settings


def load(config: Any, devices: list[jax.Device]) -> int:
  """Loads the model that `init_from` names. Returns the memory that was needed in addition to what was used before."""
  config = pretrained.adopt(config)
  strategy = strategies.create(config, settings.program(config, "cpu"), devices)
  folder, sizes = pretrained.Folder(config.init_from), strategy.program.sizes
  abstract, before = strategy.abstract_state().params, peak_bytes()
  params = jax.block_until_ready(pretrained.load(folder, sizes, abstract))
  needed = peak_bytes() - before
  del params
  return needed


def main(config: Any) -> None:
  devices = start_jax(config)
  small = config.copy_and_resolve_references()
  small.init_from = str(Path(__file__).parents[2] / "golden/pretrained/llama")
  load(small, devices)  # so that libraries are loaded
  print(f"needed {load(config, devices)} bytes")


if __name__ == "__main__":
  command_line.run(main)
