"""Writes generated parts of the guide: each strategy's use, mesh, bytes and speed, and the sizes of the presets.

    python -m tools.benchmark guide

When to use a strategy is written once, in the docstring of its file: "Use it ... Don't use it ...". README
shows its first sentence, the pages docs/strategies.md, docs/experts.md and docs/long-text.md all of it.

What a strategy sends comes from its golden page (tests/golden/explain); tests compare those with the compiled programs.
`python -m tests.golden.make_explain` writes both. The measured rows are those of one machine. A strategy that it lacks
has those of another record; lab/benchmarks/README.md has them all. A preset's memory is predicted by formula.
"""

import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import strategies
from configs import base
from lab.analysis import memory
from lab.analysis.case import Case
from lab.analysis.topology import machine_of
from lab.analysis.weights import weights
from lab.benchmarks import figures, tables
from lab.benchmarks.figures import Record
from lab.benchmarks.pages import ROOT, fill
from lab.benchmarks.predictions import case_on
from lab.benchmarks.sections import megabytes, milliseconds, table, title, where
from lab.benchmarks.tables import SHARED
from strategies.execution.mesh import abstract_mesh, resolve
from training import settings

DOCS, GOLDEN = ROOT / "docs", ROOT / "tests" / "golden" / "explain"
README, COMMANDS = ROOT / "README.md", DOCS / "commands.md"
PAGES = (DOCS / "strategies.md", DOCS / "experts.md", DOCS / "long-text.md")
RECORD = "2-cores-of-amd-epyc-family-26-model-2-throughput"  # the machine on which all strategies were measured
DEVICES = 8
PRESET, BATCH, EXPERTS = "tiny", 32, 8  # what a strategy sends is shown for these, here and in `make site`
# Presets that say their sizes themselves: a strategy to run them with, and the machine ("": simulated devices).
SIZED = {
  "tiny": ("fsdp", ""),
  "moe_tiny": ("expert_fsdp", ""),
  "lm": ("fsdp", ""),
  "moe": ("expert_fsdp", ""),
  "cifar10": ("fsdp", ""),
  "throughput": ("fsdp", ""),
  "long_texts": ("long_context", ""),
  "cifar10_gpu": ("single", "h100:1x1"),
  "throughput_gpu": ("single", "h100:1x1"),
  "lm_1b": ("single", "h100:1x1"),
}


def shown(name: str) -> base.ConfigDict:
  """The config for which the guide shows what a strategy places and sends: a mixture if it shares experts."""
  config = base.get_config(PRESET, name)
  config.update(batch_size=BATCH, simulated_devices=DEVICES)
  config.model.experts = EXPERTS if strategies.layout_of(name).axes("experts") else 0
  return config


def use(name: str) -> str:
  """When to use a strategy, and when not: that paragraph of its docstring, on one line."""
  documented = inspect.getdoc(importlib.import_module(f"strategies.{name}")) or ""
  found = re.search(r"^Use it (?:.+\n?)+", documented, re.MULTILINE)
  return " ".join(found.group().split()) if found else ""


def with_uses(readme: str) -> str:
  """README with the last cell of each strategy's row from that paragraph: its first sentence, without "Use it"."""

  def row(found: re.Match[str]) -> str:
    first = re.split(r"[.:] | \(docs/", use(found.group(2)).removeprefix("Use it "), maxsplit=1)[0]
    return f"{found.group(1)} {first} |"

  return re.sub(r"^(\| \[`(\w+)`\]\(strategies/.*\|) .* \|$", row, readme, flags=re.MULTILINE)


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
  """What a device sends by theory, and in all by the compiled program, from the golden page."""
  text = (GOLDEN / f"{name}.txt").read_text()
  theory = re.search(r"^by theory.*", text, re.MULTILINE | re.DOTALL)
  if theory is None:
    return "It sends nothing."
  compiled = re.findall(r"^total +([\d,]+)$", text, re.MULTILINE)[0]
  page = f"[its page](../{(GOLDEN / name).relative_to(ROOT)}.txt)"
  return f"```\n{theory.group().rstrip()}\n```\n\nThe compiled step sends {compiled} bytes ({page})."


def measured(name: str, records: Sequence[Record]) -> str:
  """The strategy's rows in the first throughput record that has some. If that is a later one, says of what it is."""
  for record in records:
    rows = [
      f"on {row.devices} device{'s' * (row.devices > 1)} {row.relative.median:.2f} times the throughput of one, "
      f"{milliseconds(row.seconds.median)} ms a step, {megabytes(row.bytes)} a device"
      for row in figures.rows(record)
      if row.row == name and row.relative and row.seconds
    ]
    if rows:
      other = "" if record is records[0] else f" ({title(record)})"
      return f"Measured{other}: {'; '.join(rows)}."
  return f"Not measured yet. `python -m tools.benchmark throughput --rows={name}` measures it."


def presets() -> str:
  """The table of presets: parameters, what is in a batch, and the predicted memory of a device."""
  rows = []
  for preset, (strategy, machine) in SIZED.items():
    config = base.get_config(preset, strategy)
    case = case_on(machine_of(machine), config) if machine else _simulated(config)
    example = f"{case.sizes.seq_len:,} tokens" if config.model.inputs == "tokens" else "1 image"
    count = sum(weight.size for weight in weights(case.sizes))
    devices = "1 H100" if machine else f"{case.layout.device_count} simulated"
    of_batch = f"{config.batch_size} × {example}"
    rows.append(
      (f"`{preset}`", f"`{strategy}`", f"{count / 1e6:,.1f} M", of_batch, devices, megabytes(memory.of(case).total))
    )
  return "\n".join(table(("Preset", "Strategy", "Parameters", "Batch", "Devices", "Memory of each"), rows))


def _simulated(config: base.ConfigDict) -> Case:
  layout = resolve(strategies.layout_of(config.strategy), config.simulated_devices, config.mesh)
  runner = strategies.build(config, layout, settings.program(config, "cpu"), abstract_mesh(layout))
  return Case.of(runner, config.batch_size, "cpu")


def parts(page: Path) -> dict[str, str]:
  """The generated parts of a page of strategies, by the names of their places."""
  found, places = tables.read(), re.findall(r"<!-- (\w+) -->", page.read_text())
  records = [found.pop(RECORD), *found.values()]
  made = {"machine": f"The measured rows come from {where(records[0])}. {SHARED}"} if "machine" in places else {}
  link = lambda text: re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)
  for name in strategies.names():
    if name in places:
      made[name] = "\n\n".join((link(use(name)), rule(name), sent(name), measured(name, records)))
  return made


def write() -> None:
  """Fills the generated parts of the guide."""
  for page in PAGES:
    page.write_text(fill(page.read_text(), parts(page)))
  README.write_text(with_uses(README.read_text()))
  COMMANDS.write_text(fill(COMMANDS.read_text(), {"presets": presets()}))


def main() -> None:
  write()
  print(f"written: {', '.join(str(page.relative_to(ROOT)) for page in (*PAGES, README, COMMANDS))}")
