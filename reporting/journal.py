"""What happened in a run, and when: journal.jsonl, and report.html, which is written anew as the run goes on.

A line of journal.jsonl is an event: "start", "evaluation", "dead_experts", "stop", "end" or "failure", with its step,
the seconds since 1970, and what else is known. Nothing here ends a run: a page that cannot be made is left out with a
warning.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import first_line
from reporting import report
from reporting.metrics import Appender
from reporting.recorded import JOURNAL, PAGE, load
from reporting.speed import Clock

SHARE = 0.01  # of the time since the last page that an evaluation's page may take


class Journal:
  """Adds events to a run's journal, and keeps its page up to date.

  Args:
    clock: its times are part of every event. Writing the page counts as "logging".
    enabled: true in one process of a job only.
    warn: prints an error that does not end the run.
  """

  def __init__(self, workdir: Path, clock: Clock, enabled: bool, warn: Callable[[str], None]):
    self.workdir, self.clock, self.enabled, self.warn = workdir, clock, enabled, warn
    self.file = Appender(workdir / JOURNAL) if enabled else None
    self.step, self.written, self.cost, self.failed = 0, -float("inf"), 0.0, False

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
    if error is not None:
      self.add("failure", self.step, why=first_line(error))
    if self.file:
      self.file.close()

  def add(self, event: str, step: int, **values: Any) -> None:
    """Writes an event, and the page: after an evaluation only if that takes less than SHARE of the time since."""
    self.step = step
    if not self.file:
      return
    with self.clock("logging"):
      found = {"event": event, "step": step, "time": time.time(), "wall_time": self.clock.parts(), **values}
      self.file.write(json.dumps(found).encode() + b"\n")
      start = time.perf_counter()
      if event == "evaluation" and self.cost > SHARE * (start - self.written):
        return
      try:
        report.write(self.workdir / PAGE, [load(self.workdir)])
      except Exception as error:  # a page is never worth a run
        if not self.failed:
          self.warn(f"{self.workdir / PAGE} cannot be written ({first_line(error)}); the run goes on without it")
        self.failed = True
      self.written = time.perf_counter()
      self.cost = self.written - start
