"""What the benchmarks share: a record's description of where it was made, and writing its tables into a page."""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]  # of the repository


def machine(devices: Sequence[jax.Device]) -> dict[str, Any]:
  """The fields of a record that say where it was made."""
  kind = f"{len(devices)} × {devices[0].device_kind}"
  simulated = f", simulated on {os.cpu_count()} cores" if devices[0].platform == "cpu" else ""
  return {
    "machine": f"{kind}{simulated}, {platform.machine()}",
    "versions": {"python": platform.python_version(), "jax": jax.__version__},
  }


def cpu() -> str:
  """The processor's name where the system tells it, with family and model: a virtual machine may hide more."""
  try:
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
  except OSError:
    return platform.processor() or platform.machine()
  told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
  known = [f"{word} {told[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in told]
  return told.get("model name", platform.machine()) + (f" ({', '.join(known)})" if known else "")


def source(record: dict[str, Any]) -> str:
  """The line below a table: the command that makes it again, and where it was made."""
  versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
  return f"`{record['command']}`, {record['machine']}; {versions}."


def fill(page: str, parts: dict[str, str]) -> str:
  """A page with what stands between `<!-- NAME -->` and `<!-- end -->` replaced, for every name of `parts`."""
  for name, part in parts.items():
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
      raise ValueError(f"the page has no place for '{name}'")
    page = place.sub(lambda found, part=part: f"{found.group(1)}{part}\n{found.group(2)}", page)
  return page
