"""How often to save: the intervals by Young and by Daly, and how long a job takes that saves so often.

All three assume the same job: it trains for an interval, stops while it saves, and loses what it trained since the last
save if something fails. Failures are independent of one another (exponential times between them), and may also come
while the job saves or restarts. `lab/analysis/failures.py` simulates jobs that differ from this.
"""

import math
from typing import NamedTuple

from errors import above_zero, not_negative
from runtime.hardware import HOURS_OF_A_HOST

LEAST_PAUSE = 1e-3  # seconds that a save stops training for, at least; the formulas need a number above 0


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
  """Young's interval between two saves, in seconds of training: a first approximation of the best one.

  J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. The arguments and
  errors are those of `best_interval`.
  """
  _check(save_seconds, mtbf_seconds)
  return math.sqrt(2 * save_seconds * mtbf_seconds)


def best_interval(save_seconds: float, mtbf_seconds: float) -> float:
  """Daly's interval between two saves, in seconds of training: very near the one that makes a job shortest.

  J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
  Systems 22(3), 2006. How long a restart takes does not matter: it makes each failure cost more, whatever the interval.
  So it is a factor in `expected_seconds`, and not an argument here.

  Args:
    save_seconds: how long training stops for a save. If it goes on while the save is written, count only the stop, and
      do not save more often than a save is written.
    mtbf_seconds: between two failures of the whole job, on average.

  Raises:
    ConfigError: one of them is not a finite number above 0.
  """
  _check(save_seconds, mtbf_seconds)
  if save_seconds >= 2 * mtbf_seconds:
    return mtbf_seconds
  ratio = save_seconds / (2 * mtbf_seconds)
  return young_interval(save_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def expected_seconds(
  work_seconds: float, interval: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float
) -> float:
  """How long a job takes on average, from its first step to its last save (Daly's equation, as above).

  Args:
    work_seconds: of training, without saves, repeated steps and restarts; a multiple of the interval.
    interval: seconds of training between two saves.
    save_seconds, mtbf_seconds: as in `best_interval`.
    restart_seconds: from a failure to the first step after it.

  Returns:
    Seconds; infinity if they are too many for a float.

  Raises:
    ConfigError: one of them is not a finite number above 0; the restart may take 0 seconds.
  """
  _check(save_seconds, mtbf_seconds)
  above_zero("work_seconds", work_seconds, "86400 for a day")
  above_zero("interval", interval, "300 for five minutes")
  not_negative("restart_seconds", restart_seconds, "use 0 or more")
  try:
    of_restarts = math.exp(restart_seconds / mtbf_seconds)
    of_interval = math.expm1((interval + save_seconds) / mtbf_seconds)
  except OverflowError:
    return math.inf
  return work_seconds / interval * mtbf_seconds * of_restarts * of_interval


class Choice(NamedTuple):
  """Seconds between two saves, and why so many, as the end of a sentence."""

  seconds: float
  why: str


def choose(pause: float, written: float, restart: float, running: float, failures: int, hosts: int) -> Choice:
  """Chooses how often a job saves, by Daly's formula.

  Before the first failure it assumes that hosts fail as often as on a large cluster (`HOURS_OF_A_HOST`), or less often
  if the job has run for longer than that.

  Args:
    pause: seconds for which a save stops training.
    written: seconds until a save is complete. Two saves do not overlap, so the interval is not shorter.
    restart: seconds from a failure to the first new step after it, on average.
    running: seconds that the job has run, over all its attempts.
    failures: how many of these attempts have ended in a failure.
    hosts: of the job.
  """
  pause = max(pause, LEAST_PAUSE)
  if failures:
    mtbf = max(running, LEAST_PAUSE) / failures
    known = f"{failures} failure{'s' if failures > 1 else ''} in {duration(running)} mean one in {duration(mtbf)}"
  else:
    assumed = 3600 * HOURS_OF_A_HOST / hosts
    mtbf = max(assumed, running)
    of_hosts = f"{hosts} hosts" if hosts > 1 else "one host"
    known = f"nothing has failed yet, so one failure in {duration(mtbf)} is assumed for {of_hosts}"
  interval = max(best_interval(pause, mtbf), written)
  share = 100 - 100 * interval / expected_seconds(interval, interval, pause, mtbf, restart)
  return Choice(
    interval,
    f"a save stops training for {duration(pause)}, and {known}; saves and failures then cost {share:.2g}% of the time",
  )


def duration(seconds: float) -> str:
  """Seconds as a text with a unit that suits them, such as 1.5 h; "never" if they are infinite."""
  if math.isinf(seconds):
    return "never"
  for size, unit in ((365 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
    if seconds >= 2 * size:
      return f"{seconds / size:.3g} {unit}"
  return f"{seconds:.3g} s"


def _check(save_seconds: float, mtbf_seconds: float) -> None:
  above_zero("save_seconds", save_seconds, "10 for ten seconds")
  above_zero("mtbf_seconds", mtbf_seconds, "86400 for a day")
