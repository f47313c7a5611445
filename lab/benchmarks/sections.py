"""What the throughput pages show of one record: a summary for README.md, and all tables for tables.md."""

from collections.abc import Sequence
from typing import Any

from lab.benchmarks import figures
from lab.benchmarks.cells import COMPILED, PEER_NAME
from lab.benchmarks.figures import Record, Result
from lab.benchmarks.header import source
from reporting.pages.units import mfu

NONE = "–"
SIMULATED = (
  "**Overhead on shared cores, not scaling.** The devices are simulated, and the same {cores} cores do the work of all "
  "of them. So more devices cannot make a row faster. A row shows what splitting costs. All rows have the same global "
  "batch."
)
REAL = "Throughput is that of all devices together. All rows have the same global batch."


def where(record: Record) -> str:
  """The machine of a record in a few words."""
  hardware = record["hardware"]
  if hardware["simulated"]:
    return f"{hardware['cores']} cores of {hardware['cpu']}"
  return f"{hardware['devices']} × {hardware['kind']}"


def summary(name: str, record: Record) -> str:
  """A record's section in README.md: the rows on the most devices, the peer, and the aims."""
  return "\n".join(
    [
      f"## {title(record)}",
      "",
      SIMULATED.format(cores=record["hardware"]["cores"]) if record["hardware"]["simulated"] else REAL,
      "",
      *_most(record),
      "",
      *_peer(record),
      "",
      *_aims(record),
      f"![Throughput of the strategies](plots/{name}-speed.png)",
      "",
      f"{_model(record)} {record['rounds']} rounds of {record['steps']} steps were timed. All other figures are in "
      f"[tables.md](tables.md), and the raw seconds in [results/{name}.json](results/{name}.json).",
      "",
      f"{source(record)} Commit {record['commit']}{', with changes' if record['dirty'] else ''}; "
      f"load of the machine before the run: {record['load']:.1f}.",
    ]
  )


def details(name: str, record: Record) -> str:
  """A record's section in tables.md: all rows, predictions and compile times."""
  spread = figures.loss_spread(record)
  return "\n".join(
    [
      f"## {title(record)}",
      "",
      _model(record) + _peaks(record),
      *(["", f"All rows reach the same loss, to {spread:.0e} relative."] if spread is not None else []),
      "",
      "### Speed",
      "",
      *_speed(record),
      "",
      "### Memory, predictions and compile time",
      "",
      *_predictions(record),
      "",
      f"![Memory of a device](plots/{name}-memory.png)",
    ]
  )


def title(record: Record) -> str:
  """The machine and the model of a record."""
  return f"{where(record)}, {record['parameters'] / 1e6:.1f} M parameters{_mixture(record)}"


def _mixture(record: Record) -> str:
  """The number of experts of its model, in words; "" if the model is dense."""
  experts = record["config"]["model"].get("experts", 0)
  return f", {experts} experts" if experts else ""


def _model(record: Record) -> str:
  model = record["config"]["model"]
  shape = f"{model['seq_len']} tokens" if record["unit"] == "tokens" else f"{model['image_size']}² pixels"
  return (
    f"The model has {record['parameters'] / 1e6:.1f} M parameters ({model['depth']} blocks of width "
    f"{model['width']}{_mixture(record)}). "
    f"A global batch has {record['config']['batch_size']} synthetic examples of {shape}. A step takes "
    f"{figures.flops(record)[0] / 1e12:.3g} TFLOP."
  )


def _peaks(record: Record) -> str:
  best = figures.limits(record)
  if not best:
    return ""
  whose = "all cores together" if record["hardware"]["simulated"] else "a device"
  return (
    f" The best speeds that were measured of {whose}: {best['flops'] / 1e9:,.0f} GFLOP/s in a large {best['dtype']} "
    f"matrix product, and {best['copy_bandwidth'] / 1e9:.0f} GB/s in a copy (read and written)."
  )


def _most(record: Record) -> list[str]:
  """The single device, and every strategy on the most devices."""
  aims = {aim.row: f"{aim.wanted:.2f}" for aim in figures.aims(record)}
  heads = ("Strategy", "Mesh", "Throughput, single device = 1", "Aim", f"{record['unit']}/s", "Step", "Memory a device")
  rows = [*figures.rows(record)[:1], *figures.most(record, failed=True)]
  return table(
    heads,
    [
      (row.row, f"not measured: {row.error}")
      if row.error
      else (
        row.row, _mesh(row), row.relative.show(".2f"), aims.get(row.row, NONE), f"{row.per_second:,.0f}", _step(row),
        megabytes(row.bytes),
      )
      for row in rows
    ],
  )  # fmt: skip


def _aims(record: Record) -> list[str]:
  found = figures.aims(record)
  if not found:
    return []
  kinds = ", ".join(f"{aim} for {name}" for name, aim in figures.AIMS.items())
  unknown = [_name(aim.row) for aim in found if aim.got is None]
  return [
    f"The aims on the most devices are {kinds} and {figures.AIM} for the other strategies. On one device the aim is "
    f"{figures.PEER_AIM} times the speed of {PEER_NAME} in PyTorch. "
    + " ".join([*missed(record), *([f"Not measured: {', '.join(unknown)}."] if unknown else [])]),
    "",
  ]


def missed(record: Record) -> list[str]:
  """The sentence on missed aims; empty if nothing that has an aim was measured."""
  measured = [aim for aim in figures.aims(record) if aim.got is not None]
  wrong = [f"{_name(aim.row)} {aim.got:.2f} of {aim.wanted:.2f}" for aim in measured if not aim.met]
  if wrong:
    return [f"Missed aims: {', '.join(wrong)}."]
  return ["All measured aims are met."] if measured else []


def _name(row: str) -> str:
  return PEER_NAME if row == figures.PEER else row


def _speed(record: Record) -> list[str]:
  share = "MFU (as PaLM counts)" if figures.is_mfu(record) else "Share of the matrix product's FLOP/s"
  heads = ("Strategy", "Devices", "Mesh", "Throughput, single device = 1", f"{record['unit']}/s", "Step", share)
  return table(
    heads,
    [
      (row.row, str(row.devices), f"not measured: {row.error}")
      if row.error
      else (
        row.row, str(row.devices), _mesh(row), row.relative.show(".2f"), f"{row.per_second:,.0f}", _step(row),
        _share(record, row),
      )
      for row in figures.rows(record)
    ],
  )  # fmt: skip


def _share(record: Record, row: Result) -> str:
  if not row.flops_share or not row.palm_share:
    return NONE
  return mfu(row.flops_share, row.palm_share, digits=0) if figures.is_mfu(record) else f"{row.flops_share:.0%}"


def _predictions(record: Record) -> list[str]:
  heads = ("Strategy", "Devices", "Memory a device", "Memory, predicted", "Step", "Step, predicted", "Compile time")
  lines = []
  for row in figures.rows(record):
    if not row.error:
      predicted = row.predicted or {}
      lines.append((
        row.row, str(row.devices), megabytes(row.bytes), megabytes(predicted.get("bytes")),
        f"{milliseconds(row.seconds.median)} ms",
        f"{milliseconds(predicted['seconds'])} ms" if predicted.get("seconds") else NONE,
        f"{row.compile_seconds:.1f} s" if row.compile_seconds else NONE,
      ))  # fmt: skip
  return table(heads, lines)


def _peer(record: Record) -> list[str]:
  rows = figures.peers(record)
  if not rows:
    return [f"{PEER_NAME} was not measured ({record['left_out'].get('peer', 'it was not in --rows')})."]
  lines = []
  for row in rows:
    kind = row.name.partition("/")[2]
    if row.error:
      lines.append((_name(figures.PEER) + f", {kind}", f"not measured: {row.error}"))
      continue
    turn = record["cells"][row.name]["rounds"][0]
    versions = ", ".join(f"{name} {version}" for name, version in turn["versions"].items())
    lines.append((
      f"{kind.removesuffix(COMPILED)} attention, {turn['precision']} ({versions})", f"{row.per_second:,.0f}",
      f"{milliseconds(row.seconds.median)} ms", f"{1 / row.relative.median:.2f}",
    ))  # fmt: skip
  heads = (f"{PEER_NAME} in PyTorch, same sizes, one device", f"{record['unit']}/s", "Step", "Our throughput, its = 1")
  return table(heads, lines)


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
  """A Markdown table. Short rows are filled up with dashes."""
  filled = [(*row, *[NONE] * (len(heads) - len(row))) for row in rows]
  return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in filled)]


def _mesh(row: Result) -> str:
  return " × ".join(f"{axis}={size}" for axis, size in (row.mesh or {}).items())


def _step(row: Result) -> str:
  assert row.seconds is not None
  low, median, high = map(milliseconds, (row.seconds.low, row.seconds.median, row.seconds.high))
  return f"{median} ({low}–{high}) ms"


def milliseconds(seconds: float) -> str:
  return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def megabytes(size: Any) -> str:
  return NONE if size is None else f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
