"""Checks and measures a machine with GPUs or TPUs, in steps. `make accelerator` runs it; docs/accelerator.md explains.

    python -m tools.benchmark accelerator                  # all steps, one after another
    python -m tools.benchmark accelerator --step=parity    # one of them, or several with commas
    python -m tools.benchmark accelerator --list           # what each step measures; needs no accelerator
    python -m tools.benchmark accelerator --tables         # writes docs/accelerator.md from the records; likewise

The exit status is 1 if there is no accelerator or a step fails, and 2 for a mistake on the command line.
"""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from errors import ConfigError, one_of
from lab.benchmarks import cells, header, rounds
from lab.benchmarks.accelerator import page, record, steps
from lab.benchmarks.accelerator.step import LIMIT, Measurement, Values, say
from lab.benchmarks.pages import RESULTS
from runtime import command_line


class NoAccelerator(RuntimeError):
  """There is no GPU or TPU that JAX can use."""


def machine(run: rounds.Run = rounds.run) -> dict[str, Any]:
  """The `hardware` and `versions` of this machine. Raises NoAccelerator unless it has a GPU or TPU."""
  found = run(cells.WORKER, {"task": "machine"})
  if "error" in found:
    raise NoAccelerator(f"no accelerator: JAX looked for GPUs and TPUs and failed ({found['error']})")
  if found["hardware"]["simulated"]:
    raise NoAccelerator(
      "no accelerator: JAX looked for GPUs and TPUs and found only the CPU; use a machine that has one, and there "
      "pip install '.[cuda]' or '.[tpu]'"
    )
  return found


def parse(arguments: list[str]) -> argparse.Namespace:
  """The options of the command. Raises ConfigError for bad values."""
  parser = argparse.ArgumentParser(
    prog="python -m tools.benchmark accelerator",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--step", default="", help=f"from {', '.join(steps.STEPS)} (default: all)")
  parser.add_argument("--list", action="store_true", help="list the steps")
  parser.add_argument("--tables", action="store_true", help="write the page from the existing records")
  parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="a Python with PyTorch")
  options = parser.parse_args(arguments)
  options.steps = [one_of("step", name, steps.STEPS) for name in options.step.split(",") if name]
  if shutil.which(options.peer_python) is None:
    raise ConfigError(f"peer-python={options.peer_python!r} is not a program; name a Python that has PyTorch")
  return options


def listed(step: Measurement) -> str:
  """A step's lines in `--list`."""
  aim = f"\n  aim:   {step.aim}" if step.aim else ""
  return f"{step.name} (at most {LIMIT} s)\n  {step.about}\n  fails: {step.promise}{aim}"


def run_all(
  options: argparse.Namespace,
  found: Mapping[str, Any],
  run: Callable[..., Values] = steps.run,
  results: Path = RESULTS,
  to: Path = page.PAGE,
) -> bool:
  """Runs the steps, writes the record and the page after each, and returns whether all of them are good."""
  hardware, failed = found["hardware"], []
  file = record.path(hardware, results)
  for name in options.steps or steps.STEPS:
    step = steps.STEPS[name]
    if hardware["platform"] not in step.platforms:
      say(f"\n{name}: left out; it needs {' or '.join(step.platforms)}, and this machine has {hardware['platform']}")
      failed += [name] if options.steps else []  # asked for by name
      continue
    say(f"\n{name}: {step.about}")
    start, begun = time.monotonic(), header.started()
    result = run(name, found, options.peer_python)
    made = record.entry(name, found, begun, result, time.monotonic() - start)
    record.add(file, hardware, name, made)
    page.write(to, results)
    said = page.result(step, {"steps": {name: made}})
    say("\n".join(f"{name}: {line.replace('**', '')}" for line in said) + f" ({made['seconds']:.0f} s)")
    failed += [name] if "error" in result or not step.judge(result["values"]).good else []
  say(f"\nrecord in {file}" + (f"; failed: {', '.join(failed)}" if failed else "; no step failed"))
  return not failed


def main(arguments: Sequence[str] | None = None) -> int:
  """The command. Returns its exit status. Without arguments it takes those of the process."""
  if arguments is None:
    arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for ^C, the step's processes are ended too
  with command_line.bad_input_ends_the_program():
    options = parse(list(arguments))
  if options.list:
    print("\n".join(listed(step) for step in steps.STEPS.values()))
    return 0
  if options.tables:
    page.write()
    return 0
  try:
    found = machine()
  except NoAccelerator as error:
    command_line.fail(error, status=1)
  say(f"{found['hardware']['devices']} × {found['hardware']['kind']}")
  return 0 if run_all(options, found) else 1
