"""Runs cells in rounds, each in a process of its own, and collects their measurements.

Round 0 compiles, with an empty compilation cache for each cell. Every later round times each cell once, in an order
that rotates. It also times the reference several times, in between. A cell is compared with the reference's median in
the same round. If the machine is slow for an hour, both are slow. If it is slow for a minute, the medians hide it.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.cells import PEAKS, REFERENCE, Cell
from lab.benchmarks.pages import ROOT
from runtime.devices import will_use_cpus

BEFORE = 3  # measurements of the machine's peak speeds at the start; predictions use the best
BETWEEN = 8  # cells between two runs of the reference
SECONDS = 1800  # time limit of a process
GONE = 10  # seconds that killed processes may take to end
NO_TIME = "no time was left for it"  # why a cell was not measured
WARM_UP = 6  # steps before the timed ones; by then the allocator holds all memory that a step needs
# Where CPUs compute, keeps freed memory in the process. Our training sets it itself (runtime/devices.py); the peer does
# not. Where GPUs compute, it would slow the compiler down: its many threads would wait for the single heap.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}

Run = Callable[[Sequence[str], dict[str, Any]], dict[str, Any]]


def run(command: Sequence[str], spec: dict[str, Any], limit: float = SECONDS, own_group: bool = True) -> dict[str, Any]:
  """Runs a process with this specification and returns its result, or {"error": WHY}.

  The process is ended, with all that it started, if time is up or this process is interrupted.

  Args:
    limit: seconds.
    own_group: whether it gets a group of processes of its own. False if somebody else ends the whole group of this
      process; then only the process itself is ended here.
  """
  pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
  group = {"process_group": 0} if own_group else {}
  try:
    process = subprocess.Popen(command, text=True, cwd=ROOT, env=environment(), **pipes, **group)
  except OSError as error:
    return {"error": f"cannot be started ({error.strerror})"}
  try:
    out, errors = process.communicate(json.dumps(spec), timeout=limit)
  except subprocess.TimeoutExpired:
    return {"error": f"not finished after {limit:.0f} s"}
  finally:
    end(process, own_group)
  if process.returncode == 0:
    with contextlib.suppress(IndexError, ValueError):  # the last line is not a result
      return json.loads(out.strip().splitlines()[-1])
  printed = (errors or out).strip().splitlines()
  return {"error": f"exit status {process.returncode}" + (f": {printed[-1]}" if printed else "")}


def end(process: subprocess.Popen[str], group: bool = True) -> None:
  """Ends a process, and its whole group if it has one. Waits until they are gone: they may hold devices' memory."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
  process.wait()
  deadline = time.monotonic() + GONE
  with contextlib.suppress(ProcessLookupError):  # none of them is left
    while group and time.monotonic() < deadline:
      os.killpg(process.pid, 0)
      time.sleep(0.02)


def in_time(deadline: float) -> Run:
  """Runs processes as `run` does, none of them after this time of `time.monotonic`: their error is NO_TIME."""

  def run_in_time(command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    left = deadline - time.monotonic()
    result = run(command, spec, left) if left > 0 else {"error": NO_TIME}
    return {"error": NO_TIME} if "error" in result and time.monotonic() >= deadline else result

  return run_in_time


def environment() -> dict[str, str]:
  """The environment variables of a process that measures."""
  return os.environ | (ALLOCATOR if will_use_cpus(os.environ.get("JAX_PLATFORMS")) else {})


def measure(
  cells: Sequence[Cell], rounds: int, steps: int, cache: Path, say: Callable[[str], None], run: Run = run,
  deadline: float = math.inf, clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict[str, Any]]:  # fmt: skip
  """The measured part of a record: for each cell the results of round 0, and `rounds` with those of the later rounds.

  Args:
    steps: the steps to time in each round. WARM_UP steps before them are not timed.
    cache: an empty folder for compiled programs.
    say: called with one line for every process that ends.
    deadline: when to end, by `clock`. Half of the time is for compiling: cells that are not compiled by then are left
      out. A round that would not end in time is not begun.
  """
  found: dict[str, dict[str, Any]] = {cell.name: {"rounds": []} for cell in cells}
  peaks_cell = next(cell for cell in cells if cell.row == PEAKS)
  before = [run(peaks_cell.command, peaks_cell.spec) for _ in range(BEFORE if deadline == math.inf else 1)]
  found[PEAKS]["before"] = [peaks for peaks in before if "error" not in peaks]
  begun = clock()
  for cell in cells:
    if clock() - begun > (deadline - begun) / 2:
      found[cell.name]["error"] = NO_TIME
    elif cell.compiled:
      result = run(cell.command, _cached(cell, cache) | {"task": "compile"})
      found[cell.name] |= result
      say(f"compile    {cell.name:<20} {result.get('error') or _seconds(result['compile_seconds'])}")

  longest = 0.0
  for turn in range(rounds):
    start = clock()
    if turn and start + longest > deadline:
      say(f"no time is left for round {turn + 1}")
      break
    try:
      _turn(found, cells, turn, rounds, steps, cache, say, run)
    except KeyboardInterrupt:
      if turn == 0:
        raise
      say(f"stopped in round {turn + 1}; the rounds before it are kept")
      for cell in found.values():
        cell["rounds"] = [measured for measured in cell["rounds"] if measured["turn"] < turn]
      break
    longest = max(longest, clock() - start)
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
      if turn == 0 or result["error"] != NO_TIME:  # else the rounds before count
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
