"""From a throughput record to its figures: speed, ratios with their spread, bytes.

tables.py, plots.py and `python -m benchmarks.throughput --check` share them, so they cannot disagree.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.cells import INPUT, PEAKS, PEER, REFERENCE

Record = dict[str, Any]

# The throughput we want on the most devices where they are simulated, the single device's = 1; and on one device,
# PyTorch's = 1.
AIMS = {"data_parallel": 0.95, "fsdp": 0.95}
AIM, PEER_AIM = 0.85, 1.0


@dataclasses.dataclass(frozen=True)
class Aim:
  """What a row should come to, and what it did; None if it was not measured."""

  row: str
  wanted: float
  got: float | None

  @property
  def met(self) -> bool:
    return self.got is not None and round(self.got, 2) >= self.wanted


@dataclasses.dataclass(frozen=True)
class Figure:
  """A median, and the least and the greatest of what it stands for."""

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
class Row:
  """A strategy, or the peer, at a number of devices.

  Attributes:
    relative: throughput, that of the reference = 1: of the rounds, in each of which it is the median step of all runs
      of the reference over the median step of this.
    seconds: of a step, of all steps of all rounds.
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
  reference = _reference(record)
  if not reference:
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
      reference[turn["turn"]] / statistics.median(turn["seconds"])
      for turn in cell["rounds"]
      if turn["turn"] in reference
    ),
    seconds=seconds,
    per_second=record["items"] / seconds.median,
    bytes=max(peaks) if peaks else cell.get("bytes", {}).get("total"),
    compile_seconds=cell.get("compile_seconds"),
    predicted=cell.get("predicted"),
    flops_share=rate / best if best else None,
  )


def _reference(record: Record) -> dict[int, float]:
  """For each round the median step of the reference, of all its runs there."""
  seconds: dict[int, list[float]] = collections.defaultdict(list)
  for turn in record["cells"][f"{REFERENCE}/1"]["rounds"]:
    seconds[turn["turn"]] += turn["seconds"]
  return {turn: statistics.median(steps) for turn, steps in seconds.items()}


def is_mfu(record: Record) -> bool:
  """Whether a share of FLOP/s is of the makers' figure, and so MFU."""
  return bool(record["hardware"]["peak_flops"])


def peak_flops(record: Record) -> float | None:
  """FLOP/s of one device, or of all cores where devices are simulated: the maker's, else the best that was measured."""
  return record["hardware"]["peak_flops"] if is_mfu(record) else limits(record).get("flops")


def limits(record: Record) -> dict[str, Any]:
  """The best that was measured, of a device or of all cores: `flops` and `copy_bandwidth` a second; their `dtype`."""
  cell = record["cells"][PEAKS]
  measured = [*cell["before"], *cell["rounds"]]
  if not measured:
    return {}
  best = {name: max(turn[name] for turn in measured) for name in ("flops", "copy_bandwidth")}
  return best | {"dtype": measured[0]["dtype"]}


def peers(record: Record) -> list[Row]:
  """The peer's rows, the fastest first and what failed last."""
  found = [row(record, name) for name in record["cells"] if name.startswith(f"{PEER}/")]
  return sorted(found, key=lambda peer: peer.seconds.median if peer.seconds else float("inf"))


def aims(record: Record) -> list[Aim]:
  """What we want of the rows on the most devices, where these are simulated, and of the peer; none for real devices."""
  if not record["hardware"]["simulated"]:
    return []
  measured, theirs = rows(record), peers(record)[:1]
  most = max(row.devices for row in measured)
  found = [row for row in measured if row.devices == most > 1]
  return [
    *(Aim(row.row, AIMS.get(row.row, AIM), row.relative and row.relative.median) for row in found),
    *(Aim(PEER, PEER_AIM, row.relative and 1 / row.relative.median) for row in theirs),
  ]


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
  differences = [abs(loss / turns[0]["loss"] - 1) for loss in losses] if turns else []
  return max(differences, key=lambda x: math.inf if math.isnan(x) else x, default=None)
