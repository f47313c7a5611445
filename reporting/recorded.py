"""Reads what a run wrote into its workdir, as far as it is there and whole: a report is made of this."""

import contextlib
import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from checkpointing import form, reading, record
from reporting import heartbeat, metrics
from reporting.account import Attempt, attempts
from runtime.storage.bucket import Location

JOURNAL, PAGE = "journal.jsonl", "report.html"  # in a workdir
ENDINGS = ("stop", "end", "failure", "killed")  # the events that end an attempt
# What `for_others` leaves out: fields of a config, and of events.
OF_MACHINE = (
  "distributed.",
  "compilation_cache_dir",
  "cache_owner",
  "data.cache_dir",
  "data.dir",
  "checkpoint.memory_dir",
)
OWN = ("command", "host")
PATHS = re.compile(r"(?<![\w/])(?:[a-z0-9]+:/|[~.]{1,2})?(?:/[^\s/'\",;|<>(){}\[\]]+)+/?")
LINES = 20_000  # about the most lines of metrics.jsonl that are read, so that a page takes less than a second
KEPT = (b'"validation"', b"null", b'"skipped_updates"')  # lines with one of these are always read


class Recorded(NamedTuple):
  """A run as its files show it. What is missing or damaged is empty.

  Attributes:
    name: the name of its folder.
    lines: the lines of metrics.jsonl, by split ("train", "validation"): pairs of a step and its values, in order.
    events: the events of journal.jsonl, in order.
    config: the fields of config.json by their dotted names.
    checkpoints: the steps that can be resumed now.
    every: of very many lines of training, only one in so many is here.
    beat: the last sign of life of process 0, unless `events` says how it ended.
  """

  name: str
  lines: Mapping[str, list[tuple[int, dict[str, float | None]]]]
  events: list[dict[str, Any]]
  config: Mapping[str, Any]
  checkpoints: list[int]
  every: int = 1
  beat: Mapping[str, Any] = {}

  @property
  def attempts(self) -> list[Attempt]:
    """What process 0 did in each start of the job."""
    return attempts([*self.events, self.beat])

  def points(self, split: str, name: str) -> list[tuple[float, float | None]]:
    """Pairs of a step and a value; the value is None where it was not finite."""
    return [(step, values[name]) for step, values in self.lines.get(split, []) if name in values]

  def event(self, *kinds: str) -> dict[str, Any]:
    """The last event of these kinds; {} if there is none."""
    return next((e for e in reversed(self.events) if e["event"] in kinds), {})

  @property
  def step(self) -> int:
    """The last step of which anything is known."""
    return max([0, *(found[-1][0] for found in self.lines.values()), *(e["step"] for e in self.events)])


def load(workdir: Location) -> Recorded:
  """Reads a workdir. Damaged and half-written lines are left out."""
  lines: dict[str, list[tuple[int, dict[str, float | None]]]] = {}
  written, every = _written(workdir / "metrics.jsonl")
  for line in metrics.objects(written):
    step, split = line.pop("step", None), line.pop("split", None)
    values = {name: value for name, value in line.items() if value is None or _is_number(value)}
    if _is_step(step) and isinstance(split, str):
      lines.setdefault(split, []).append((step, {n: _finite(v) for n, v in values.items()}))
  for found in lines.values():
    found.sort(key=lambda line: line[0])
  config = {}
  with contextlib.suppress(OSError, ValueError):
    fields = form.read(workdir / "config.json")
    config = record.flat(fields) if isinstance(fields, dict) and form.plain(fields) else {}
  name, happened = workdir.resolve().name, events(workdir)
  beat = heartbeat.of_job(workdir).get(0, {})
  if beat.get("began") in [event.get("began") for event in happened if event["event"] in ENDINGS]:
    beat = {}
  run = Recorded(name, lines, happened, config, reading.steps(workdir / reading.FOLDER), every, beat)
  return for_others(run) if config.get("reporting.share") is True else run


def for_others(run: Recorded) -> Recorded:
  """The run without what says much of a machine: the command, hosts, caches, and the folders of paths."""
  config = {name: _without_folders(value) for name, value in run.config.items() if not name.startswith(OF_MACHINE)}
  events = [
    {name: value if name == "sample" else _without_folders(value) for name, value in event.items() if name not in OWN}
    for event in run.events
  ]
  return run._replace(config=config, events=events, beat={n: x for n, x in run.beat.items() if n not in OWN})


def _without_folders(value: Any) -> Any:
  if isinstance(value, str):
    return PATHS.sub(lambda path: path[0].rstrip("/").rpartition("/")[2], value)
  if isinstance(value, dict):
    return {_without_folders(name): _without_folders(inner) for name, inner in value.items()}
  return [_without_folders(inner) for inner in value] if isinstance(value, list) else value


def _written(path: Location) -> tuple[list[bytes], int]:
  """The lines to read, and how many lines of training each stands for."""
  lines = metrics.lines_of(path)
  every = math.ceil(len(lines) / LINES) or 1
  chosen = lambda i, line: i % every == 0 or i == len(lines) - 1 or any(word in line for word in KEPT)
  return [line for i, line in enumerate(lines) if chosen(i, line)], every


def events(workdir: Location) -> list[dict[str, Any]]:
  """The events of a run's journal."""
  found: list[dict[str, Any]] = []
  with contextlib.suppress(OSError):
    found = metrics.objects(metrics.lines_of(workdir / JOURNAL))
  return [event for event in found if isinstance(event.get("event"), str) and _is_step(event.get("step"))]


def _is_number(value: object) -> bool:
  fits = not isinstance(value, int) or abs(value) <= sys.float_info.max  # JSON has integers of any length
  return isinstance(value, int | float) and not isinstance(value, bool) and fits


def _is_step(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _finite(value: float | None) -> float | None:
  return value if value is not None and math.isfinite(value) else None


def moment(event: Mapping[str, Any]) -> str:
  """When an event was, in this machine's time zone."""
  with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
  return "at an unknown time"
