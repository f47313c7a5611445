"""Measures where the wall time goes, and how fast steps run."""

import collections
import os
import time
from pathlib import Path
from typing import Self


class Clock:
  """Adds up wall time by activity: `with clock("data"): ...`. `spent` maps names to seconds. Do not nest it.

  `current` is the activity that runs now, or "other".

  Args:
    began: when the clock begins, in seconds since 1970, by default now. Time before now counts as "set-up".
  """

  def __init__(self, began: float | None = None) -> None:
    self.spent: dict[str, float] = collections.defaultdict(float)
    self.born, self.began, self.current = time.perf_counter(), time.time(), "other"
    if began is not None:
      self.spent["set-up"] = before = max(0.0, self.began - began)
      self.born, self.began = self.born - before, self.began - before

  def __call__(self, name: str) -> Self:
    self._name = name
    return self

  def __enter__(self) -> None:  # several in each step, where a generator would take twice the time
    self._start, self.current = time.perf_counter(), self._name

  def __exit__(self, *_: object) -> None:
    self.spent[self.current] += time.perf_counter() - self._start
    self.current = "other"

  @property
  def total(self) -> float:
    return time.perf_counter() - self.born

  def parts(self) -> dict[str, float]:
    """The seconds of each activity, the current one included, and of everything else as "other", largest first."""
    parts = dict(self.spent)
    if (name := self.current) != "other":
      parts[name] = parts.get(name, 0.0) + time.perf_counter() - self._start
    parts["other"] = self.total - sum(parts.values())
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def process_start(pid: int | str = "self") -> float:
  """When a process started, by default this one, in seconds since 1970; where the system does not say it: now."""
  try:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # since the system started
    started = ticks / os.sysconf("SC_CLK_TCK")
    age, now = time.clock_gettime(time.CLOCK_BOOTTIME) - started, time.time()  # together: a machine may be busy
  except (OSError, ValueError, IndexError, AttributeError):  # not Linux
    return time.time()
  return now - age if age > 0 else now


class Meter:
  """Measures speed over the steps since the last line.

  Args:
    items: how many of `unit` ("tokens" or "images") a step processes.
    flops: floating-point operations that a step needs.
    palm_flops: these operations as PaLM counts them.
    peak: FLOP/s that all devices together can reach; None if not known.
  """

  def __init__(self, clock: Clock, items: int, unit: str, flops: float, palm_flops: float, peak: float | None):
    self.clock, self.items, self.unit = clock, items, unit
    self.flops, self.palm_flops, self.peak = flops, palm_flops, peak
    self.restart(0)

  def restart(self, step: int) -> None:
    """Starts a new measurement after `step`. Call it after work that should not count, such as an evaluation."""
    self.step, self.time, self.waited = step, time.perf_counter(), self.clock.spent["data"]

  def read(self, step: int) -> dict[str, float]:
    """Returns the speed from the last start until `step`, which has just ended, and starts a new measurement."""
    seconds, steps = time.perf_counter() - self.time, max(1, step - self.step)
    rate = steps / seconds
    speed = {
      f"{self.unit}_per_second": self.items * rate,
      "step_ms": 1e3 * seconds / steps,
      "data_wait": (self.clock.spent["data"] - self.waited) / seconds,
      "tflops_per_second": self.flops * rate / 1e12,
    }
    if self.peak:
      speed |= {"mfu": self.flops * rate / self.peak, "palm_mfu": self.palm_flops * rate / self.peak}
    self.restart(step)
    return speed
