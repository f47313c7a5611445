"""Writes the throughput pages and their plots from the records, and finds out whether they are up to date.

`python -m tools.benchmark throughput --tables` writes them. Next: sections.py, the tables of one record.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from lab.benchmarks import cells, figures, plots, sections
from lab.benchmarks.figures import Record
from lab.benchmarks.pages import RESULTS, ROOT, fill

PLOTS = ROOT / "lab" / "benchmarks" / "plots"
# The pages, and the names of the places on each that are generated.
PAGES = {
  ROOT / "lab" / "benchmarks" / "README.md": ("message", "records"),
  ROOT / "lab" / "benchmarks" / "tables.md": ("tables",),
  ROOT / "docs" / "throughput.md": ("machines",),
}
SHARED = (
  "Simulated devices share the cores of one machine. So these figures show what splitting costs, and never how it "
  "scales: 1 means that splitting costs nothing."
)

# Rows of the table of machines, before and after those of the strategies.
FIRST = DEVICES, SINGLE = "devices", "single"
LAST = TO_PEER, DATE = f"single, {cells.PEER_NAME} = 1", "date, load"

Pages = Mapping[Path, tuple[str, ...]]


def read(folder: Path = RESULTS) -> dict[str, Record]:
  """The throughput records in a folder, by name."""
  found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
  return {name: record for name, record in found.items() if record.get("kind") == "throughput"}


def digest(record: Record) -> str:
  """The SHA-256 of a record or of a part of one. A plot carries its record's."""
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write(results: Path = RESULTS, pages: Pages = PAGES, folder: Path = PLOTS) -> None:
  """Writes the generated parts of the pages, and the plots. Removes the plots of records that no longer exist."""
  records = read(results)
  for page, text in _filled(records, pages).items():
    page.write_text(text)
  folder.mkdir(exist_ok=True)
  for old in folder.glob("*.png"):
    old.unlink()
  for name, record in records.items():
    plots.draw(folder, name, record, digest(record))


def stale(results: Path = RESULTS, pages: Pages = PAGES, folder: Path = PLOTS) -> list[str]:
  """The names of pages and plots that do not show the current records."""
  records = read(results)
  expected = {f"{name}-{kind}.png": digest(record) for name, record in records.items() for kind in plots.KINDS}
  found = {plot.name: plots.digest_of(plot) for plot in folder.glob("*.png")}
  wrong = [name for name in sorted(expected | found) if expected.get(name) != found.get(name)]
  return [page.name for page, text in _filled(records, pages).items() if page.read_text() != text] + wrong


def _filled(records: dict[str, Record], pages: Pages) -> dict[Path, str]:
  """The text of each page, with its generated places filled from the records."""
  made = parts(records)
  return {page: fill(page.read_text(), {name: made[name] for name in names}) for page, names in pages.items()}


def parts(records: dict[str, Record]) -> dict[str, str]:
  """The generated parts of the pages, by the names of their places."""
  none = "There are no throughput records yet."
  return {
    "machines": machines(records) or none,
    "message": message(records) or none,
    "records": "\n\n".join(sections.summary(name, record) for name, record in records.items()) or none,
    "tables": "\n\n".join(sections.details(name, record) for name, record in records.items()) or none,
  }


def message(records: dict[str, Record]) -> str:
  """The main figures of every record in a few sentences."""
  bullets = [f"- {headline(record)}" for record in records.values()]
  simulated = any(record["hardware"]["simulated"] for record in records.values())
  return "\n".join([*bullets, *(["", SHARED] if simulated else [])])


def machines(records: dict[str, Record]) -> str:
  """A table with a column for each record, and a row for each strategy on the most devices."""
  if not records:
    return ""
  titles, columns = zip(*((sections.title(record), _column(record)) for record in records.values()), strict=True)
  strategies = sorted({name for column in columns for name in column} - {*FIRST, *LAST})
  rows = [(name, *(column.get(name, sections.NONE) for column in columns)) for name in (*FIRST, *strategies, *LAST)]
  simulated = any(record["hardware"]["simulated"] for record in records.values())
  return "\n".join([*sections.table(("Throughput, single = 1", *titles), rows), *(["", SHARED] if simulated else [])])


def _column(record: Record) -> dict[str, str]:
  """The cells of a record in that table, by the names of the rows."""
  rows, aims = figures.rows(record), {aim.row: aim for aim in figures.aims(record) if not aim.met}
  shown = {DEVICES: str(max(row.devices for row in rows)), SINGLE: f"{rows[0].per_second:,.0f} {record['unit']}/s"}
  for row in figures.most(record):
    assert row.relative
    shown[row.row] = f"{row.relative.median:.2f}" + (f", aim {aims[row.row].wanted:.2f}" if row.row in aims else "")
  peer = next((peer.relative for peer in figures.peers(record) if peer.relative), None)
  load = "unknown" if record["load"] is None else f"{record['load']:.1f}"
  return shown | ({TO_PEER: f"{1 / peer.median:.2f}"} if peer else {}) | {DATE: f"{record['date']}, {load}"}


def headline(record: Record) -> str:
  """A record's speed on the most devices, its comparison with the peer, and the aims that it misses."""
  rows = figures.most(record)
  said = [f"**{sections.title(record)}.**"]
  if rows:
    # Strategies whose ratios look the same are named together.
    ordered = sorted(rows, key=lambda row: -round(row.relative.median, 2))
    groups = [
      f"{ratio} for {_listed([row.row for row in group])}"
      for ratio, group in itertools.groupby(ordered, lambda row: f"{row.relative.median:.2f}")
    ]
    kind = "simulated devices" if record["hardware"]["simulated"] else "devices"
    said.append(f"On {rows[0].devices} {kind}, throughput relative to one device is {', '.join(groups)}.")
  peer = next((peer for peer in figures.peers(record) if peer.relative), None)
  if peer:
    said.append(f"On one device, Meshwright is {1 / peer.relative.median:.2f} times as fast as {_peer(record, peer)}.")
  return " ".join([*said, *sections.missed(record)])


def _peer(record: Record, row: figures.Result) -> str:
  """What a row of the peer measured."""
  compiled = record["cells"][row.name]["rounds"][0]["precision"].endswith("compiled")
  return f"{cells.PEER_NAME} {'with torch.compile' if compiled else 'in PyTorch, not compiled'}"


def _listed(names: list[str]) -> str:
  return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
