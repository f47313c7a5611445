"""The generated parts of docs/accelerator.md: the steps, a summary, and a table of each step, with a row a record."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.benchmarks.accelerator import record
from lab.benchmarks.accelerator.step import LIMIT, Measurement, Values
from lab.benchmarks.accelerator.steps import STEPS
from lab.benchmarks.header import source
from lab.benchmarks.pages import RESULTS, ROOT, fill

PAGE = ROOT / "docs" / "accelerator.md"
NOTHING = "No accelerator's record exists yet."
FAILURES = 1  # that a cell of a table names; it counts the others


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
  """Fills the page from the records."""
  page.write_text(fill(page.read_text(), parts(record.read(results))))


def parts(records: Sequence[Values], steps: Mapping[str, Measurement] = STEPS) -> dict[str, str]:
  """The generated parts, by the names of their places."""
  return {
    "steps": overview(steps),
    "summary": summary(records, steps),
    **{step.name: table(step, records) for step in steps.values()},
  }


def overview(steps: Mapping[str, Measurement]) -> str:
  """What each step measures, when it fails and what it aims at."""
  lines = ["| `STEP` | What it measures | It fails if | Its aim |", "|---|---|---|---|"]
  lines += [f"| `{step.name}` | {step.about} | {step.promise} | {step.aim or '–'} |" for step in steps.values()]
  return "\n".join([*lines, "", f"Each step has {LIMIT // 60} minutes. A step that takes longer is ended, and fails."])


def summary(records: Sequence[Values], steps: Mapping[str, Measurement]) -> str:
  """How each step ended on each machine."""
  if not records:
    return NOTHING
  lines = [f"| Devices | {' | '.join(steps)} |", "|---|" + "---|" * len(steps)]
  lines += [f"| {devices(made)} | {' | '.join(short(step, made) for step in steps.values())} |" for made in records]
  return "\n".join(lines)


def table(step: Measurement, records: Sequence[Values]) -> str:
  """A step's table, with a row for each machine that ran it, and the source of each row."""
  ran = [made for made in records if step.name in made["steps"]]
  if not ran:
    return NOTHING
  columns = ("Devices", *step.columns, "Result")
  lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
  for made in ran:
    measured = made["steps"][step.name].get("values")
    cells = step.row(measured) if measured else ["–"] * len(step.columns)
    lines.append(f"| {' | '.join([devices(made), *cells, '; '.join(result(step, made, most=FAILURES))])} |")
  return "\n".join([*lines, *(line for made in ran for line in ("", origin(made, step.name)))])


def devices(made: Values) -> str:
  return f"{made['devices']} × {made['device']}"


def result(step: Measurement, made: Values, most: int | None = None) -> list[str]:
  """How a step ended: what is broken or why nothing was measured, and the aim.

  Args:
    most: how many failures to name; None for all.
  """
  entry = made["steps"][step.name]
  if "values" not in entry:
    return [f"**fails**: {entry['error']}"]
  verdict = step.judge(entry["values"])
  said = [f"**fails**: {broken}" for broken in verdict.broken[:most]]
  others = len(verdict.broken) - len(said)
  said += [f"{others} more failure{'s' * (others > 1)}, in the record"] if others else []
  said += [f"aim {verdict.aim.show()}"] if verdict.aim else []
  return said or ["holds"]


def short(step: Measurement, made: Values) -> str:
  """The same in a few words."""
  if step.name not in made["steps"]:
    return "not run"
  entry = made["steps"][step.name]
  verdict = step.judge(entry["values"]) if "values" in entry else None
  if verdict is None or not verdict.good:
    return "**fails**"
  return f"aim {verdict.aim.outcome}" if verdict.aim else "holds"


def origin(made: Values, name: str) -> str:
  """The line below a table for one row: command, devices, jax, settings, date, commit and time. The record has more."""
  entry = made["steps"][name]
  settings = "".join(f" {name}={value}." for name, value in entry["environment"].items())
  commit = f" Commit {entry['commit']}{', with changes' if entry['dirty'] else ''};" if entry["commit"] else ""
  shown = entry | {"machine": devices(made), "versions": {"jax": entry["versions"]["jax"]}}
  return f"{source(shown)}{settings}{commit} took {entry['seconds']:.0f} s."
