"""Runs cells in rounds, each in a process of its own, and collects what they measured.

Round 0 compiles, with an empty compilation cache for each cell. In every later round each cell is timed once, in an
order that rotates, and the reference is timed again before every few of them: a cell is compared with the median of the
reference's runs in that round. So a machine that is slow for an hour slows both, and one that is for a minute neither.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import PEAKS, REFERENCE, Cell
from benchmarks.pages import ROOT

BEFORE = 3  # times that the machine's limits are measured before all else; predictions take the best
BETWEEN = 8  # cells between two runs of the reference
SECONDS = 1800  # after which a process is given up
# Steps before those that are timed. After some of them the allocator has memory for every step's temporaries, and
# faults no more in.
WARM_UP = 6
# For processes that don't set it themselves as training/runtime.py does: freed memory is kept.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}

Run = Callable[[Sequence[str], dict[str, Any]], dict[str, Any]]


def run(command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
  """Starts the process, hands it the specification, and returns its result; `error` is in it if there is none."""
  try:
    done = subprocess.run(
      command,
      input=json.dumps(spec),
      capture_output=True,
      text=True,
      cwd=ROOT,
      env=os.environ | ALLOCATOR,
      timeout=SECONDS,
    )
  except subprocess.TimeoutExpired:
    return {"error": f"not done after {SECONDS // 60} minutes"}
  except OSError as error:
    return {"error": f"cannot be started ({error.strerror})"}
  if done.returncode == 0:
    with contextlib.suppress(IndexError, ValueError):  # where there is no result
      return json.loads(done.stdout.strip().splitlines()[-1])
  told = (done.stderr or done.stdout).strip().splitlines()
  return {"error": f"exit status {done.returncode}" + (f": {told[-1]}" if told else "")}


def measure(
  cells: Sequence[Cell], rounds: int, steps: int, cache: Path, say: Callable[[str], None], run: Run = run
) -> dict[str, dict[str, Any]]:
  """The part of a record that is measured: for each cell what round 0 found, and `rounds`, what each later one did.

  Args:
    steps: timed in each round; WARM_UP more are thrown away before them.
    cache: an empty folder for compiled programs.
    say: is told of every process that has ended.
  """
  found: dict[str, dict[str, Any]] = {cell.name: {"rounds": []} for cell in cells}
  limits = next(cell for cell in cells if cell.row == PEAKS)
  before = [run(limits.command, limits.spec) for _ in range(BEFORE)]
  found[PEAKS]["before"] = before = [peaks for peaks in before if "error" not in peaks]
  peaks = max(before, key=lambda peaks: peaks["flops"], default=None)
  for cell in cells:
    if cell.compiled:
      result = run(cell.command, _cached(cell, cache) | {"task": "compile", "peaks": peaks})
      found[cell.name] |= result
      say(f"compile    {cell.name:<20} {result.get('error') or _told(result['compile_seconds'])}")

  for turn in range(rounds):
    try:
      _turn(found, cells, turn, rounds, steps, cache, say, run)
    except KeyboardInterrupt:
      if turn == 0:
        raise
      say(f"stopped in round {turn + 1}; what the rounds before it measured is kept")
      for cell in found.values():
        cell["rounds"] = [measured for measured in cell["rounds"] if measured["turn"] < turn]
      break
  return found


def _turn(
  found: dict[str, dict[str, Any]], cells: Sequence[Cell], turn: int, rounds: int, steps: int, cache: Path,
  say: Callable[[str], None], run: Run,
) -> None:  # fmt: skip
  """Times every cell once, and adds it to what was found."""
  reference = next(cell for cell in cells if cell.row == REFERENCE)
  others = [cell for cell in cells if cell is not reference]
  start = turn * len(others) // rounds
  for place, cell in enumerate(_with_reference(others[start:] + others[:start], reference)):
    if "error" in found[cell.name]:
      continue
    timed = {"task": "steps", "warmup": WARM_UP, "steps": steps}
    result = run(cell.command, timed | (_cached(cell, cache) if cell.compiled else cell.spec))
    if "error" in result:
      found[cell.name]["error"] = result["error"]
    else:
      found[cell.name]["rounds"].append({"turn": turn, "place": place} | result)
    shown = result.get("error") or (_told(min(result["seconds"])) if "seconds" in result else "measured")
    say(f"round {turn + 1}/{rounds}  {cell.name:<20} {shown}")


def _with_reference(cells: Sequence[Cell], reference: Cell) -> list[Cell]:
  parts = [cells[start : start + BETWEEN] for start in range(0, len(cells), BETWEEN)]
  return [cell for part in parts or [[]] for cell in (reference, *part)]


def _cached(cell: Cell, cache: Path) -> dict[str, Any]:
  """The specification with a folder for compiled programs that no other cell fills."""
  folder = str(cache / cell.name.replace("/", "-"))
  return cell.spec | {"config": cell.spec["config"] | {"compilation_cache_dir": folder}}


def _told(seconds: float) -> str:
  return f"{seconds:.2f} s"
