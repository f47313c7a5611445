"""Writes explain's placement and communication tables for each strategy: python -m tests.golden.make_explain

Run it after a change that should affect placement or communication, and review the diff. It also fills in the pages of
docs/ that show these files. `--topology` also writes the files for a TPU slice; it needs the TPU compiler. Write the
files on the oldest stack first. On a newer one a strategy gets a file of its own where the compiler does something
else.
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "explain"
SLICE = "v5e:2x4"
OLDEST = (0, 10)  # the version of jax that the common files are written with
# Changes to the tiny preset, for other programs than the golden pages (`guide.shown`): a batch that suits all
# strategies, experts for those that share some, and for TPUs sizes that they do not pad.
FIELDS, MIXTURE = {"batch_size": 32}, {"model.experts": 8}
TPU_FIELDS = {"model.width": 256, "model.heads": 8, "model.kv_heads": 8, "model.mlp_width": 1024, "model.seq_len": 128}
INPUTS = {
  "tokens": {"model.inputs": "tokens", "model.objective": "next_token"},
  "images": {
    "model.inputs": "images",
    "model.objective": "class",
    "model.image_size": 32,
    "model.channels": 3,
    "model.classes": 10,
    # So that in some program each compiler shares layers by all-to-alls, and sums gradients of biases and heads' norms.
    "optimizer.name": "muon",
    "model.qkv_bias": True,
    "model.qk_norm": True,
  },
}
# With 8 devices, local layers read 4 positions before each chunk: one or two chunks, as these are of 2 or 8 positions.
INPUTS["windows"] = INPUTS["tokens"] | {"model.window": 5, "model.layers_pattern": "local:1,global:1"}
# Every strategy has a program for tokens. These have others too: with images, each kind of collective is among them.
OTHERS = {"images": ("fsdp", "two_d", "pipeline"), "windows": ("context",)}


@functools.cache
def strategy(name: str, topology: str | None = None, inputs: str = "tokens") -> Any:
  """The strategy that is explained, on 8 simulated CPU devices or on a slice."""
  from lab.analysis.topology import machine_of
  from lab.benchmarks import guide
  from tools import explain as tool

  config = guide.shown(name)
  config.update_from_flattened_dict((TPU_FIELDS if topology else {}) | INPUTS[inputs])
  config.compilation_cache_dir = "~/.cache/meshwright/tests"
  return tool.create(config, machine_of(topology) if topology else None)


@functools.cache
def explained(name: str, topology: str | None, inputs: str) -> dict[str, Any]:
  """explain's figures for a strategy."""
  from lab.analysis.explanation import explain
  from lab.analysis.topology import machine_of
  from lab.benchmarks import guide

  where = machine_of(topology) if topology else None
  return explain(name, strategy(name, topology, inputs), guide.BATCH, where)


def page(name: str, topology: str | None = None) -> str:
  """The content of a golden file: of a strategy, or of "context-windows"."""
  strategy, _, inputs = name.partition("-")
  return text(explained(strategy, topology, inputs or "tokens"))


def names(of: Iterable[str]) -> list[str]:
  """The names of golden files: strategies, and those with windows."""
  return [*of, *(f"{name}-windows" for name in OTHERS["windows"])]


def text(found: dict[str, Any]) -> str:
  from tools import explain as tool

  return f"{found['about']}\n\n{tool.placement(found)}\n\n{tool.communication(found)}\n"


def file(name: str, topology: str | None = None) -> Path:
  """The golden file of a strategy: the one of this version of jax if there is one, or else the common one."""
  return own if (own := _file(name, topology, jax.__version_info__[:2])).exists() else _file(name, topology)


def _file(name: str, topology: str | None, version: tuple[int, ...] = ()) -> Path:
  suffix = f"-jax{'.'.join(map(str, version))}" if version else ""
  return FOLDER / f"{name}{'-tpu' if topology else ''}{suffix}.txt"


def has_own_page(name: str, topology: str | None = None) -> bool:
  """Whether a strategy's page differs between the versions of jax."""
  return any(FOLDER.glob(f"{name}{'-tpu' if topology else ''}-jax*.txt"))


def write(name: str, topology: str | None) -> None:
  """Writes the common file, or on a newer stack one of its own if it differs from the common one."""
  text, common = page(name, topology), _file(name, topology)
  if jax.__version_info__[:2] == OLDEST or not common.exists():
    common.write_text(text)
  elif text != common.read_text():
    _file(name, topology, jax.__version_info__[:2]).write_text(text)


def programs(names: Iterable[str], others: Iterable[str] = tuple(OTHERS)) -> list[tuple[str, str]]:
  """Strategies and inputs to compile for an accelerator: tokens, and these others."""
  return [(name, inputs) for name in names for inputs in ("tokens", *others) if name in OTHERS.get(inputs, names)]


def of_tokens(names: Iterable[str]) -> list[tuple[str, str]]:
  """Those for tokens alone. Tests of a program have equal values, so that one stack runs them all (tests/shares.py)."""
  return [(name, "tokens") for name in names]


def lowers_for(name: str, topology: str | None) -> bool:
  """Whether a strategy compiles for these devices. pmap accepts only real devices."""
  return topology is None or name != "pmap_ddp"


if __name__ == "__main__":
  sys.path.insert(0, str(Path(__file__).parents[1]))
  import conftest  # noqa: F401  # eight devices, and the flags of the tests

  import strategies
  from lab.benchmarks import guide

  FOLDER.mkdir(exist_ok=True)
  for topology in (None, SLICE) if "--topology" in sys.argv else (None,):
    for name in strategies.names() if topology else names(strategies.names()):
      if lowers_for(name, topology):
        write(name, topology)
  guide.write()
