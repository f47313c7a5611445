"""From a throughput record to its figures: speed, ratios with their spread, bytes.

tables.py, plots.py and `python -m tools.throughput --check` share them, so they cannot disagree.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.cells import INPUT, PEAKS, PEER, REFERENCE

Record = dict[str, Any]

# The throughput we want on the most devices where they are simulated, the single device's = 1; and on one device,
# PyTorch's = 1.
AIMS = {"data_parallel": 0.95, "fsdp": 0.95}
AIM, PEER_AIM = 0.85, 1.0


@dataclasses.dataclass(frozen=True)
class Figure:
  """A median, and the least and the greatest of what it stands for."""

  median: float
  low: float
  high: float

  @staticmethod
  def of(values: Iterable[float], median: float | None = None) -> "Figure":
    values = list(values)
    return Figure(statistics.median(values) if median is None else median, min(values), max(values))

  def show(self, form: str) -> str:
    return f"{self.median:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclasses.dataclass(frozen=True)
class Row:
  """A strategy, or the peer, at a number of devices.

  Attributes:
    relative: throughput, that of the reference = 1. The median is of the rounds, in each of which it is the median
      step of all runs of the reference over the median step of this; low and high are of all single steps.
    seconds: of a step.
    per_second: tokens or images.
    bytes: of a device: its peak where the backend tells it, else what the compiler has planned.
    flops_share: of the FLOP/s that the devices are known for (MFU), else of the machine's own matrix products.
    error: why it was not measured; then there are no figures.
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


def rows(record: Record) -> list[Row]:
  """Every strategy's rows, in the order of the record."""
  return [row(record, name) for name in record["cells"] if name.partition("/")[0] not in (INPUT, PEAKS, PEER)]


def row(record: Record, name: str) -> Row:
  cell = record["cells"][name]
  label, _, number = name.partition("/")
  devices = int(number) if number.isdigit() else 1
  if "error" in cell or not cell["rounds"]:
    return Row(name, label, devices, error=cell.get("error", "not measured"))
  if not _against(record):
    return Row(name, label, devices, error="the single device it is compared with was not measured")
  seconds = Figure.of(s for turn in cell["rounds"] for s in turn["seconds"])
  peaks = [turn["peak_bytes"] for turn in cell["rounds"] if turn.get("peak_bytes")]
  best = peak_flops(record)
  rate = record["flops"] / seconds.median / (1 if record["hardware"]["simulated"] else devices)
  return Row(
    name,
    label,
    devices,
    mesh=cell.get("mesh"),
    relative=Figure.of(
      [reference / s for reference, steps in _turns(record, cell) for s in steps],
      statistics.median(reference / statistics.median(steps) for reference, steps in _turns(record, cell)),
    ),
    seconds=seconds,
    per_second=record["items"] / seconds.median,
    bytes=max(peaks) if peaks else cell.get("bytes", {}).get("total"),
    compile_seconds=cell.get("compile_seconds"),
    predicted=cell.get("predicted"),
    flops_share=rate / best if best else None,
  )


def _against(record: Record) -> list[float]:
  """The median step of the reference in each round, of its several runs there."""
  turns = record["cells"][f"{REFERENCE}/1"]["rounds"]
  each = max(len(turns) // max(record["rounds"], 1), 1)
  parts = [turns[start : start + each] for start in range(0, len(turns), each)]
  return [statistics.median(s for turn in part for s in turn["seconds"]) for part in parts]


def _turns(record: Record, cell: Record) -> Iterator[tuple[float, list[float]]]:
  """For each run of a cell the reference's median step in that round, and the cell's steps."""
  against = _against(record)
  each = max(len(cell["rounds"]) // max(record["rounds"], 1), 1)
  for number, turn in enumerate(cell["rounds"]):
    if number // each < len(against):
      yield against[number // each], turn["seconds"]


def is_mfu(record: Record) -> bool:
  """Whether a share of FLOP/s is of the makers' figure, and so MFU."""
  return bool(record["hardware"]["peak_flops"])


def peak_flops(record: Record) -> float | None:
  """FLOP/s of one device, or of all cores where devices are simulated: the maker's, else the best that was measured."""
  if is_mfu(record):
    return record["hardware"]["peak_flops"]
  measured = [turn["flops"] for turn in record["cells"][PEAKS]["rounds"]]
  return max(measured) if measured else None


def peers(record: Record) -> list[Row]:
  """The peer's rows, the fastest first and what failed last."""
  found = [row(record, name) for name in record["cells"] if name.startswith(f"{PEER}/")]
  return sorted(found, key=lambda peer: peer.seconds.median if peer.seconds else float("inf"))


def missed(record: Record) -> dict[str, tuple[float, float]]:
  """The rows of a record of simulated devices that miss their aim: what they came to, and what was wanted."""
  most = max((row.devices for row in rows(record)), default=0)
  found = {row.row: (row, AIMS.get(row.row, AIM)) for row in rows(record) if row.devices == most > 1}
  short = {name: (row.relative.median, aim) for name, (row, aim) in found.items() if row.relative}
  for peer in peers(record)[:1]:
    if peer.relative:
      short[PEER] = (1 / peer.relative.median, PEER_AIM)
  return {name: (got, aim) for name, (got, aim) in short.items() if round(got, 2) < aim}


def inputs(record: Record) -> dict[str, dict[str, Any]]:
  """For each data set its cell, and in `speed` the batches a second of each part, as the median of the rounds."""
  found = {}
  for name, cell in record["cells"].items():
    if name.startswith(f"{INPUT}/"):
      parts = ("gather", "transfer", "both") if cell["rounds"] else ()
      speed = {
        part: Figure.of(turn[part]["batches"] / turn[part]["seconds"] for turn in cell["rounds"]) for part in parts
      }
      found[name.partition("/")[2]] = cell | {"speed": speed}
  return found


def loss_spread(record: Record) -> float | None:
  """The largest relative difference of the losses that the strategies came to, from the reference's."""
  losses = [turn["loss"] for cell in record["cells"].values() for turn in cell["rounds"] if "loss" in turn]
  turns = record["cells"][f"{REFERENCE}/1"]["rounds"]
  return max(abs(loss / turns[0]["loss"] - 1) for loss in losses) if turns else None
