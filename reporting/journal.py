"""What happened in a run, and when: journal.jsonl, and report.html, which is written anew as the run goes on.

A line of journal.jsonl is an event: "start", "evaluation", "healed", "dead_experts", "stop", "end", "failure" or
"killed", with its step, the seconds since 1970, and what else is known. `began` is when its process began. A run that
was killed is known from its last sign of life, which the next run reads. account.py adds up what all attempts of a job
did. Nothing here ends a run: a page that cannot be made is left out with a warning.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import first_line
from reporting import recorded, report
from reporting.account import Account, Attempt, account, attempts, followed
from reporting.appender import Appender
from reporting.heartbeat import Heartbeat
from reporting.recorded import ENDINGS, JOURNAL, PAGE, Reader
from reporting.speed import Clock

KEPT = ("time", "began", "wall_time", "host", "process", "doing", "since")  # kept of the last beat of a killed process
SHARE = 0.01  # the share of the time since the last page that an evaluation's page may take


class Journal:
  """Adds events to a run's journal, and keeps its page up to date.

  Args:
    clock: its times are part of every event. Writing the page counts as "logging".
    enabled: true in one process of a job only.
    warn: prints an error that does not end the run.
    heartbeat: knows what earlier runs did until they were killed.
  """

  def __init__(
    self, workdir: Path, clock: Clock, enabled: bool, warn: Callable[[str], None], heartbeat: Heartbeat | None = None
  ):
    self.workdir, self.clock, self.enabled, self.warn = workdir, clock, enabled, warn
    self.file = Appender(workdir / JOURNAL) if enabled else None
    self.step, self.written, self.cost, self.failed = 0, -float("inf"), 0.0, False
    self.heartbeat, self.reader = heartbeat, Reader(workdir)
    self.events = recorded.events(workdir) if enabled else []
    self.first: int | None = None  # the step from which this attempt started
    self.source = ""  # what it resumed from (`account.Attempt.source`)
    if self.file and heartbeat:
      ended = [event.get("began") for event in self.events if event["event"] in ENDINGS]
      heartbeat.killed = [beat for beat in heartbeat.killed if beat["began"] not in ended]
      for beat in heartbeat.killed:
        self._write("killed", beat["step"], {name: beat.get(name) for name in KEPT})
    self.before = attempts(self.events)  # the attempts before this one
    self.past = account(self.before)
    self.ended = {event["step"] for event in self.events if event["event"] == "end"}  # where they were finished

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
    if error is not None:
      self.add("failure", self.step, why=first_line(error), **self.heartbeat.unchanged() if self.heartbeat else {})
    if self.file:
      self.file.close()

  def add(self, event: str, step: int, **values: Any) -> None:
    """Writes an event, and the page: after an evaluation only if the page takes little time (SHARE)."""
    self.step = step
    if event == "start":
      self.first, self.source = step, values.get("source", "")
    if not self.file:
      return
    with self.clock("logging"):
      about = {"time": time.time(), "began": self.clock.began, "wall_time": self.clock.parts()}
      self._write(event, step, about | values)
      start = time.perf_counter()
      if event == "evaluation" and self.cost > SHARE * (start - self.written):
        return
      try:
        report.write(self.workdir / PAGE, [self.reader.load(self.events)])
      except Exception as error:  # a page is never worth a run
        if not self.failed:
          self.warn(f"{self.workdir / PAGE} cannot be written ({first_line(error)}); the run goes on without it")
        self.failed = True
      self.written = time.perf_counter()
      self.cost = self.written - start

  def now(self) -> Attempt:
    """What this attempt has done until now."""
    return Attempt(self.clock.began, self.clock.parts(), self.first, source=self.source)

  def account(self) -> Account:
    """Where the time of the job went until now, over all its attempts."""
    return followed(self.past, self.before[-1] if self.before else None, self.now())

  def _write(self, event: str, step: int, values: dict[str, Any]) -> None:
    if self.file:
      happened = {"event": event, "step": step, **values}
      self.file.write(json.dumps(happened).encode() + b"\n")
      recorded.add(self.events, happened)
