"""Shared by all benchmarks: a record's description of its machine, and filling tables into a Markdown page."""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from errors import positive
from runtime import command_line, folders

ROOT = Path(__file__).parents[2]  # of the repository
RESULTS = ROOT / "lab" / "benchmarks" / "results"


def machine(devices: Sequence[jax.Device]) -> dict[str, Any]:
  """The fields of a record that describe the machine and its software."""
  kind = f"{len(devices)} × {devices[0].device_kind}"
  simulated = f", simulated on {os.cpu_count()} cores" if devices[0].platform == "cpu" else ""
  return {
    "machine": f"{kind}{simulated}, {platform.machine()}",
    "versions": {"python": platform.python_version(), "jax": jax.__version__},
  }


def host() -> dict[str, Any]:
  """The same fields for a measurement of the processor alone."""
  return {
    "machine": f"{os.cpu_count()} cores of {cpu()}, {platform.machine()}",
    "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
  }


def cpu() -> str:
  """The processor's name, family and model, if the system reports them. A virtual machine may hide the full name."""
  try:
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
  except OSError:
    return platform.processor() or platform.machine()
  reported = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
  known = [f"{word} {reported[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in reported]
  return reported.get("model name", platform.machine()) + (f" ({', '.join(known)})" if known else "")


def source(record: dict[str, Any]) -> str:
  """The line below a table: the command that reproduces it, the machine, and the versions."""
  versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
  return f"`{record['command']}`, {record['machine']}; {versions}."


def fill(page: str, parts: dict[str, str]) -> str:
  """Replaces the text between `<!-- NAME -->` and `<!-- end -->`, for every name in `parts`."""
  for name, part in parts.items():
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
      raise ValueError(f"the page has no place for '{name}'")
    page = place.sub(lambda found, part=part: f"{found.group(1)}{part}\n{found.group(2)}", page)
  return page


def keep(
  options: argparse.Namespace,
  page: Path,
  record: Path,
  measure: Callable[[], dict[str, Any]],
  tables: Callable[[dict[str, Any]], dict[str, str]],
) -> None:
  """Measures and writes the record, then its tables into the page. Prints the tables.

  With `options.tables` it does not measure. With `options.record` it writes to that file, and no page.
  """
  if not options.tables:
    path = folders.writable_file(options.record or record, "record")
    made = measure()
    path.write_text(json.dumps(made, indent=1) + "\n")
    if options.record:
      return print(*tables(made).values(), sep="\n\n")
  print(*rewrite(page, record, tables).values(), sep="\n\n")


def command(
  about: str,
  count: tuple[str, int, str],
  page: Path,
  record: Path,
  measure: Callable[[int], dict[str, Any]],
  tables: Callable[[dict[str, Any]], dict[str, str]],
  shown: str,
) -> None:
  """The command line of a benchmark that needs a single number. Measures, unless --tables is given, and fills the page.

  Args:
    about: the module's docstring.
    count: name, default and meaning of the number, which `measure` gets.
    shown: the name of the table that is printed.
  """
  name, default, what = count
  parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the tables from the existing record")
  parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
  options = parser.parse_args()
  with command_line.bad_input_ends_the_program():
    number = positive(name, getattr(options, name))
  logging.set_verbosity(logging.WARNING)
  if not options.tables:
    record.write_text(json.dumps(measure(number), indent=1) + "\n")
  print(rewrite(page, record, tables)[shown])


def rewrite(page: Path, record: Path, tables: Callable[[dict[str, Any]], dict[str, str]]) -> dict[str, str]:
  """Fills a page with the tables of a record, and returns them."""
  parts = tables(json.loads(record.read_text()))
  page.write_text(fill(page.read_text(), parts))
  return parts
