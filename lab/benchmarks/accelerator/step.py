"""What a step of `make accelerator` is: what it measures, what it promises, and what it aims at."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.benchmarks import rounds

LIMIT = 540  # seconds for a step; the process is ended then
RESERVE = 20  # seconds of these in which a step starts nothing and writes its result
NO_TIME = "the step had no time left for it"  # why something was not started
Values = dict[str, Any]  # what a step measured, as JSON can hold it


@dataclasses.dataclass(frozen=True)
class Aim:
  """A figure to reach. Missing it is shown, and is no failure.

  Attributes:
    text: the aim, with what was reached.
    reached: None if the aim is for other devices.
  """

  text: str
  reached: bool | None

  @property
  def outcome(self) -> str:
    return {True: "reached", False: "missed", None: "is for another device"}[self.reached]

  def show(self) -> str:
    return f"{self.outcome}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the values of a step say. It fails if a promise is broken.

  Attributes:
    broken: one sentence for each promise that does not hold, or could not be checked.
  """

  broken: tuple[str, ...] = ()
  aim: Aim | None = None

  @property
  def good(self) -> bool:
    return not self.broken


@dataclasses.dataclass(frozen=True)
class Where:
  """The machine on which a step runs, and the time it has.

  Attributes:
    hardware: as `worker.describe_machine` reports it.
    versions: likewise.
    folder: for what a step keeps between two runs.
    peer_python: a Python that has PyTorch.
    deadline: the time of `time.monotonic` at which the step's process is ended.
  """

  hardware: dict[str, Any]
  versions: dict[str, str]
  folder: Path
  peer_python: str
  deadline: float

  @property
  def devices(self) -> int:
    return self.hardware["devices"]

  def left(self) -> float:
    """Seconds until the deadline."""
    return self.deadline - time.monotonic()

  def run(self, command: Sequence[str], spec: dict[str, Any], run: rounds.Run | None = None) -> dict[str, Any]:
    """Runs a process with a specification and returns its result, or {"error": WHY}; ends it when time is up.

    Args:
      run: a stand-in for the process.
    """
    limit = self.left() - RESERVE
    if limit <= 0:
      return {"error": NO_TIME}
    return run(command, spec) if run else rounds.run(command, spec, limit, own_group=False)  # steps.run ends the group


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One step.

  Attributes:
    about: what it measures.
    promise: what makes it fail.
    aim: what it aims at; "" for none.
    measure: makes the values, in a process of its own. Raises ConfigError if nothing can be measured.
    judge: what the values say.
    columns: the headings of its table; `row` gives the cells of one record.
    uses_devices: whether `measure` itself computes on the accelerators. Otherwise its processes do.
    platforms: where it can run.
  """

  name: str
  about: str
  promise: str
  aim: str
  measure: Callable[[Where], Values]
  judge: Callable[[Values], Verdict]
  columns: tuple[str, ...]
  row: Callable[[Values], Sequence[str]]
  uses_devices: bool = False
  platforms: tuple[str, ...] = ("gpu", "tpu")


def say(text: str) -> None:
  """Prints a line at once, so that the log of a step that is ended holds it."""
  print(text, flush=True)


def difference(a: Any, b: Any) -> float | None:
  """The largest difference between two arrays, relative to the largest entry of `b`; None if one is not finite."""
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  if not (np.isfinite(a).all() and np.isfinite(b).all()):
    return None
  return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))


def largest(values: Iterable[float | None]) -> float | None:
  """The largest value; None, which stands for a value that is not finite, if one is None."""
  known = list(values)
  finite = [value for value in known if value is not None]
  return max(finite) if len(finite) == len(known) else None


def reason(error: BaseException) -> str:
  """An error in one line."""
  return str(error).strip().partition("\n")[0] or type(error).__name__
