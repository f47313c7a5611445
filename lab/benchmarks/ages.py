"""Says how old each record is, and what has changed since in the code that it measured.

    python -m tools.benchmark ages             # prints it, by the calendar and git; changes no file
    python -m tools.benchmark ages --tables    # writes the list of headers into lab/benchmarks/README.md

Where git has no history of a record's commit, the command says nothing about changes.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.benchmarks import header
from lab.benchmarks.pages import RESULTS, ROOT, fill
from lab.benchmarks.sections import NONE, table

PAGE = ROOT / "lab" / "benchmarks" / "README.md"
STEP = ("models", "strategies", "training")  # the code of a training step
# What each record measures: its files change what is measured. Records that are not here measure training steps.
MEASURES = {
  "checkpoint": ("checkpointing",),
  "generation": ("models",),
  "growth": ("reporting", "data", "job"),
  "input": ("data",),
  "preparation": ("data",),
  "rates": ("lab/analysis", "lab/benchmarks/published.py", "lab/benchmarks/rates.py"),
  "replicas": ("runtime/replicas.py",),
}


def read(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
  """Every header, by the record's name and the name of its run."""
  found = {}
  for file in sorted(results.glob("*.json")):
    for name, run in header.runs(json.loads(file.read_text())).items():
      found[f"{file.stem} {name}".strip()] = run
  return found


def tables(runs: dict[str, dict[str, Any]]) -> dict[str, str]:
  """The generated part of lab/benchmarks/README.md: date, commit and load of each record, and why one is unknown."""
  reasons = list(dict.fromkeys(reason for run in runs.values() for reason in run.get("header_notes", {}).values()))
  rows = []
  for name, run in runs.items():
    notes = run.get("header_notes", {})
    mark = lambda field, text, notes=notes: (
      text + (f"<sup>{reasons.index(notes[field]) + 1}</sup>" if field in notes else "")
    )
    load = NONE if run["load"] is None else f"{run['load']:.1f}"
    changed = ", with changes" if run.get("dirty") else ""
    commit = NONE if run["commit"] is None else run["commit"][:7] + changed
    rows.append((name, mark("date", run["date"]), mark("commit", commit), mark("load", load)))
  notes = "; ".join(f"<sup>{number}</sup> {reason}" for number, reason in enumerate(reasons, 1))
  return {"ages": "\n".join([*table(("Record", "Date", "Commit", "Load"), rows), "", f"{notes}."])}


def report(runs: dict[str, dict[str, Any]], today: datetime.date, changes: Callable[..., int | None]) -> str:
  """A line for each record: its age in days, and how many commits have changed what it measures.

  Args:
    changes: like `commits`.
  """
  lines = []
  for name, run in runs.items():
    paths = MEASURES.get(name.split()[0], STEP)
    days = (today - datetime.date.fromisoformat(run["date"])).days
    count = changes(run["commit"], paths)
    since = "" if count is None else f"{count or 'no'} commit{'s' * (count != 1)} since in {', '.join(paths)}"
    lines.append(f"{name:<52} {days:>4} day{'s' * (days != 1)}  {since}".rstrip())
  return "\n".join(lines)


def commits(since: str | None, paths: tuple[str, ...]) -> int | None:
  """How many commits after `since` have changed the paths; None if git cannot say."""
  if since is None:
    return None
  try:
    header.git("merge-base", "--is-ancestor", since, "HEAD")
    return int(header.git("rev-list", "--count", f"{since}..HEAD", "--", *paths))
  except (OSError, subprocess.CalledProcessError):
    return None


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the list into the page")
  runs = read()
  if parser.parse_args().tables:
    PAGE.write_text(fill(PAGE.read_text(), tables(runs)))
    return print(tables(runs)["ages"])
  print(report(runs, datetime.date.today(), commits))
