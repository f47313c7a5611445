"""The cells of the throughput table: what is measured, and the specification that a process gets for each.

A cell is one strategy at one number of devices, or the peer (in PyTorch), or the machine's peak speeds. Next: rounds.py
runs the cells, worker.py and torch_llama.py measure them, figures.py computes the figures.
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
REFERENCE = "single"  # the others are compared with it; always on one device
PEER, PEAKS = "peer", "peaks"  # rows that are not strategies
PEER_NAME = "transformers' Llama"  # what is measured of PyTorch: that model, with its own loss
COMPILED = "-compiled"  # ends the name of a peer's cell that runs torch.compile on a CPU
WORKER = (sys.executable, "-m", "lab.benchmarks.worker")


@dataclasses.dataclass(frozen=True)
class Cell:
  """One measurement, and the process that makes it.

  Attributes:
    name: its name in the record, such as "fsdp/8".
    row: its name in `--rows`.
    devices: the number of devices it uses; 0 for the machine's peak speeds.
    command: the command line of the process.
    spec: the specification that the process reads from standard input. rounds.py adds `task` if it is missing.
    compiled: whether round 0 compiles it.
  """

  name: str
  row: str
  devices: int
  command: tuple[str, ...]
  spec: dict[str, Any]
  compiled: bool = False


def rows() -> list[str]:
  """The values of `--rows`. The reference and the machine's peak speeds are always measured."""
  return [*strategies.names(), PEER]


def applies(row: str, experts: int) -> bool:
  """Whether a row shows what it is named after: a strategy that shares experts needs a model with experts.

  A row that is no strategy applies: the peer, and a strategy in an older record that no longer exists.
  """
  return bool(experts) or row not in strategies.names() or not strategies.layout_of(row).axes("experts")


def select(
  config: Any, wanted: Sequence[str], devices: Sequence[int], peer_python: str, platform: str, dtype: str
) -> list[Cell]:
  """The cells of these rows at these numbers of devices. The reference comes first, on one device only."""
  cells = []
  for name in [REFERENCE, *(name for name in strategies.names() if name in wanted and name != REFERENCE)]:
    for n in devices if name != REFERENCE else (1,):
      cells.append(Cell(f"{name}/{n}", name, n, WORKER, training(config, name, n), compiled=True))
  if PEER in wanted and not without_peer(config, platform, dtype):
    program = str(Path(__file__).with_name("torch_llama.py"))
    # Which of these is the fastest differs between CPUs. On a GPU it is the compiled model.
    kinds = ("eager", "sdpa", f"sdpa{COMPILED}") if platform == "cpu" else ("sdpa",)
    for kind in kinds:
      compiled = platform != "cpu" or kind.endswith(COMPILED)
      spec = {"config": config.to_dict(), "attention": kind.removesuffix(COMPILED), "compiled": compiled}
      # -P keeps this folder off sys.path, so that its modules cannot shadow PyTorch's imports.
      cells.append(Cell(f"{PEER}/{kind}", PEER, 1, (peer_python, "-P", program), spec))
  return [*cells, Cell(PEAKS, PEAKS, 0, WORKER, {"task": "peaks", "dtype": dtype})]


def training(config: Any, strategy: str, devices: int) -> dict[str, Any]:
  """The specification of a strategy's cell. The examples are synthetic, so that they are equal on every machine."""
  asked = config.copy_and_resolve_references()
  asked.strategy = strategy
  asked.data.name = "synthetic"
  return {"config": asked.to_dict(), "devices": devices}


def without_peer(config: Any, platform: str, dtype: str) -> str | None:
  """Why the peer cannot do the same work as this config; None if it can."""
  if config.model.inputs != "tokens":
    return "the peer is a language model"
  usual = "float32" if platform == "cpu" else "bfloat16"
  theirs = {"dtype": usual, "param_dtype": "float32", "remat": "minimal", "dropout": 0.0, "accumulation": 1}
  ours = config.model.to_dict() | {"dtype": dtype, "accumulation": config.accumulation}
  return next(
    (f"the peer is compared only with {name}={value}" for name, value in theirs.items() if ours[name] != value), None
  )


def check(config: Any) -> None:
  """Raises ConfigError if the config sets a field that the table sets for each row."""
  for axis, size in config.mesh.items():
    if size is not None:
      raise ConfigError(f"mesh.{axis}={size} cannot be set here, because each row sets its own mesh; leave it out")
  if config.simulated_devices != base.get_config("lm", REFERENCE).simulated_devices:
    raise ConfigError(f"simulated_devices={config.simulated_devices} cannot be set here; use --devices instead")
