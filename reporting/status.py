"""How a job is doing, for those who watch it: its account and metrics.prom, a file that Prometheus can collect."""

from collections.abc import Callable, Mapping
from pathlib import Path

from reporting import pages
from reporting.account import Account, sentence
from reporting.appender import warn
from reporting.heartbeat import Beat
from reporting.journal import Journal
from reporting.metrics import PROMETHEUS, Writer
from reporting.prometheus import Metric, Sample, exposition
from reporting.stragglers import Slowest, slowest
from runtime import processes


class Status:
  """Writes the account of a job, and what its last step has measured. `writer.enabled` is true in one process only.

  Args:
    newest: the step of the newest checkpoint; 0: there is none.
  """

  def __init__(self, workdir: Path, writer: Writer, journal: Journal, newest: Callable[[], int]):
    self.path, self.writer, self.journal, self.newest = workdir / PROMETHEUS, writer, journal, newest
    self.labels = {"run": workdir.resolve().name}
    self.measured: Mapping[str, float] = {}  # values of the last line of training
    self.slowest: Slowest | None = None  # the slowest process at the last evaluation
    self._failing = False

  def update(self, step: int, measured: Mapping[str, float] | None = None) -> Account:
    """Writes metrics.prom anew. `measured`: the values of `step`, by default those of the last line."""
    self.measured, found = measured or self.measured, self.journal.account()
    if self.writer.enabled:
      text = exposition(self._metrics(step, found), self.labels)
      try:
        pages.write(self.path, text)
        self._failing = False
      except OSError as error:
        if not self._failing:
          warn(f"{self.path} cannot be written ({error.strerror}); training continues, and the next line retries")
        self._failing = True
    return found

  def evaluated(self, step: int, pace: Beat) -> None:
    """Writes the account, and names a process that is slow. All processes must call it, each with its own pace."""
    self.slowest = slowest(processes.all_gather(pace))
    if self.slowest and self.slowest.delays:
      self.writer.say(self.slowest.line)
    self.write(step)

  def write(self, step: int) -> str:
    """Writes metrics.prom, and adds a "job" line to the measurements. Returns the account as a sentence."""
    found = self.update(step)
    values = {"goodput": found.goodput, "wall_time": found.wall_time, "restarts": found.restarts}
    self.writer.write(step, "job", values | {f"seconds/{name}": value for name, value in found.seconds.items()})
    return sentence(found)

  def _metrics(self, step: int, found: Account) -> list[Metric]:
    measured, slow, newest = self.measured, self.slowest, self.newest()

    def one(name: str, scale: float = 1.0) -> list[Sample]:
      return [({}, measured[name] * scale)] if name in measured else []

    return [
      Metric("step", "The last step that is done.", [({}, step)]),
      Metric("loss", "The training loss of that step, in nats.", one("loss")),
      Metric("step_seconds", "Seconds of a step, as a mean since the line before.", one("step_ms", 1e-3)),
      Metric("tokens_per_second", "Tokens trained in a second.", one("tokens_per_second")),
      Metric("images_per_second", "Images trained in a second.", one("images_per_second")),
      Metric("examples_per_second", "Examples trained in a second.", one("examples_per_second")),
      Metric("goodput_ratio", "The share of the wall time that trained new steps.", [({}, found.goodput)]),
      Metric(
        "wall_time_seconds",
        "Seconds of the job's wall time over all restarts, by category.",
        [({"category": name}, value) for name, value in found.seconds.items()],
      ),
      Metric("restarts_total", "How often the job was started again.", [({}, found.restarts)], "counter"),
      Metric("checkpoint_step", "The step of the newest checkpoint; 0 if there is none.", [({}, newest)]),
      Metric(
        "slowest_host_seconds",
        "Seconds of a step in which the slowest process works on its host.",
        [({"process": str(slow.process), "host": slow.host}, slow.seconds)] if slow else [],
      ),
      Metric("median_host_seconds", "The median of the same over all processes.", [({}, slow.median)] if slow else []),
    ]
