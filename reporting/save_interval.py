"""How often a run saves, if `checkpoint.minutes` is "auto": chosen from what saves and failures have cost so far."""

from collections.abc import Callable, Sequence
from typing import Any

from checkpointing.interval import choose, duration
from checkpointing.save import Checkpoints
from reporting.account import Attempt
from reporting.journal import Journal
from runtime.signals import Requests
from training.loop import AUTO

FIRST = 1.0  # minutes before the first save, which shows what saves cost
MUCH = 1.5  # an interval that differs by this factor from the one that was printed is printed again


def first_minutes(minutes: Any) -> float:
  """The minutes between saves that a run begins with: those of the config, or FIRST for "auto"."""
  return FIRST if minutes == AUTO else minutes


class SaveInterval:
  """Chooses the interval again after each save. Only process 0's clock asks for saves, so only it needs the interval.

  Args:
    minutes: the field checkpoint.minutes.
    hosts: the number of hosts of the job.
    say: prints a line.
  """

  def __init__(
    self, minutes: Any, hosts: int, requests: Requests, checkpoints: Checkpoints, journal: Journal,
    say: Callable[[str], None],
  ):  # fmt: skip
    self.automatic, self.hosts = minutes == AUTO and journal.file is not None, hosts
    self.requests, self.checkpoints, self.journal, self.say = requests, checkpoints, journal, say
    self.step, self.said = -1, 0.0  # the step of the save last looked at; the interval last printed

  def update(self) -> None:
    """Chooses the interval if another save is complete. Costs nothing otherwise."""
    cost = self.checkpoints.cost
    if not self.automatic or cost is None or cost.step == self.step:
      return
    self.step = cost.step
    known = [*self.journal.before, self.journal.now()]
    found, failures = self.journal.account(), lost(known)
    down = found.seconds["down"]
    restart = sum(found.seconds[name] for name in ("starting", "restoring", "compiling")) / len(known)
    restart += down / max(1, failures)
    chosen = choose(cost.waited, cost.written, restart, found.wall_time - down, failures, self.hosts)
    self.requests.save_every(chosen.seconds)
    if not self.said / MUCH <= chosen.seconds <= self.said * MUCH:
      self.said = chosen.seconds
      self.say(f"interval  a checkpoint every {duration(chosen.seconds)}: {chosen.why}")


def lost(known: Sequence[Attempt]) -> int:
  """How many of a job's attempts failed so that the next one needed a checkpoint. The last one still runs."""
  pairs = zip(known, known[1:], strict=False)
  return sum(not one.ended and not one.stopped and after.source != "memory" for one, after in pairs)
