"""Measures how many small faults in the pure modules the tests of `make test` see: mutation testing.

    python -m tools.benchmark mutants --module=transfers --count=40   # draws faults and adds a row for module and seed
    python -m tools.benchmark mutants --module=transfers --again      # runs the survivors of its rows again
    python -m tools.benchmark mutants --reached=reached.json --tests="tests/strategies tests/lab"    # other choices

Needs `pip install '.[mutation]'`. cosmic-ray makes the faults, such as `<` for `<=`. A mutant is the code with one of
them. First, all tests run once, and coverage records which of them run each line. Then each mutant runs with the tests
that reach its line, fastest first, until one fails. The same seed draws the same mutants of the same code.

A mutant that no test notices survives. Either a new test kills it, and --again writes which one, or its `reason` in the
record says why none need do so. That is written by hand, and stays when the module is measured again.

mutants_made.py makes the mutants, and mutants_worker.py runs the tests.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from errors import ConfigError, one_of, positive
from lab.benchmarks import mutants_worker
from lab.benchmarks.header import host, started
from lab.benchmarks.mutants_made import Mutant, draw, mutant, reaching
from lab.benchmarks.pages import RESULTS, ROOT, fill
from runtime import command_line

RECORD, PAGE = RESULTS / "mutants.jsonl", ROOT / "lab" / "benchmarks" / "README.md"
MODULES = {
  "data": "data/order.py data/batches.py data/text/packing.py",
  "evaluation": "reporting/evaluation/*.py",
  "hardware": "runtime/hardware.py",
  "layout": "strategies/layout.py",
  "metrics": "reporting/metrics.py",
  "optimizer": "training/optimizer.py training/optimizers/*.py",
  "restore": "checkpointing/restore.py",
  "schedule": "training/schedules.py strategies/execution/stages/schedule.py strategies/execution/stages/orders.py",
  "theory": "lab/analysis/theory.py",
  "transfers": "strategies/execution/transfers.py",
}
MOST_MUTANTS, MOST_TESTS = 250, 300  # of a module; with one mutant
WAIT = 60.0  # seconds, besides thrice what its tests took, after which a mutant counts as killed
# What the process that all others are forked from imports. Nothing of the project is among it, so a mutant is imported
# where it should be.
LIBRARIES = ("pytest", "jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "ml_collections", "matplotlib")

Reached = dict[str, Any]  # {"seconds": {test: seconds}, "lines": {file: {line: tests}}}


def files_of(module: str) -> dict[str, str]:
  """The files of a module, by path within the repository, and what is in them."""
  found = [path for pattern in MODULES[module].split() for path in sorted(ROOT.glob(pattern))]
  return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def fitting(tests: Sequence[str], seconds: dict[str, float], limit: float) -> list[str]:
  """The first of these tests, at least one, which together took at most `limit` seconds; without what is too long."""
  found, total = list[str](), 0.0
  for test in tests:
    if not found or (total + seconds[test] <= limit and len(found) < MOST_TESTS):
      found.append(test)
      total += seconds[test]
  return found


def in_process(function: Callable[..., None], *arguments: Any, limit: float | None = None) -> Any:
  """What a function of the worker answers from a process of its own; None if that takes more than `limit` seconds."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(list(LIBRARIES))
  answers, answer = context.Pipe(duplex=False)
  process = context.Process(target=function, args=(answer, *arguments))
  process.start()
  answer.close()
  try:
    return answers.recv() if answers.poll(limit) else None
  except EOFError:
    return ["the process ended"]
  finally:
    process.kill()
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)  # what a test has started
    process.join()


def killer(made: Mutant, tests: Sequence[str], seconds: dict[str, float]) -> str:
  """What kills a mutant: a test that fails, or the time that they take. "" if it survives.

  The tests of the first file run before the others are imported: they kill most mutants.
  """
  log = str(Path(tempfile.gettempdir()) / f"mutant-{os.getpid()}.log")
  is_first = lambda test: test.partition("::")[0] == tests[0].partition("::")[0]
  for part in ([t for t in tests if is_first(t)], [t for t in tests if not is_first(t)]):
    if part:
      limit = WAIT + 3 * sum(seconds[test] for test in part)
      found = in_process(mutants_worker.attempt, made.file, made.code, part, log, limit=limit)
      if found is None or found:
        return found[0] if found else "the time"
  return ""


def measured(module: str, reached: Reached, options: argparse.Namespace) -> dict[str, Any]:
  """Draws mutants of a module and runs them. Returns its row."""
  begun, start, sources = started(), time.monotonic(), files_of(module)
  drawn, survived, killers = draw(sources, options.count, options.seed), list[dict[str, Any]](), set[str]()
  for number, made in enumerate(drawn, 1):
    reach = reaching(sources[made.file], made.line, reached, made.file)
    tests = fitting(reach, reached["seconds"], options.seconds)
    found = killer(made, tests, reached["seconds"])
    print(f"{module} {number}/{len(drawn)} {made.file}:{made.line} {found or 'SURVIVED'}", flush=True)
    killers.add(found)
    if not found:
      survived.append(made.described() | {"tests": len(tests), "reaching": len(reach)})
      print(f"  {made.was}\n  {made.became}", flush=True)
  _check(sources, sorted(killers & reached["seconds"].keys()), reached["seconds"])
  return {
    "module": module,
    "files": list(sources),
    "lines": sum(text.count("\n") for text in sources.values()),
    "tests": len(reached["seconds"]),
    "seed": options.seed,
    "drawn": len(drawn),
    "killed": len(drawn) - len(survived),
    "survived": survived,
    "minutes": round((time.monotonic() - start) / 60, 1),
    "command": f"python -m tools.benchmark mutants --module={module} --count={options.count} --seed={options.seed}",
    **begun,
    **host(),
  }


def _check(sources: dict[str, str], killers: list[str], seconds: dict[str, float]) -> None:
  """Runs the tests that killed mutants without a mutant, in the same way. Raises if one fails there, too."""
  file = next(iter(sources))
  if found := killer(Mutant(file, 0, "", 0, "", "", sources[file]), killers, seconds):
    raise RuntimeError(f"{found} fails without a mutant, too")


def again(row: dict[str, Any], reached: Reached, options: argparse.Namespace) -> dict[str, Any]:
  """Runs the survivors of a row again, and writes into the row what kills them now."""
  sources, killers = files_of(row["module"]), set[str]()
  for each in row["survived"]:
    made = mutant(each["file"], sources[each["file"]], each["line"], each["operator"], each["number"])
    if not made or (made.was, made.became) != (each["was"], each["became"]):
      raise ConfigError(f"module={row['module']!r} has changed at {each['file']}:{each['line']}; measure it anew")
    reach = reaching(sources[made.file], made.line, reached, made.file)
    tests = fitting(reach, reached["seconds"], options.seconds)
    if found := killer(made, tests, reached["seconds"]):
      each["killed_by"] = found
      killers.add(found)
    print(f"{made.file}:{made.line} {found or 'SURVIVED'}", flush=True)
  _check(sources, sorted(killers & reached["seconds"].keys()), reached["seconds"])
  return row


def rows() -> dict[tuple[str, int], dict[str, Any]]:
  """The record: a row for each module and seed."""
  found = [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
  return {(row["module"], row["seed"]): row for row in found}


def keep(row: dict[str, Any]) -> None:
  """Puts a module's row into the record, with the reasons that the row before it gave for the same survivors."""
  kept, same = rows(), lambda each: (each["file"], each["was"], each["became"])
  place = row["module"], row["seed"]
  reasons = {same(each): each["reason"] for each in kept.get(place, {}).get("survived", [])}
  for each in row["survived"]:
    each["reason"] = reasons.get(same(each), "")
  kept[place] = row
  RECORD.write_text("".join(json.dumps(kept[place]) + "\n" for place in sorted(kept)))


def tables() -> dict[str, str]:
  """The generated part of the page."""
  lines = ["| Module | Lines | Faults | Seen at first | Seen since | Explained |", "|---|---|---|---|---|---|"]
  for name in MODULES:
    of_module = [row for (module, _), row in rows().items() if module == name]
    late = [each for row in of_module for each in row["survived"]]
    since = sum(bool(each.get("killed_by")) for each in late)
    drawn, killed = (sum(row[what] for row in of_module) for what in ("drawn", "killed"))
    counts = of_module[0]["lines"] if of_module else 0, drawn, killed, since, len(late) - since
    lines.append(f"| {name} | " + " | ".join(map(str, counts)) + " |")
  return {"mutants": "\n".join(lines)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--module", help=f"one of {', '.join(MODULES)} (default: all)")
  parser.add_argument(
    "--count", type=int, default=40, help=f"mutants of a module, at most {MOST_MUTANTS} (default: 40)"
  )
  parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
  parser.add_argument("--seconds", type=int, default=60, help="of tests with one mutant (default: 60)")
  parser.add_argument("--tests", default="tests projects", help="files and folders of tests (default: all)")
  parser.add_argument(
    "--reached", type=Path, help="keep in this file which tests reach which line, or read it from there"
  )
  parser.add_argument("--again", action="store_true", help="run the recorded survivors again")
  options = parser.parse_args()
  with command_line.bad_input_ends_the_program():
    names = [one_of("module", options.module, MODULES)] if options.module else list(MODULES)
    if positive("count", options.count) > MOST_MUTANTS:
      raise ConfigError(f"count={options.count} is too many; use at most {MOST_MUTANTS}")
    if options.again and not any(name in names for name, _ in rows()):
      raise ConfigError(f"module={options.module!r} is not in the record; measure it first, without --again")
    reached = reached_lines(names, options)
    if options.again:
      todo = [functools.partial(again, row) for (name, _), row in rows().items() if name in names]
    else:
      todo = [functools.partial(measured, name) for name in names]
    for row_of in todo:
      keep(row_of(reached, options))
      PAGE.write_text(fill(PAGE.read_text(), tables()))


def reached_lines(modules: Sequence[str], options: argparse.Namespace) -> Reached:
  """Which tests reach which line of these modules: measured, or from the file of --reached."""
  files = [file for module in modules for file in files_of(module)]
  os.environ["JAX_PLATFORMS"] = "cpu"
  if options.reached and options.reached.exists():
    reached = json.loads(options.reached.read_text())
    if missing := set(files) - reached["lines"].keys():
      raise ConfigError(f"reached={str(options.reached)!r} has no {min(missing)}; name another file")
    return reached
  reached = in_process(mutants_worker.reach, files, options.tests.split())
  if not isinstance(reached, dict):
    raise ConfigError(f"tests={options.tests!r} did not run to their end; name other tests")
  if options.reached:
    options.reached.write_text(json.dumps(reached))
  return reached
