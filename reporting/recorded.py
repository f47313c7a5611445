"""Reads what a run wrote into its workdir, as far as it is there and whole: a report is made of this."""

import contextlib
import io
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from checkpointing import form, reading, record
from reporting import heartbeat, json_lines
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
LINES = 20_000  # about the most lines of training that are kept, so that a page takes less than a second
FEW = 100 * LINES  # bytes of metrics.jsonl of which all lines are kept
RARE = (b'"validation"', b"null", b'"skipped_updates"')  # lines with one of these are always kept
LOSS = re.compile(rb'"loss": (-?[0-9][0-9.eE+-]*)')


class Recorded(NamedTuple):
  """A run as its files show it. What is missing or damaged is empty.

  Attributes:
    name: the name of its folder.
    lines: the lines of metrics.jsonl, by split ("train", "validation"): pairs of a step and its values, in order.
    events: the events of journal.jsonl, in order.
    config: the fields of config.json by their dotted names.
    checkpoints: the steps that can be resumed now.
    every: of very many lines of training, only about one in so many is here; the lowest and the highest losses are.
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


class Reader:
  """Reads a workdir, and again while a run goes on: then only what is new of its measurements.

  Of very many lines of training it keeps those with the lowest and the highest loss of equal parts, and rare ones.
  """

  def __init__(self, workdir: Location):
    self.workdir, self.position = workdir, 0  # in metrics.jsonl
    self.lines: dict[str, list[tuple[int, dict[str, float | None]]]] = {}
    self.seen = 0  # lines, kept or not

  def load(self, happened: list[dict[str, Any]] | None = None) -> Recorded:
    """The run as it is now. Damaged and half-written lines are left out. `happened`: its events, if they are known."""
    self._catch_up()
    config, workdir = {}, self.workdir
    with contextlib.suppress(OSError, ValueError):
      fields = form.read(workdir / "config.json")
      config = record.flat(fields) if isinstance(fields, dict) and form.plain(fields) else {}
    happened = events(workdir) if happened is None else list(happened)
    beat = heartbeat.of_job(workdir).get(0, {})
    if beat.get("began") in [event.get("began") for event in happened if event["event"] in ENDINGS]:
      beat = {}
    trained, others = self.lines.get("train", []), sum(len(x) for n, x in self.lines.items() if n != "train")
    every = max(1, round((self.seen - others) / max(1, len(trained))))
    name, saved = workdir.resolve().name, reading.steps(workdir / reading.FOLDER)
    run = Recorded(name, dict(self.lines), happened, config, saved, every, beat)
    return for_others(run) if config.get("reporting.share") is True else run

  def _catch_up(self) -> None:
    """Reads what metrics.jsonl has gained since the last time."""
    with json_lines.opened(self.workdir / "metrics.jsonl") as file:
      new = file.seek(0, io.SEEK_END) - self.position
      for block in json_lines.onwards(file, self.position):
        self.position += len(block)
        self.seen += block.count(b"\n")
        for line in json_lines.objects(block.splitlines() if new <= FEW else _telling(block, 4 * new // LINES)):
          step, split = line.pop("step", None), line.pop("split", None)
          values = {name: value for name, value in line.items() if value is None or _is_number(value)}
          if _is_step(step) and isinstance(split, str):
            self.lines.setdefault(split, []).append((step, {n: _finite(v) for n, v in values.items()}))
    for found in self.lines.values():
      found.sort(key=lambda line: line[0])
    if len(train := self.lines.get("train", [])) > LINES:
      self.lines["train"] = _thinned(train)


def load(workdir: Location) -> Recorded:
  """Reads a workdir once. Damaged and half-written lines are left out."""
  return Reader(workdir).load()


def _telling(block: bytes, size: int) -> list[bytes]:
  """The rare lines, and of others the first, the last, and of each `size` bytes the lowest and the highest loss."""
  found, usual, done, stop = [], [], 0, 0
  for at in sorted({block.rfind(b"\n", 0, at) + 1 for word in RARE for at in _places(block, word)}):
    usual.append(block[done:at])
    done = block.find(b"\n", at) + 1 or len(block)
    found.append(block[at:done])
  block = b"".join([*usual, block[done:]]) if usual else block
  begins = {0, block.rfind(b"\n", 0, -1) + 1}
  while stop < len(block):
    start, stop = stop, block.find(b"\n", stop + size) + 1 or len(block)
    losses = LOSS.findall(block, start, stop)
    with contextlib.suppress(ValueError):  # no loss, or a damaged one
      values = list(map(float, losses))
      for text in (losses[values.index(min(values))], losses[values.index(max(values))]):
        places = (block.find(b'"loss": ' + text + end, start, stop) for end in (b",", b"}", b""))
        begins.add(block.rfind(b"\n", 0, next(at for at in places if at >= 0)) + 1)
  return found + [block[at : block.find(b"\n", at) + 1 or len(block)] for at in sorted(begins)]


def _places(text: bytes, word: bytes) -> Iterator[int]:
  at = text.find(word)
  while at >= 0:
    yield at
    at = text.find(word, at + 1)


def _thinned(train: list[tuple[int, dict[str, float | None]]]) -> list[tuple[int, dict[str, float | None]]]:
  """Of equal parts of the steps the lines with the lowest and the highest loss, half of LINES in all, and rare ones."""
  first, last = train[0][0], train[-1][0]
  kept, parts = {0, len(train) - 1}, dict[int, list[tuple[float, int]]]()
  for i, (step, values) in enumerate(train):
    if "skipped_updates" in values or None in values.values():
      kept.add(i)
    else:
      parts.setdefault((step - first) * (LINES // 4) // (last - first + 1), []).append((values.get("loss") or 0.0, i))
  for part in parts.values():
    kept |= {min(part)[1], max(part)[1]}
  return [train[i] for i in sorted(kept)]


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


def events(workdir: Location) -> list[dict[str, Any]]:
  """The events of a run's journal, of evaluations in a row only the last."""
  found: list[dict[str, Any]] = []
  with contextlib.suppress(OSError):
    for line in json_lines.lines_of(workdir / JOURNAL):
      for event in json_lines.objects([line]):
        if isinstance(event.get("event"), str) and _is_step(event.get("step")):
          add(found, event)
  return found


def add(happened: list[dict[str, Any]], event: dict[str, Any]) -> None:
  """Adds an event. One evaluation after another takes its place: it says all that the earlier one does."""
  same = lambda one: (one["event"], one.get("began"))
  if happened and event["event"] == "evaluation" and same(happened[-1]) == same(event):
    happened.pop()
  happened.append(event)


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
