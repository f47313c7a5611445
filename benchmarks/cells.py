"""Which cells the throughput table has, and the specification that a process gets for each of them.

A cell is one strategy at one number of devices, or the peer, the input pipeline, or the machine's own limits. Next:
rounds.py runs them, worker.py and torch_llama.py measure them, figures.py turns what was measured into figures.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import strategies
from configs import base
from errors import ConfigError

DEVICES = (1, 2, 4, 8)
REFERENCE = "single"  # what the others are measured against, on one device
PEER, INPUT, PEAKS = "peer", "input", "peaks"  # the rows that are no strategies
WORKER = (sys.executable, "-m", "benchmarks.worker")
INPUT_PRESETS = {"text": "lm", "cifar10": "cifar10"}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One measurement, and how a process makes it.

  Attributes:
    name: in the record, such as "fsdp/8".
    row: what `--rows` calls it.
    devices: how many it uses; 0 for what has no devices.
    command: of the process, without the specification.
    spec: what it is told; `task` is added by who runs it, unless it stands here.
    compiled: whether it is compiled once apart from being timed.
  """

  name: str
  row: str
  devices: int
  command: tuple[str, ...]
  spec: dict[str, Any]
  compiled: bool = False


def rows() -> list[str]:
  """All that `--rows` can name; the reference and the machine's limits are always measured."""
  return [*strategies.names(), INPUT, PEER]


def plan(
  config: Any, wanted: Sequence[str], devices: Sequence[int], peer_python: str, platform: str, dtype: str
) -> list[Cell]:
  """The cells of the rows and numbers of devices that are wanted; the reference first, on one device alone."""
  cells = []
  for name in [REFERENCE, *(name for name in strategies.names() if name in wanted and name != REFERENCE)]:
    for n in devices if name != REFERENCE else (1,):
      cells.append(Cell(f"{name}/{n}", name, n, WORKER, training(config, name, n), compiled=True))
  if INPUT in wanted:
    for name, preset in INPUT_PRESETS.items():
      asked = base.get_config(preset, "data_parallel")
      asked.data.update(dir=config.data.dir, cache_dir=config.data.cache_dir)
      spec = {"task": "input", "config": asked.to_dict(), "devices": max(devices), "seconds": 1.0}
      cells.append(Cell(f"{INPUT}/{name}", INPUT, max(devices), WORKER, spec))
  if PEER in wanted and not without_peer(config, platform, dtype):
    program = str(Path(__file__).with_name("torch_llama.py"))
    # Eager attention and PyTorch's fused one: the page tells which is faster. On a GPU all is compiled.
    for kind in ("eager", "sdpa") if platform == "cpu" else ("sdpa",):
      spec = {"config": config.to_dict(), "attention": kind}
      # -P: this folder's modules must not stand in the way of PyTorch's own imports.
      cells.append(Cell(f"{PEER}/{kind}", PEER, 1, (peer_python, "-P", program), spec))
  return [*cells, Cell(PEAKS, PEAKS, 0, WORKER, {"task": "peaks", "dtype": dtype})]


def training(config: Any, strategy: str, devices: int) -> dict[str, Any]:
  """The specification of a strategy's cell: the config with made-up examples, so that every machine reads the same."""
  asked = config.copy_and_resolve_references()
  asked.strategy = strategy
  asked.data.name = "synthetic"
  return {"config": asked.to_dict(), "devices": devices}


def without_peer(config: Any, platform: str, dtype: str) -> str | None:
  """Why the peer would not do the same work as this config; None where it does."""
  if config.model.inputs != "tokens":
    return "it is a language model"
  usual = "float32" if platform == "cpu" else "bfloat16"
  theirs = {"dtype": usual, "param_dtype": "float32", "remat": "minimal", "dropout": 0.0, "accumulation": 1}
  ours = config.model.to_dict() | {"dtype": dtype, "accumulation": config.accumulation}
  return next((f"it has {name}={value}" for name, value in theirs.items() if ours[name] != value), None)


def check(config: Any) -> None:
  """Raises ConfigError if the config holds what the table sets itself."""
  for axis, size in config.mesh.items():
    if size is not None:
      raise ConfigError(f"mesh.{axis}={size} is for one run, and the table sets each row's own; leave it out")
  if config.simulated_devices != base.get_config("lm", REFERENCE).simulated_devices:
    raise ConfigError(f"simulated_devices={config.simulated_devices} is for one run; name the table's by --devices")
