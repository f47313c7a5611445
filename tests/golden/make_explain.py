"""Writes what explain says of each strategy's placement and communication: python -m tests.golden.make_explain

Run it after a change that is meant to move something, and read the difference: it is what the change communicates.
`--topology` writes the files for a TPU slice too, where the TPU compiler is installed.
"""

import functools
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "explain"
SLICE = "v5e:2x4"
# Lower-case names of fields of the tiny preset that differ: sizes that TPUs do not pad, and a batch for all strategies.
FIELDS = {"batch_size": 32}
TPU_FIELDS = {"model.width": 256, "model.heads": 8, "model.kv_heads": 8, "model.mlp_width": 1024, "model.seq_len": 128}
INPUTS = {
  "tokens": {"model.inputs": "tokens", "model.objective": "next_token"},
  "images": {"model.inputs": "images", "model.objective": "class"},
}


@functools.cache
def explained(name: str, topology: str | None, inputs: str) -> dict[str, Any]:
  """What explain finds for a strategy, on 8 devices of this machine's CPU or of a slice."""
  from analysis.explanation import explain
  from configs import base
  from tools import explain as tool

  config = base.get_config("tiny", name)
  config.update_from_flattened_dict(FIELDS | (TPU_FIELDS if topology else {}) | INPUTS[inputs])
  config.compilation_cache_dir = "~/.cache/meshwright/tests"
  return explain(name, tool.create(config, topology), config.batch_size)


def page(name: str, topology: str | None = None) -> str:
  """What a golden file holds for a strategy."""
  from tools import explain as tool

  found = explained(name, topology, "tokens")
  return f"{found['about']}\n\n{tool.placement(found)}\n\n{tool.communication(found)}\n"


def file(name: str, topology: str | None = None) -> Path:
  return FOLDER / f"{name}{'-tpu' if topology else ''}.txt"


def lowers_for(name: str, topology: str | None) -> bool:
  """pmap takes only devices that are there."""
  return topology is None or name != "pmap_ddp"


if __name__ == "__main__":
  sys.path.insert(0, str(Path(__file__).parents[1]))
  import conftest  # noqa: F401  # eight devices, and the flags of the tests

  import strategies

  FOLDER.mkdir(exist_ok=True)
  for topology in (None, SLICE) if "--topology" in sys.argv else (None,):
    for name in strategies.names():
      if lowers_for(name, topology):
        file(name, topology).write_text(page(name, topology))
