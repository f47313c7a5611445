"""Which process of a job is the slowest.

A step lasts equally long for all processes, because each waits for the others. What differs is how long a process works
itself: it reads its part of the batch and starts the step, and only then waits for its devices. The slowest process
waits least. This finds a slow host, such as one with a busy processor or a slow disk. It cannot find a slow device: all
processes wait for that one equally.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from reporting.account import is_time
from reporting.heartbeat import Beat

TIMES = 1.5  # a process counts as slow if it takes this many times the median
SHARE = 0.5  # of a step's time: a host that works for less is hidden by the devices, which work meanwhile


class Slowest(NamedTuple):
  """The process whose host works longest.

  Attributes:
    process: its number.
    host: its name.
    seconds: how many seconds it works on the host in a step, as a mean of its last steps.
    median: the median of these seconds over all processes.
    step: seconds of one of its steps, as a mean.
  """

  process: int
  host: str
  seconds: float
  median: float
  step: float

  @property
  def delays(self) -> bool:
    """Whether the others have to wait for it."""
    return self.seconds > TIMES * self.median and self.seconds > SHARE * self.step

  @property
  def line(self) -> str:
    times = f"{self.seconds / max(self.median, 1e-6):.1f} x the median of {self.median:.2g} s"
    return f"slowest   process {self.process} on {self.host}: {times}, with {self.seconds:.2g} s of work in a step"


def slowest(paces: Sequence[Beat]) -> Slowest | None:
  """The slowest of a job's processes; None for a single one, or if they do not say how long they worked.

  Args:
    paces: the paces of all processes (Heartbeat.pace).
  """
  says = lambda pace: is_time(pace.get("on_host")) and is_time(pace.get("step_time"))
  known = {rank: pace for rank, pace in enumerate(paces) if says(pace)}
  if len(known) < 2:
    return None
  rank = max(known, key=lambda rank: known[rank]["on_host"])
  median = statistics.median(pace["on_host"] for pace in known.values())
  return Slowest(rank, str(known[rank].get("host")), known[rank]["on_host"], median, known[rank]["step_time"])
