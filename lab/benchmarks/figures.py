"""Computes the figures of a throughput record: speed, ratios with their spread, bytes.

The tables, the plots and `python -m tools.benchmark throughput --check` all use these, so they cannot disagree.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

from configs import base
from lab.benchmarks.cells import PEAKS, PEER, REFERENCE, applies
from models.flops import palm_flops_per_example, train_flops_per_example
from models.sizes import model_sizes

Record = dict[str, Any]

# The aims for simulated devices: a strategy's throughput on the most devices (single device = 1), and our throughput on
# one device (that of transformers' Llama in PyTorch = 1).
AIMS = {"data_parallel": 0.95, "fsdp": 0.95}
AIM, PEER_AIM = 0.85, 1.0


@dataclasses.dataclass(frozen=True)
class Aim:
  """The aim of a row, and the throughput it got; None if it was not measured."""

  row: str
  wanted: float
  got: float | None

  @property
  def met(self) -> bool:
    return self.got is not None and round(self.got, 2) >= self.wanted


@dataclasses.dataclass(frozen=True)
class Figure:
  """A median, with the lowest and the highest of the values."""

  median: float
  low: float
  high: float

  @staticmethod
  def of(values: Iterable[float]) -> "Figure":
    values = list(values)
    return Figure(statistics.median(values), min(values), max(values))

  def show(self, form: str) -> str:
    return f"{self.median:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclasses.dataclass(frozen=True)
class Result:
  """The figures of a strategy, or of the peer, at one number of devices.

  Attributes:
    relative: throughput over that of the reference. Each round gives one value: the median step of all runs of the
      reference in the round, over the median step of this row.
    seconds: of a step, over all steps of all rounds.
    per_second: tokens or images a second, from the median step.
    bytes: memory of a device: the peak that the backend reports, else what the compiler plans.
    predicted: the `bytes` of a device and the `seconds` of a step. If the maker's peak FLOP/s is unknown, the seconds
      are those of the step's arithmetic at the speed of the machine's matrix products.
    flops_share: the share of the maker's peak FLOP/s (MFU) or, if that is unknown, of the machine's matrix products.
    palm_share: the same as PaLM counts.
    error: why the row was not measured; it then has no figures.
  """

  name: str
  row: str
  devices: int
  error: str | None = None
  mesh: dict[str, int] | None = None
  relative: Figure | None = None
  seconds: Figure | None = None
  per_second: float | None = None
  bytes: int | None = None
  compile_seconds: float | None = None
  predicted: dict[str, float | None] | None = None
  flops_share: float | None = None
  palm_share: float | None = None


def rows(record: Record) -> list[Result]:
  """The rows of all strategies, in the order of the record. A dense model has none of strategies that share experts."""
  experts = record["config"]["model"].get("experts", 0)
  of_strategy = lambda row: row not in (PEAKS, PEER) and applies(row, experts)
  return [row(record, name) for name in record["cells"] if of_strategy(name.partition("/")[0])]


def row(record: Record, name: str) -> Result:
  cell = record["cells"][name]
  label, _, number = name.partition("/")
  devices = int(number) if number.isdigit() else 1
  if "error" in cell or not cell["rounds"]:
    return Result(name, label, devices, error=cell.get("error", "not measured"))
  reference = _reference(record)
  if not reference:
    return Result(name, label, devices, error="the single device, its reference, was not measured")
  seconds = Figure.of(s for turn in cell["rounds"] for s in turn["seconds"])
  peaks = [turn["peak_bytes"] for turn in cell["rounds"] if turn.get("peak_bytes")]
  best = peak_flops(record)
  all_devices = best and best * (1 if record["hardware"]["simulated"] else devices)
  needed, palm = flops(record)
  predicted = cell.get("predicted") or {}
  if all_devices and not is_mfu(record):
    predicted = predicted | {"seconds": needed / all_devices}
  return Result(
    name,
    label,
    devices,
    mesh=cell.get("mesh"),
    relative=Figure.of(
      reference[turn["turn"]] / statistics.median(turn["seconds"])
      for turn in cell["rounds"]
      if turn["turn"] in reference
    ),
    seconds=seconds,
    per_second=record["items"] / seconds.median,
    bytes=max(peaks) if peaks else cell.get("bytes", {}).get("total"),
    compile_seconds=cell.get("compile_seconds"),
    predicted=predicted,
    flops_share=needed / seconds.median / all_devices if all_devices else None,
    palm_share=palm / seconds.median / all_devices if all_devices else None,
  )


def _reference(record: Record) -> dict[int, float]:
  """The median step of the reference in each round, over all its runs in that round."""
  seconds: dict[int, list[float]] = collections.defaultdict(list)
  for turn in record["cells"][f"{REFERENCE}/1"]["rounds"]:
    seconds[turn["turn"]] += turn["seconds"]
  return {turn: statistics.median(steps) for turn, steps in seconds.items()}


def spread(record: Record) -> float | None:
  """How much the reference itself varies: its slowest run over its fastest, less 1. A run counts with its median step.

  None if it ran less than twice. It is measured in every round, and several times in a long one.
  """
  runs = [statistics.median(turn["seconds"]) for turn in record["cells"][f"{REFERENCE}/1"]["rounds"]]
  return max(runs) / min(runs) - 1 if len(runs) > 1 else None


def flops(record: Record) -> tuple[float, float]:
  """The FLOPs that a step needs, and those as PaLM counts. Computed here, so that all records count in the same way."""
  config = base.get_config("lm", "single")
  config.model.update(record["config"]["model"])
  sizes, examples = model_sizes(config), record["config"]["batch_size"]
  return examples * train_flops_per_example(sizes), examples * palm_flops_per_example(sizes)


def is_mfu(record: Record) -> bool:
  """Whether the maker's peak FLOP/s is known, so that a share of it is MFU."""
  return bool(record["hardware"]["peak_flops"])


def peak_flops(record: Record) -> float | None:
  """Peak FLOP/s of one device, or of all cores with simulated devices: the maker's, else the best measured."""
  return record["hardware"]["peak_flops"] if is_mfu(record) else limits(record).get("flops")


def limits(record: Record) -> dict[str, Any]:
  """The best measured `flops` and `copy_bandwidth` a second, of a device or of all cores, and the `dtype`."""
  cell = record["cells"][PEAKS]
  measured = [*cell["before"], *cell["rounds"]]
  if not measured:
    return {}
  best = {name: max(turn[name] for turn in measured) for name in ("flops", "copy_bandwidth")}
  return best | {"dtype": measured[0]["dtype"]}


def peers(record: Record) -> list[Result]:
  """The peer's rows: the fastest first, failed ones last."""
  found = [row(record, name) for name in record["cells"] if name.startswith(f"{PEER}/")]
  return sorted(found, key=lambda peer: peer.seconds.median if peer.seconds else float("inf"))


def most(record: Record, failed: bool = False) -> list[Result]:
  """The rows on the most devices; empty if all rows are on one. Rows without figures are included if `failed`."""
  found = rows(record)
  count = max(row.devices for row in found)
  return [row for row in found if row.devices == count > 1 and (failed or row.relative)]


def aims(record: Record) -> list[Aim]:
  """The aims of the rows on the most devices and of the comparison with the peer. Real devices have no aims."""
  if not record["hardware"]["simulated"]:
    return []
  return [
    *(Aim(row.row, AIMS.get(row.row, AIM), row.relative and row.relative.median) for row in most(record, failed=True)),
    *(Aim(PEER, PEER_AIM, row.relative and 1 / row.relative.median) for row in peers(record)[:1]),
  ]


def loss_spread(record: Record) -> float | None:
  """The largest relative difference of a strategy's loss from the reference's."""
  losses = [turn["loss"] for cell in record["cells"].values() for turn in cell["rounds"] if "loss" in turn]
  turns = record["cells"][f"{REFERENCE}/1"]["rounds"]
  differences = [abs(loss / turns[0]["loss"] - 1) for loss in losses] if turns else []
  return max(differences, key=lambda x: math.inf if math.isnan(x) else x, default=None)
