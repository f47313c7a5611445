"""Measures what the tables of the guide show.

    python -m tools.benchmark                        # lists the measurements
    python -m tools.benchmark throughput --rounds=3  # runs one of them; --help says what it measures and takes

Each is a file of lab/benchmarks. A measurement writes a record into lab/benchmarks/results, and the tables that are
made from it into the page that shows them.
"""

import ast
import importlib
import sys
from pathlib import Path

from errors import one_of
from lab import benchmarks
from runtime import command_line

FOLDER = Path(benchmarks.__path__[0])


def measurements() -> dict[str, tuple[str, str]]:
  """The module of each measurement and what it says about itself in a line, by name."""
  found = {}
  for file in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*/command.py")]):
    about = ast.get_docstring(ast.parse(file.read_text())) or ""
    module = ".".join((benchmarks.__name__, *file.relative_to(FOLDER).with_suffix("").parts))
    name = module.removesuffix(".command").rpartition(".")[2]
    if f"python -m tools.benchmark {name}" in about:
      found[name] = module, about.partition("\n")[0]
  return found


def main() -> None:
  found = measurements()
  if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
    return print(__doc__, *(f"  {name:<20} {about}" for name, (_, about) in found.items()), sep="\n")
  with command_line.bad_input_ends_the_program():
    name = one_of("measurement", sys.argv.pop(1), found)
  sys.argv[0] = f"python -m tools.benchmark {name}"
  sys.exit(importlib.import_module(found[name][0]).main())


if __name__ == "__main__":
  main()
