"""The page of a run, or of several side by side: curves, what happened when, where the time went, the config.

Every number comes from the files of a workdir, so a page can be made again at any time (tools/report.py).
"""

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting import pages
from reporting.account import account, category, seconds, sentence
from reporting.pages.bars import stacked
from reporting.pages.element import COLOURS, card, numbers, section, table, text, tiles
from reporting.pages.lines import Event, Line, lines, strip
from reporting.pages.units import short
from reporting.recorded import Recorded, moment

# The charts in their order: the name of the measurement, the title, and the unit. Measurements of a part of a mixture
# have the part's name after a slash, as in loss/NAME.
CHARTS = (
  ("loss", "Loss", "nats"),
  ("bits_per_byte", "Bits per byte", "bits/byte"),
  ("accuracy", "Accuracy", ""),
  ("mean_absolute_error", "Mean absolute error", ""),
  ("load_max", "Load of the busiest expert, relative to the mean", ""),
  ("idle_experts", "Share of experts without a token", ""),
  ("dropped", "Share of choices that experts did not take", ""),
  ("balance_loss", "Balance loss of routers, 1 for equal loads", ""),
  ("router_entropy", "Entropy of routers", "nats"),
  ("learning_rate", "Learning rate", ""),
  ("grad_norm", "Gradient norm", ""),
  ("tokens_per_second", "Throughput", "tokens/s"),
  ("images_per_second", "Throughput", "images/s"),
  ("examples_per_second", "Throughput", "examples/s"),
  ("step_ms", "Time of a step", "ms"),
  ("data_wait", "Share of the time spent waiting for data", ""),
  ("tflops_per_second", "Arithmetic", "TFLOP/s"),
  ("mfu", "MFU (model FLOPs utilization)", ""),
  ("palm_mfu", "MFU as PaLM counts", ""),
  ("memory_gib", "Memory in use on the fullest device", "GiB"),
  ("memory_peak_gib", "Most memory used on the fullest device", "GiB"),
  ("epochs", "Epochs of each part of the mixture", ""),
)
RESULTS = ("loss", "bits_per_byte", "accuracy", "mean_absolute_error", "mfu", "palm_mfu", "memory_peak_gib")
AT = re.compile(r"loss_at/([1-9][0-9]{,11})")  # the name of a loss by position
SPEEDS = ("tokens_per_second", "images_per_second", "examples_per_second")


def write(path: Path, runs: Sequence[Recorded]) -> None:
  """Writes the page of these runs. Raises OSError."""
  pages.write(path, page(runs))


def page(runs: Sequence[Recorded]) -> str:
  """The page of one run, or of several with their differences first."""
  runs = _named_apart(runs)
  several = len(runs) > 1
  title = f"{len(runs)} runs" if several else runs[0].name
  about = ", ".join(run.name for run in runs) if several else f"{_about(runs[0])}. {_state(runs[0])}."
  return pages.document(
    title,
    about,
    _compared(runs) if several else tiles(_results(runs[0])),
    section("Curves", *_charts(runs), about=_left_out(runs)),
    section("What happened", *map(_events, runs), _wall_time(runs), about=_account(runs)),
    section("Samples", *map(_sample, runs)),
    section("Config", _config(runs)),
    section("Software and hardware", _machines(runs)),
  )


def _named_apart(runs: Sequence[Recorded]) -> list[Recorded]:
  """Runs with equal names get a number."""
  names = [run.name for run in runs]
  is_double = lambda name: names.count(name) > 1
  return [r._replace(name=f"{r.name} ({i})") if is_double(r.name) else r for i, r in enumerate(runs, 1)]


def _about(run: Recorded) -> str:
  start = run.event("start")
  known = (start.get("strategy"), start.get("devices"), start.get("data"))
  return "; ".join(str(value).replace("\n", ", ") for value in known if value) or str(run.config.get("strategy", ""))


def _state(run: Recorded) -> str:
  """How far the run has come, and how it ended."""
  steps, last = run.config.get("steps"), run.events[-1] if run.events else {}
  far = f"step {run.step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
  return {
    "end": f"Finished at {moment(last)}, {far}" + (f": {last['why']}" if last.get("why") else ""),
    "stop": f"Stopped by {last.get('by')} at {moment(last)}, {far}",
    "failure": f"Failed at {moment(last)}, {far}: {last.get('why')}",
    "killed": f"{_ending(last).capitalize()} at {moment(last)}, {far}",
  }.get(last.get("event", ""), f"Running when this page was written: {far}" if last else f"Read up to {far}")


def _left_out(runs: Sequence[Recorded]) -> str:
  return " ".join(f"About one in {run.every} lines of {run.name}'s training is shown." for run in runs if run.every > 1)


def _results(run: Recorded) -> list[tuple[str, str]]:
  """The best validation loss, the last of other values, and the median speed."""
  found = []
  for split in ("validation", "train"):
    for name in RESULTS:
      values = [y for _, y in run.points(split, name) if y is not None]
      if values and name == "loss" and split == "validation":
        found.append(("best validation loss", short(min(values))))
      elif values:
        found.append((f"last {split} {name.replace('_', ' ')}", short(values[-1])))
  for name in SPEEDS:
    values = sorted(y for _, y in run.points("train", name) if y is not None)
    if values:
      found.append((f"median {name.split('_')[0]}/s", short(values[len(values) // 2])))
  if (total := account(run.attempts)).wall_time:
    found.append(("goodput", f"{total.goodput:.1%}"))
  return [*found, ("steps", f"{run.step:,}")]


def _compared(runs: Sequence[Recorded]) -> str:
  """The results of several runs as a table, and the fields in which their configs differ."""
  results = [dict(_results(run)) for run in runs]
  names = list(dict.fromkeys(name for found in results for name in found))
  rows = [(name, *(found.get(name, "") for found in results)) for name in names]
  rows.append(("state", *map(_state, runs)))
  head = ("", *(run.name for run in runs))
  differ = _differences(runs)
  said = table(head, differ) if differ else text("none")
  return section("Results", card("", table(head, rows)), card("Config: differences", said))


def _charts(runs: Sequence[Recorded]) -> Iterator[str]:
  measured = {
    (r, split): dict.fromkeys(key for _, values in run.lines.get(split, []) for key in values)
    for r, run in enumerate(runs)
    for split in ("train", "validation")
  }
  for name, title, unit in CHARTS:
    series = []
    for (r, split), keys in measured.items():
      for key in [key for key in keys if key.partition("/")[0] == name]:
        parts = (runs[r].name if len(runs) > 1 else "", split, key.partition("/")[2])
        series.append(Line(" ".join(filter(None, parts)), runs[r].points(split, key), dots=split == "validation"))
    yield lines(title, series, unit)
  yield lines("Loss by position", _by_position(runs), "nats", "positions in a text up to", log=True)


def _by_position(runs: Sequence[Recorded]) -> list[Line]:
  """The losses of a run's first and of its last evaluation by position (`Evaluator.__call__`)."""
  found = []
  for run in runs:
    evaluations = [
      (step, [(float(at[1]), y) for key, y in values.items() if (at := AT.fullmatch(key))])
      for step, values in run.lines.get("validation", [])
    ]
    with_positions = [(step, points) for step, points in evaluations if points]
    for step, points in dict(with_positions[:1] + with_positions[-1:]).items():
      found.append(Line(f"{run.name if len(runs) > 1 else ''} step {step:,}".strip(), sorted(points), dots=True))
  return found


def _events(run: Recorded) -> str:
  kinds = ("starts", "skipped", "dead experts", "healed", "evaluated", "saved", "ends")
  found: dict[str, list[Event]] = {kind: [] for kind in kinds}

  def mark(kind: str, step: float, says: str, value: float | None = 0.0) -> None:
    found[kind].append((step, says, value))

  for event in run.events:
    at, when = float(event["step"]), moment(event)
    if event["event"] == "start":
      mark("starts", at, f"{'started again' if found['starts'] else 'started'} {when}")
    elif event["event"] == "dead_experts":
      mark("dead experts", at, str(event.get("why")))
    elif event["event"] == "healed":
      for piece in given if isinstance(given := event.get("pieces"), list) else []:
        if isinstance(piece, dict):
          mark("healed", at, f"{piece.get('array')} on device {piece.get('device')}")
    elif event["event"] != "evaluation":
      mark("ends", at, f"{_ending(event)} {when}")
  for number, values in run.lines.get("validation", []):
    loss = values.get("loss")
    mark("evaluated", number, "loss not finite" if loss is None else f"loss {loss:.4f}", loss)
  for step, skipped in run.points("train", "skipped_updates"):
    mark("skipped", step, f"{short(skipped or 0)} updates skipped since the line before", skipped)
  for step in run.checkpoints:
    mark("saved", step, "checkpoint")
  return strip(f"Time line of {run.name}", run.step, found)


def _ending(event: Mapping[str, Any]) -> str:
  """How an attempt ended."""
  doing = event.get("doing")
  return {
    "end": "finished",
    "stop": f"stopped by {event.get('by')}",
    "killed": f"killed while {category(doing)}" if isinstance(doing, str) and doing != "other" else "killed",
  }.get(event.get("event", ""), f"failed: {event.get('why')}")


def _account(runs: Sequence[Recorded]) -> str:
  """Where the time of each job went, in words."""
  found = [(run.name, account(run.attempts)) for run in runs]
  return " ".join(f"Of {name}: {sentence(total)}." for name, total in found if total.wall_time)


def _wall_time(runs: Sequence[Recorded]) -> str:
  """Where the time went: a bar for each job, and one for each attempt of it. Each of the largest parts has a colour."""
  jobs, rows = [], []
  for run in runs:
    total = account(run.attempts)
    jobs.append((f"{run.name}: goodput {total.goodput:.1%}", seconds(dict(total.seconds))))
    for attempt in run.attempts:
      name = "before its first step" if attempt.step is None else f"from step {attempt.step}"
      rows.append((f"{run.name}, {name}", attempt.spent))
  form = lambda seconds: f"{seconds:,.1f} s"
  about = "Where the time of the job went, over all restarts"
  return stacked(about, _largest(jobs), form) + stacked("Where the wall time went", _largest(rows[-12:]), form)


def _largest(rows: Sequence[tuple[str, Mapping[str, float]]]) -> list[tuple[str, dict[str, float]]]:
  """The rows, with only the parts that are largest over all rows. The other parts are added up as "other"."""
  total = collections.Counter[str]()
  for _, parts in rows:
    total.update(parts)
  largest = [name for name, _ in total.most_common() if name != "other"][: COLOURS - 1]
  shown = []
  for name, parts in rows:
    found = {part: parts[part] for part in largest if part in parts}
    shown.append((name, found | {"other": max(0.0, sum(parts.values()) - sum(found.values()))}))
  return shown


def _sample(run: Recorded) -> str:
  found = [event["sample"] for event in run.events if isinstance(event.get("sample"), str)]
  return card(f"Written by {run.name} at its end", text(found[-1])) if found else ""


def _differences(runs: Sequence[Recorded]) -> list[tuple[str, ...]]:
  fields = sorted({name for run in runs for name in run.config})
  rows = [(name, *(_value(run, name) for run in runs)) for name in fields]
  return [row for row in rows if len(set(row[1:])) > 1]


def _value(run: Recorded, name: str) -> str:
  return "" if name not in run.config else str(run.config[name])


def _config(runs: Sequence[Recorded]) -> str:
  """The fields that are equal in all runs; several runs' differences stand at the top of the page."""
  apart = {name for name, *_ in _differences(runs)}
  rows = [(name, _value(runs[0], name)) for name in sorted(runs[0].config) if name not in apart]
  return card("", numbers(("field", "value"), rows, title=f"{len(rows)} fields")) if rows else ""


def _machines(runs: Sequence[Recorded]) -> str:
  """Versions, devices and command of each run's last start."""
  starts = [run.event("start") for run in runs]
  rows = [
    (name, *(str(start.get(name, "")) for start in starts))
    for name in ("devices", "memory", "strategy", "attention", "command")
    if any(name in start for start in starts)
  ]
  versions = [found if isinstance(found := start.get("versions"), dict) else {} for start in starts]
  rows += [
    (name, *(str(of.get(name, "")) for of in versions)) for name in dict.fromkeys(n for of in versions for n in of)
  ]
  return card("", table(("", *(run.name for run in runs)), rows)) if rows else ""
