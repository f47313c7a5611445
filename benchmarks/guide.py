"""Writes the generated parts of docs/strategies.md: each strategy's mesh, what it sends, and how fast it was.

    python -m benchmarks.guide

What a strategy sends comes from its golden page (tests/golden/explain); tests compare those with the compiled programs.
The measured rows come from the throughput records.
"""

import re

import strategies
from benchmarks import figures, sections, tables
from benchmarks.pages import ROOT, fill
from strategies.mesh import resolve

PAGE, GOLDEN = ROOT / "docs" / "strategies.md", ROOT / "tests" / "golden" / "explain"
DEVICES = 8


def rule(name: str) -> str:
  """A strategy's mesh on 8 devices, and the mesh axis over which each dimension is split."""
  layout = strategies.layout_of(name)
  if layout.uses_every_axis():  # `single` has an axis that splits nothing, and stays on one device
    layout = resolve(layout, DEVICES)
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


def measured(name: str) -> str:
  """The strategy's rows in all throughput records."""
  rows = ["| Measured on | Devices | Throughput, single device = 1 | Step | Memory a device |", "|---|---|---|---|---|"]
  for record in tables.read().values():
    for row in figures.rows(record):
      if row.row == name and row.relative and row.seconds and row.bytes:
        where = sections.where(record) + ": overhead, not scaling" * record["hardware"]["simulated"]
        rows.append(
          f"| {where} | {row.devices} | {row.relative.median:.2f} "
          f"| {row.seconds.median * 1e3:,.0f} ms | {row.bytes / 1e6:,.1f} MB |"
        )
  return "\n".join(rows) if len(rows) > 2 else "Not measured yet."


def parts() -> dict[str, str]:
  """The generated parts of the page, by the names of their places: one for each strategy that has a place there."""
  named = [name for name in strategies.names() if f"<!-- {name} -->" in PAGE.read_text()]
  return {name: f"{rule(name)}\n\n{sent(name)}\n\n{measured(name)}" for name in named}


if __name__ == "__main__":
  PAGE.write_text(fill(PAGE.read_text(), parts()))
  print(f"written: {PAGE.relative_to(ROOT)}")
