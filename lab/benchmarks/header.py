"""The header of a record: which commit, when, with which command, on which machine, and how busy that was.

Every measurement calls `started` before it measures, joins what it returns with its command and `machine` or `host`,
and ends with `write`, which refuses a record without a whole header. A record of several runs, each with a header of
its own, keeps them as `steps` or `stacks`.

What is not known of an old record is null, and `header_notes` has the reason. There it also says which fields were
filled from the history of git. Next: ages.py, which shows all headers.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[2]  # of the repository
FIELDS = ("commit", "date", "command", "machine", "load")
PARTS = ("steps", "stacks")  # what holds the runs of a record that has no command itself


def started() -> dict[str, Any]:
  """The `commit`, `date` and `load` of what is measured now, and whether files differ from the commit (`dirty`).

  The load is the average of the last minute (os.getloadavg). It shows whether the machine was idle.
  """
  commit, dirty = checked_out()
  return {"commit": commit, "dirty": dirty, "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}


def checked_out() -> tuple[str | None, bool]:
  """The commit of the repository, and whether any file differs from it."""
  try:
    return git("rev-parse", "--short=12", "HEAD").strip(), bool(git("status", "--porcelain", "-uno"))
  except (OSError, subprocess.CalledProcessError):
    return None, False


def git(*words: str) -> str:
  """What git prints in the repository. Raises OSError or CalledProcessError where that cannot be."""
  return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def machine(devices: Sequence[jax.Device]) -> dict[str, Any]:
  """The fields of a record that describe the machine and its software."""
  kind = f"{len(devices)} × {devices[0].device_kind}"
  simulated = f", simulated on {os.cpu_count()} cores of {cpu()}" if devices[0].platform == "cpu" else ""
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
  """The line below a table: the command that reproduces it, the machine, the versions, and the date."""
  versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
  return f"`{record['command']}`, {record['machine']}; {versions}; {record['date']}."


def runs(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """What has a header in a record: the record itself, named "", or each of its runs by name or number."""
  if "command" in record:
    return {"": record}
  found = next(record[name] for name in PARTS if name in record)
  return dict(found) if isinstance(found, dict) else {str(number): run for number, run in enumerate(found)}


def problems(record: dict[str, Any]) -> list[str]:
  """What a record's headers lack: fields that are not there, and fields that are null without a reason."""
  found = []
  for name, run in runs(record).items():
    where = f"{name}: " if name else ""
    for field in FIELDS:
      if field not in run:
        found.append(f"{where}{field} is missing")
      elif run[field] is None and not run.get("header_notes", {}).get(field):
        found.append(f"{where}{field} is null, and header_notes says no reason")
  return found


def write(file: Path, record: dict[str, Any], indent: int | None = 1) -> None:
  """Writes a record. Raises ValueError for one whose header is not whole.

  Outside a checkout of git there is no commit, and the record says so.
  """
  for run in runs(record).values():
    if "commit" in run and run["commit"] is None:
      run.setdefault("header_notes", {}).setdefault("commit", "measured outside a checkout of git")
  if found := problems(record):
    raise ValueError(f"the record {file.name} has no whole header: {'; '.join(found)}")
  separators = (",", ":") if indent is None else None
  file.write_text(json.dumps(record, indent=indent, separators=separators) + "\n")
