"""The options of `python -m tools.benchmark throughput`."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from errors import ConfigError, one_of, positive
from lab.benchmarks import cells

ROUNDS, STEPS = 5, 3  # a complete record has at least this many
# The options that each mode of the command accepts.
ACCEPTED = {"tables": {"tables"}, "check": {"check", "rows", "devices", "rounds", "peer_python"}}


def parse(arguments: list[str], description: str | None = None) -> tuple[argparse.Namespace, list[str]]:
  """The options of the command, and the other arguments, which belong to the config.

  Raises ConfigError for bad values.
  """
  parser = argparse.ArgumentParser(
    description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--rows", default="", help=f"from {', '.join(cells.rows())}, separated by commas (default: all)")
  parser.add_argument("--devices", default="", help="separated by commas (default: 1,2,4,8, as far as available)")
  parser.add_argument("--rounds", default="", help=f"each times every row once (default: {ROUNDS})")
  parser.add_argument("--steps", default="", help=f"steps to time in a round (default: {STEPS})")
  parser.add_argument("--peer-python", default="", metavar="PATH", help="a Python with PyTorch (default: this one)")
  parser.add_argument("--record", type=Path, metavar="FILE", help="to write (default: results/NAME.json)")
  parser.add_argument("--check", type=Path, metavar="FILE", help="measure this record again and compare")
  parser.add_argument("--tables", action="store_true", help="write the pages and plots from the existing records")
  options, rest = parser.parse_known_args(arguments)
  given = [name for name, value in vars(options).items() if value]
  for mode, accepted in ACCEPTED.items():
    extra = [*rest, *(f"--{name.replace('_', '-')}" for name in given if name not in accepted)]
    if mode in given and extra:
      raise ConfigError(f"argument {extra[0]!r} cannot be combined with --{mode}; leave it out")
  # Paths on this machine are not part of the recorded command.
  shown = [f"--{name}={getattr(options, name)}" for name in ("rows", "devices", "rounds", "steps") if name in given]
  options.command = shlex.join(["python", "-m", "tools.benchmark", "throughput", *shown, *rest])
  rows = [one_of("rows", row, cells.rows()) for row in options.rows.split(",") if row]
  if options.peer_python and rows and cells.PEER not in rows:
    raise ConfigError(
      f"peer-python={options.peer_python!r} has no use with rows={options.rows}; add {cells.PEER} to the rows"
    )
  options.rows = rows
  options.devices = [_number("devices", count) for count in options.devices.split(",") if count]
  options.rounds = _number("rounds", options.rounds or str(ROUNDS))
  options.steps = _number("steps", options.steps or str(STEPS))
  options.peer_python = options.peer_python or sys.executable
  if shutil.which(options.peer_python) is None:
    raise ConfigError(f"peer-python={options.peer_python!r} is not a program; name a Python that has PyTorch")
  return options, rest


def _number(field: str, text: str) -> int:
  if not text.isdigit():
    raise ConfigError(f"{field}={text!r} is not a whole number; use a positive one, such as --{field}=3")
  return positive(field, int(text))
