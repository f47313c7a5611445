"""Writes the generated parts of docs/strategies.md: each strategy's mesh, what it sends, and how fast it was.

    python -m tools.benchmark guide

What a strategy sends comes from its golden page (tests/golden/explain); tests compare those with the compiled programs.
`python -m tests.golden.make_explain` writes both. The measured rows are those of one machine. A strategy that it lacks
has those of another record; lab/benchmarks/README.md has them all.
"""

import re
from collections.abc import Sequence

import strategies
from lab.benchmarks import figures, tables
from lab.benchmarks.figures import Record
from lab.benchmarks.pages import ROOT, fill
from lab.benchmarks.sections import megabytes, milliseconds, table, title, where
from lab.benchmarks.tables import SHARED
from strategies.execution.mesh import resolve

PAGE, GOLDEN = ROOT / "docs" / "strategies.md", ROOT / "tests" / "golden" / "explain"
RECORD = "2-cores-of-amd-epyc-family-26-model-2-throughput"  # the machine on which all strategies were measured
DEVICES = 8


def rule(name: str) -> str:
  """A strategy's mesh on 8 devices, and the mesh axis over which each dimension is split."""
  layout = strategies.layout_of(name)
  if layout.uses_every_axis():  # `single` has an axis that splits nothing, and stays on one device
    layout = resolve(layout, DEVICES).compact
  mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
  placed = layout.placed(" and ", mark="`")
  count = f"{layout.device_count} device{'s' * (layout.device_count > 1)}"
  return f"Mesh of {count}: {mesh}. " + (f"{', '.join(placed)}." if placed else "Nothing is split.")


def sent(name: str) -> str:
  """Two tables from the golden page: what the compiled program sends, and what theory expects."""
  text = (GOLDEN / f"{name}.txt").read_text()
  start = re.search(r"^(sent in a step|sends nothing)", text, re.MULTILINE)
  assert start is not None
  return f"```\n{text[start.start() :].rstrip()}\n```"


def measured(name: str, records: Sequence[Record]) -> str:
  """The strategy's rows in the first throughput record that has some. If that is a later one, says of what it is."""
  heads = ("Devices", "Throughput, single device = 1", "Step", "Memory a device")
  for record in records:
    rows = [
      (str(row.devices), f"{row.relative.median:.2f}", f"{milliseconds(row.seconds.median)} ms", megabytes(row.bytes))
      for row in figures.rows(record)
      if row.row == name and row.relative and row.seconds
    ]
    if rows:
      other = "" if record is records[0] else f"On {title(record)}:\n\n"
      return other + "\n".join(table(heads, rows))
  return f"Not measured yet. `python -m tools.benchmark throughput --rows={name}` measures it."


def parts() -> dict[str, str]:
  """The generated parts of the page, by the names of their places: one for each strategy that has a place there."""
  found = tables.read()
  records = [found.pop(RECORD), *found.values()]
  named = [name for name in strategies.names() if f"<!-- {name} -->" in PAGE.read_text()]
  return {
    "machine": f"The measured rows come from {where(records[0])}. {SHARED}",
    **{name: f"{rule(name)}\n\n{sent(name)}\n\n{measured(name, records)}" for name in named},
  }


def write() -> None:
  """Fills the generated parts of the page."""
  PAGE.write_text(fill(PAGE.read_text(), parts()))


def main() -> None:
  write()
  print(f"written: {PAGE.relative_to(ROOT)}")
