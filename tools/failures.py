"""Simulates a long training job with failures: how much of its time trains new steps, by what it does about failures.

    python -m tools.failures --devices=16384
    python -m tools.failures --devices=16384 --mtbf=50000 --policies=background+spares,memory+spares
    python -m tools.failures --devices=4096 --params=70e9 --storage=0.5 --start=120 --html=failures.html

Searches the best interval between two saves for each policy, and prints Young's and Daly's beside it. The inputs are
published, or predicted for H100s in hosts of 8. A flag replaces each of them. docs/failures.md explains the table.
"""

import argparse
import math
import sys
from pathlib import Path

from checkpointing.interval import duration
from errors import ConfigError, above_zero, one_of, positive
from lab.analysis.failures import DEVICES, KINDS
from lab.failure_inputs import DAY, HOUR, RATES, Inputs, inputs
from lab.failure_policies import NAMES, Result, goodput_at_dalys_interval, policy_of, result_of
from lab.views import failures_page
from lab.views.communication import table
from reporting import pages
from runtime import command_line
from runtime.folders import writable_file

# Flags that replace an input: the unit in which each is given, and what it is.
UNITS = {
  "mtbf": (HOUR, "between two failures of a device; the job loses its host"),
  "host-mtbf": (HOUR, "between two failures of the rest of a host; the job loses it"),
  "other-mtbf": (HOUR, "between two other failures, for each device of the job; no host is lost"),
  "copy": (1.0, "to copy the state to the hosts' memory, while training waits"),
  "write": (1.0, "to write it from there to storage"),
  "restore": (1.0, "to read it from storage"),
  "fetch": (1.0, "to read it from the memory of the hosts"),
  "step": (1.0, "for a step; a job saves at most once a step"),
  "start": (1.0, "to notice a failure and start again, until a checkpoint is read"),
  "repair": (HOUR, "to repair a lost host"),
}
SIZES = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)  # devices, for the curves
CURVE_SEEDS = 3  # of each of their points


def about(found: Inputs) -> str:
  """The job, in a sentence."""
  job = found.job
  lost = f", and takes a host away every {duration(1 / job.losses)}"
  return (
    f"{job.devices:,} devices in {job.hosts:,} hosts, with {duration(job.work)} of work. Something fails every "
    f"{duration(job.mtbf)}{lost}. Policies with spares have {found.spares}."
  )


def inputs_table(found: Inputs) -> list[tuple[str, ...]]:
  """The inputs as rows, with a heading."""
  rows = [(name, duration(value.seconds), UNITS[name][1], value.source) for name, value in found.values.items()]
  return [("input", "time", "", "source"), *rows]


def results_table(results: list[Result]) -> list[tuple[str, ...]]:
  """The results as rows, with a heading: the shares of all devices' time, and the intervals between saves."""
  rows = [("policy", *KINDS, "±", "best interval", "Young", "Daly", "to storage every")]
  for found in results:
    shares = [f"{found.shares[kind]:.2%}" for kind in KINDS]
    intervals = [duration(seconds) for seconds in (found.interval, found.young, found.daly, found.to_storage)]
    error = "-" if math.isnan(found.error) else f"{found.error:.2%}"
    rows.append((found.name, *shares, error, *intervals))
  return rows


def parsed(arguments: list[str]) -> argparse.Namespace:
  """The command line, checked."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--devices", type=int, default=16_384, help="devices of the job (default: 16384)")
  parser.add_argument("--days", type=float, default=54.0, help="days of training without failures (default: 54)")
  parser.add_argument("--params", type=float, default=405e9, help="parameters of the model (default: 405e9)")
  parser.add_argument("--rates", default="llama3", help=f"whose failures: {', '.join(RATES)} (default: llama3)")
  parser.add_argument("--storage", type=float, help="GB/s between a host and storage, in place of published times")
  for name, (unit, what) in UNITS.items():
    parser.add_argument(f"--{name}", type=float, help=f"{'hours' if unit == HOUR else 'seconds'} {what}")
  parser.add_argument("--spares", type=int, help="hosts that stand by (default: as many as are nearly always enough)")
  parser.add_argument("--policies", default=",".join(NAMES), help="some of the policies, separated by commas")
  parser.add_argument("--seeds", type=int, default=8, help="runs of each simulation (default: 8)")
  parser.add_argument("--html", type=Path, help="a page to write, with curves for 1,000 to 100,000 devices")
  asked = parser.parse_args(arguments)
  if positive("devices", asked.devices) % DEVICES or asked.devices < 2 * DEVICES:
    raise ConfigError(f"devices={asked.devices} must be a multiple of {DEVICES}, a host's devices, and at least 16")
  for name, example in {"days": "54", "params": "405e9", "storage": "0.5"}.items() | {(n, "60") for n in UNITS}:
    value = getattr(asked, name.replace("-", "_"))
    if value is not None:
      above_zero(name, value, example)
  for name in ("spares", "seeds"):
    if getattr(asked, name) is not None:
      positive(name, getattr(asked, name))
  one_of("rates", asked.rates, RATES)
  asked.policies = [one_of("policies", name, NAMES) for name in asked.policies.split(",")]
  if asked.html:
    writable_file(asked.html, "html")
  return asked


def inputs_for(asked: argparse.Namespace, devices: int) -> Inputs:
  """The inputs for so many devices, with what the command line says. Raises ConfigError if they fail all the time."""
  given = {name: getattr(asked, name.replace("-", "_")) for name in UNITS}
  found = inputs(
    devices,
    asked.days * DAY,
    asked.params,
    asked.rates,
    asked.storage and asked.storage * 1e9,
    asked.spares,
    {name: value * UNITS[name][0] for name, value in given.items() if value is not None},
  )
  if found.job.mtbf < 1:
    raise ConfigError(
      f"devices={devices} would fail every {found.job.mtbf:.3g} s; use fewer, or a larger mtbf, host-mtbf or other-mtbf"
    )
  return found


def curves(asked: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
  """For each policy, pairs of devices and goodput."""
  found: dict[str, list[tuple[int, float]]] = {name: [] for name in asked.policies}
  for devices in SIZES:
    case = inputs_for(asked, devices)
    for name in asked.policies:
      policy = policy_of(name, case.times, case.spares)
      found[name].append((devices, goodput_at_dalys_interval(case.job, policy, case.times, CURVE_SEEDS)))
  return found


def main(arguments: list[str]) -> None:
  asked = parsed(arguments)
  case = inputs_for(asked, asked.devices)
  print(f"{about(case)}\n\n{table(inputs_table(case))}\n")
  results = [result_of(name, case.job, case.times, case.spares, asked.seeds) for name in asked.policies]
  print(table(results_table(results)))
  print(
    f"\nShares of all devices' time; training is the goodput. ±: its standard error over {asked.seeds} "
    f"run{'s' * (asked.seeds > 1)}. The best interval is searched. Intervals are seconds of training between two saves."
  )
  if asked.html:
    drawn = failures_page.page(about(case), results, curves(asked), results_table(results), inputs_table(case))
    pages.write(asked.html, drawn)
    print(f"wrote {asked.html}")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
