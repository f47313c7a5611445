"""Runs cells in rounds, each in a process of its own, and collects their measurements.

Round 0 compiles, with an empty compilation cache for each cell. Every later round times each cell once, in an order
that rotates. It also times the reference several times, in between. A cell is compared with the reference's median in
the same round. If the machine is slow for an hour, both are slow. If it is slow for a minute, the medians hide it.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.cells import PEAKS, REFERENCE, Cell
from lab.benchmarks.pages import ROOT
from runtime.devices import will_use_cpus

BEFORE = 3  # measurements of the machine's peak speeds at the start; predictions use the best
BETWEEN = 8  # cells between two runs of the reference
SECONDS = 1800  # time limit of a process
WARM_UP = 6  # steps before the timed ones; by then the allocator holds all memory that a step needs
# Where CPUs compute, keeps freed memory in the process. Our training sets it itself (runtime/devices.py); the peer does
# not. Where GPUs compute, it would slow the compiler down: its many threads would wait for the single heap.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}

Run = Callable[[Sequence[str], dict[str, Any]], dict[str, Any]]


def run(command: Sequence[str], spec: dict[str, Any], limit: float = SECONDS) -> dict[str, Any]:
  """Runs a process with this specification and returns its result, or {"error": WHY}. `limit` is in seconds."""
  try:
    done = subprocess.run(
      command,
      input=json.dumps(spec),
      capture_output=True,
      text=True,
      cwd=ROOT,
      env=environment(),
      timeout=limit,
    )
  except subprocess.TimeoutExpired:
    return {"error": f"not finished after {limit:.0f} s"}
  except OSError as error:
    return {"error": f"cannot be started ({error.strerror})"}
  if done.returncode == 0:
    with contextlib.suppress(IndexError, ValueError):  # the last line is not a result
      return json.loads(done.stdout.strip().splitlines()[-1])
  printed = (done.stderr or done.stdout).strip().splitlines()
  return {"error": f"exit status {done.returncode}" + (f": {printed[-1]}" if printed else "")}


def environment() -> dict[str, str]:
  """The environment variables of a process that measures."""
  return os.environ | (ALLOCATOR if will_use_cpus(os.environ.get("JAX_PLATFORMS")) else {})


def measure(
  cells: Sequence[Cell], rounds: int, steps: int, cache: Path, say: Callable[[str], None], run: Run = run
) -> dict[str, dict[str, Any]]:
  """The measured part of a record: for each cell the results of round 0, and `rounds` with those of the later rounds.

  Args:
    steps: the steps to time in each round. WARM_UP steps before them are not timed.
    cache: an empty folder for compiled programs.
    say: called with one line for every process that ends.
  """
  found: dict[str, dict[str, Any]] = {cell.name: {"rounds": []} for cell in cells}
  peaks_cell = next(cell for cell in cells if cell.row == PEAKS)
  before = [run(peaks_cell.command, peaks_cell.spec) for _ in range(BEFORE)]
  found[PEAKS]["before"] = [peaks for peaks in before if "error" not in peaks]
  for cell in cells:
    if cell.compiled:
      result = run(cell.command, _cached(cell, cache) | {"task": "compile"})
      found[cell.name] |= result
      say(f"compile    {cell.name:<20} {result.get('error') or _seconds(result['compile_seconds'])}")

  for turn in range(rounds):
    try:
      _turn(found, cells, turn, rounds, steps, cache, say, run)
    except KeyboardInterrupt:
      if turn == 0:
        raise
      say(f"stopped in round {turn + 1}; the rounds before it are kept")
      for cell in found.values():
        cell["rounds"] = [measured for measured in cell["rounds"] if measured["turn"] < turn]
      break
  return found


def _turn(
  found: dict[str, dict[str, Any]], cells: Sequence[Cell], turn: int, rounds: int, steps: int, cache: Path,
  say: Callable[[str], None], run: Run,
) -> None:  # fmt: skip
  """Times every cell once and adds the results to `found`."""
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
    shown = result.get("error") or (_seconds(min(result["seconds"])) if "seconds" in result else "measured")
    say(f"round {turn + 1}/{rounds}  {cell.name:<20} {shown}")


def _with_reference(cells: Sequence[Cell], reference: Cell) -> list[Cell]:
  parts = [cells[start : start + BETWEEN] for start in range(0, len(cells), BETWEEN)]
  return [cell for part in parts or [[]] for cell in (reference, *part)]


def _cached(cell: Cell, cache: Path) -> dict[str, Any]:
  """The specification with a folder for compiled programs that no other cell uses."""
  folder = str(cache / cell.name.replace("/", "-"))
  return cell.spec | {"config": cell.spec["config"] | {"compilation_cache_dir": folder}}


def _seconds(seconds: float) -> str:
  return f"{seconds:.2f} s"
