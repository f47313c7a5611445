"""Measures what very long runs and very many files cost, and writes a table of lab/benchmarks/README.md.

    python -m tools.benchmark growth                   # measures (minutes), writes the record and the table
    python -m tools.benchmark growth --before=FOLDER   # measures an earlier checkout in turns with this one
    python -m tools.benchmark growth --tables          # writes the table from the existing record

Each part runs in a fresh process, on a fresh copy of its files. Memory is read from /proc, so this needs Linux.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from errors import ConfigError, positive
from lab.benchmarks.header import host, source, started
from lab.benchmarks.pages import RESULTS, ROOT, keep
from lab.benchmarks.sections import table
from runtime import command_line

RECORD, PAGE = RESULTS / "growth.json", ROOT / "lab" / "benchmarks" / "README.md"
WORKER = Path(__file__).with_name("growth_worker.py")


class Part(NamedTuple):
  """What is measured: its size, in words with `{size}`, and the aims for `seconds` and for other figures by name."""

  size: int
  what: str
  aims: Mapping[str, float] = MappingProxyType({})


PARTS = {
  "restart": Part(1_000_000, "restart with {size} lines of metrics", {"seconds": 1.0, "bytes": 200e6}),
  "picture": Part(1_000_000, "`loss.png` of {size} lines", {"seconds": 1.0}),
  "evaluation": Part(100_000, "page after an evaluation, {size} lines of metrics"),
  "line": Part(10_000, "a line of the log after {size} restarts", {"seconds": 2e-3}),
  "page": Part(100_000, "page of {size} evaluations", {"page_bytes": 2e6}),
  "batch": Part(200, "slowest batch of a mixture of {size} sources", {"seconds": 0.02}),
  "second_start": Part(100_000, "second start with {size} files", {"opened": 0}),
}
FORMS: dict[str, tuple[float, str]] = {  # how figures are shown: times a factor
  "seconds": (1.0, "{:,.3g} s"),
  "processor_seconds": (1.0, "{:,.3g} s of a processor"),
  "bytes": (1e-6, "{:,.0f} MB more memory"),
  "page_bytes": (1e-6, "{:,.2f} MB written"),
  "opened": (1.0, "{:,.0f} files opened"),
}


def run(root: Path, spec: dict[str, Any]) -> dict[str, Any]:
  """Runs a task of the worker with the code at `root`. Raises ConfigError if it fails."""
  done = subprocess.run(
    [sys.executable, "-P", str(WORKER)],
    input=json.dumps(spec),
    capture_output=True,
    text=True,
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root)},
    check=False,
  )
  last = (done.stdout.strip().splitlines() or [""])[-1]
  found = json.loads(last) if done.returncode == 0 and last.startswith("{") else {"error": done.stderr[-300:]}
  if "error" in found:
    raise ConfigError(f"the task {spec['task']!r} of {str(root)!r} failed ({found['error']}); nothing was recorded")
  return found


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
  """Measures all parts in rounds, in each with both versions one after the other, and returns the record."""
  versions = {"before": options.before} if options.before else {}
  versions["now"] = ROOT
  begun, parts = started(), dict[str, dict[str, list[dict[str, Any]]]]()
  for name in options.parts:
    size, found = max(1, int(PARTS[name].size * options.scale)), dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory(dir=options.folder) as at:
      made, used = Path(at, "made"), Path(at, "used")
      used.mkdir()
      spec = {"part": name, "size": size, "folder": str(used)}
      spec |= run(ROOT, spec | {"task": "make"})
      used.rename(made)
      for _ in range(options.rounds):
        for version, root in versions.items():
          # A cache compares the times of its files, so these are moved.
          made.rename(used) if name == "second_start" else shutil.copytree(made, used)
          found.setdefault(version, []).append(run(root, spec | {"task": name}))
          used.rename(made) if name == "second_start" else shutil.rmtree(used)
    parts[name] = found
    say(f"{name}: " + "; ".join(f"{version} {_shown(rows)}" for version, rows in found.items()))
  given = f"--rounds={options.rounds}" + (" --before=FOLDER" if options.before else "")
  given += f" --scale={options.scale:g}" if options.scale != 1 else ""
  given += f" --parts={','.join(options.parts)}" if options.parts != list(PARTS) else ""
  about = {"kind": "growth", "command": f"python -m tools.benchmark growth {given}", **host(), **begun}
  return about | {"scale": options.scale, "parts": parts}


def _median(rows: Sequence[dict[str, Any]], name: str) -> float:
  return statistics.median(row[name] for row in rows)


def _shown(rows: Sequence[dict[str, Any]]) -> str:
  """The medians of all figures."""
  return ", ".join(text.format(_median(rows, name) * by) for name, (by, text) in FORMS.items() if name in rows[0])


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of lab/benchmarks/README.md."""
  rows = []
  for name, found in record["parts"].items():
    part = PARTS[name]
    what = part.what.format(size=f"{max(1, int(part.size * record['scale'])):,}")
    aims = ", ".join(FORMS[of][1].format(aim * FORMS[of][0]) for of, aim in part.aims.items()) or "–"
    rows.append((what, _shown(found["before"]) if "before" in found else "–", _shown(found["now"]), aims))
  parts = ["\n".join(table(("What", "Before", "Now", "Aim, at most"), rows))]
  rounds = max(len(rows) for found in record["parts"].values() for rows in found.values())
  parts.append(f"Medians of {rounds} rounds; load of the machine before the run: {record['load']:.1f}.")
  return {"growth": "\n\n".join([*parts, source(record)])}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The options of the command. Raises ConfigError for bad values."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the table from the existing record")
  parser.add_argument("--rounds", type=int, default=5, help="rounds to time (default: 5)")
  parser.add_argument("--scale", type=float, default=1.0, help="times the sizes (default: 1)")
  parser.add_argument("--before", type=Path, metavar="FOLDER", help="an earlier checkout, to compare with")
  parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: all)")
  parser.add_argument("--folder", help="for the files (default: the system's temporary folder)")
  parser.add_argument("--record", type=Path, metavar="FILE", help="write the record there, and no table")
  options = parser.parse_args(arguments)
  positive("rounds", options.rounds)
  if not 0 < options.scale <= 1:
    raise ConfigError(f"scale={options.scale} must be above 0 and at most 1")
  options.parts = options.parts.split(",")
  if unknown := set(options.parts) - PARTS.keys():
    raise ConfigError(f"parts={sorted(unknown)[0]!r} does not exist; use some of: {', '.join(PARTS)}")
  return options


def main() -> None:
  with command_line.bad_input_ends_the_program():
    options = parse(sys.argv[1:])
    say = functools.partial(print, flush=True)
    keep(options, PAGE, RECORD, lambda: measure(options, say), tables)
