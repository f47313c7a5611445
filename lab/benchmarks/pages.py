"""Shared by all benchmarks: the command line of a measurement, and filling tables into a Markdown page."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

from errors import positive
from lab.benchmarks import header
from lab.benchmarks.header import ROOT
from runtime import command_line, folders

RESULTS = ROOT / "lab" / "benchmarks" / "results"


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
  shown: str = "",
) -> None:
  """Measures and writes the record, then its tables into the page. Prints the tables.

  With `options.tables` it does not measure. With `options.record` it writes to that file, and no page. If `shown` names
  one of the tables, it prints only that.
  """
  say = lambda made: print(*([made[shown]] if shown else made.values()), sep="\n\n")
  if not options.tables:
    path = folders.writable_file(options.record or record, "record")
    made = measure()
    header.write(path, made)
    if options.record:
      return say(tables(made))
  say(rewrite(page, record, tables))


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

  With --record it writes to that file, and no page.

  Args:
    about: the module's docstring.
    count: name, default and meaning of the number, which `measure` gets.
    shown: the name of the table that is printed.
  """
  name, default, what = count
  parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the tables from the existing record")
  parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
  parser.add_argument("--record", type=Path, metavar="FILE", help="write the record there, and no table")
  options = parser.parse_args()
  with command_line.bad_input_ends_the_program():
    number = positive(name, getattr(options, name))
    logging.set_verbosity(logging.WARNING)
    keep(options, page, record, lambda: measure(number), tables, shown)


def rewrite(page: Path, record: Path, tables: Callable[[dict[str, Any]], dict[str, str]]) -> dict[str, str]:
  """Fills a page with the tables of a record, and returns them."""
  parts = tables(json.loads(record.read_text()))
  page.write_text(fill(page.read_text(), parts))
  return parts
