"""benchmarks/README.md from the records: what each table says, and where it stands.

`python -m benchmarks.throughput --tables` writes the page and its plots again.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks import figures, plots
from benchmarks.figures import Record, Row
from benchmarks.pages import ROOT, fill, source

RESULTS, PAGE, PLOTS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "plots"
NONE = "–"
SIMULATED = (
  "**Overhead on shared cores, not scaling.** These devices are simulated: however many there are, the same {cores} "
  "cores do the work, so no row can be faster by having more of them. A row says what splitting costs beside the "
  "single device, at the same global batch."
)
REAL = "Throughput of all devices together; the single device has the same global batch."


def read(folder: Path = RESULTS) -> dict[str, Record]:
  """The throughput records in a folder, by name."""
  found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
  return {name: record for name, record in found.items() if record.get("kind") == "throughput"}


def digest(record: Record) -> str:
  """The SHA-256 of a record, or of a part of one; plots carry that of their record."""
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write(results: Path = RESULTS, page: Path = PAGE, folder: Path = PLOTS) -> None:
  """Writes the generated part of the page, and the plots; plots of records that are gone are removed."""
  records = read(results)
  page.write_text(fill(page.read_text(), parts(records)))
  folder.mkdir(exist_ok=True)
  for old in folder.glob("*.png"):
    old.unlink()
  for name, record in records.items():
    plots.draw(folder, name, record, digest(record))


def stale(results: Path = RESULTS, page: Path = PAGE, folder: Path = PLOTS) -> list[str]:
  """The names of files that are not what the records make of them: the page, pictures, and pictures of no record."""
  records = read(results)
  wanted = {f"{name}-{kind}.png": digest(record) for name, record in records.items() for kind in plots.KINDS}
  there = {picture.name: plots.digest_of(picture) for picture in folder.glob("*.png")}
  wrong = [name for name in sorted(wanted | there) if wanted.get(name) != there.get(name)]
  text = page.read_text()
  return wrong if fill(text, parts(records)) == text else [page.name, *wrong]


def parts(records: dict[str, Record]) -> dict[str, str]:
  """The generated parts of the page, by the names of their places."""
  sections = [section(name, record) for name, record in records.items()]
  return {"records": "\n\n".join(sections) if sections else "No throughput record is here yet."}


def section(name: str, record: Record) -> str:
  """All that the page says of one record."""
  hardware, model = record["hardware"], record["config"]["model"]
  what = SIMULATED.format(cores=hardware["cores"]) if hardware["simulated"] else REAL
  size = " × ".join(f"{model[field]} {label}" for field, label in (("depth", "blocks"), ("width", "wide")))
  shape = f"{model['seq_len']} tokens" if record["unit"] == "tokens" else f"{model['image_size']}² pixels"
  spread = figures.loss_spread(record)
  lines = [
    f"## {name}",
    "",
    what,
    "",
    f"The model has {record['parameters'] / 1e6:.1f} M parameters ({size}); a global batch is "
    f"{record['config']['batch_size']} made-up examples of {shape}, {record['flops'] / 1e12:.3g} TFLOP a step. "
    + _limits(record),
    "",
    *_strategies(record),
    "",
    *_aims(record),
    f"![Throughput of the strategies](plots/{name}-speed.png)",
    "",
    f"![Memory of a device](plots/{name}-memory.png)",
    "",
    *_peer(record),
    "",
    *_input(record),
    "",
    f"{record['rounds']} rounds of {record['steps']} steps. "
    + (f"All rows came to the same loss, to {spread:.0e} relative. " if spread is not None else "")
    + f"Raw seconds: [results/{name}.json](results/{name}.json).",
    "",
    f"{source(record)} Commit {record['commit']}{', with changes' if record['dirty'] else ''}; "
    f"the machine's load before the run was {record['load']:.1f}.",
  ]
  return "\n".join(lines)


def _limits(record: Record) -> str:
  best = figures.limits(record)
  if not best:
    return ""
  whose = "all cores" if record["hardware"]["simulated"] else "a device"
  return (
    f"At best, {whose} did {best['flops'] / 1e9:,.0f} GFLOP/s in a large {best['dtype']} matrix product and copied "
    f"{best['copy_bandwidth'] / 1e9:.0f} GB/s (read and written)."
  )


def _strategies(record: Record) -> list[str]:
  share = "MFU" if figures.is_mfu(record) else "Of the matrix products' speed"
  heads = (
    "Strategy", "Devices", "Mesh", f"{record['unit']}/s", "Single device = 1", "Step", "Memory a device", "predicted",
    "Step, predicted", share, "Compile",
  )  # fmt: skip
  lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
  for row in figures.rows(record):
    lines.append("| " + " | ".join(_cells(row)) + " |")
  return lines


def _aims(record: Record) -> list[str]:
  found = figures.aims(record)
  if not found:
    return []
  wanted = ", ".join(f"{aim} for {name}" for name, aim in figures.AIMS.items())
  missed = [f"{aim.row} {aim.got:.2f} of {aim.wanted:.2f}" for aim in found if aim.got and not aim.met]
  unknown = [aim.row for aim in found if aim.got is None]
  told = [f"Missed: {', '.join(missed)}."] * bool(missed) + [f"Not measured: {', '.join(unknown)}."] * bool(unknown)
  return [
    f"The aims on the most devices: {wanted}, {figures.AIM} for the others; and {figures.PEER_AIM} of PyTorch's speed "
    f"on one. {' '.join(told) or 'All of those measured are met.'}",
    "",
  ]


def _cells(row: Row) -> list[str]:
  if row.error:
    return [row.row, str(row.devices), f"not measured: {row.error}", *[NONE] * 8]
  predicted = row.predicted or {}
  return [
    row.row,
    str(row.devices),
    " × ".join(f"{axis}={size}" for axis, size in (row.mesh or {}).items()),
    f"{row.per_second:,.0f}",
    row.relative.show(".2f"),
    f"{milliseconds(row.seconds.median)} ({milliseconds(row.seconds.low)}–{milliseconds(row.seconds.high)}) ms",
    megabytes(row.bytes),
    megabytes(predicted.get("bytes")),
    f"{milliseconds(predicted['seconds'])} ms" if predicted.get("seconds") else NONE,
    f"{row.flops_share:.0%}" if row.flops_share else NONE,
    f"{row.compile_seconds:.1f} s" if row.compile_seconds else NONE,
  ]


def _peer(record: Record) -> list[str]:
  rows = figures.peers(record)
  if not rows:
    return [f"PyTorch beside it: not measured ({record['left_out'].get('peer', 'not asked for')})."]
  lines = [
    f"| PyTorch, same model, one device | {record['unit']}/s | Step | Ours / it (median of rounds) |",
    "|---" * 4 + "|",
  ]
  for row in rows:
    if row.error:
      lines.append(f"| {row.name} | not measured: {row.error} | {NONE} | {NONE} |")
      continue
    turn = record["cells"][row.name]["rounds"][0]
    versions = ", ".join(f"{name} {version}" for name, version in turn["versions"].items())
    lines.append(
      f"| {row.name.partition('/')[2]} attention, {turn['precision']} ({versions}) | {row.per_second:,.0f} "
      f"| {milliseconds(row.seconds.median)} ms | {1 / row.relative.median:.2f} |"
    )
  return lines


def _input(record: Record) -> list[str]:
  found = figures.inputs(record)
  if not found:
    return ["The input pipeline alone: not measured (not asked for)."]
  lines = [
    "| Input alone, batches/s (samples/s) | Batch | Gather on the host | Transfer | Both, prefetched | To devices |",
    "|---" * 6 + "|",
  ]
  for name, cell in found.items():
    if not cell["speed"]:
      lines.append(f"| {name} | not measured: {cell.get('error')} | {NONE} | {NONE} | {NONE} | {NONE} |")
      continue
    size, devices = cell["rounds"][0]["batch_size"], cell["rounds"][0]["devices"]
    speeds = [f"{speed.median:,.0f} ({speed.median * size:,.0f})" for speed in cell["speed"].values()]
    lines.append(f"| {name} | {size} | {' | '.join(speeds)} | {devices} |")
  return lines


def milliseconds(seconds: float) -> str:
  return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def megabytes(size: Any) -> str:
  return NONE if size is None else f"{size / 1e6:,.1f} MB" if size < 1e10 else f"{size / 1e9:,.1f} GB"
