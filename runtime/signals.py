"""Signals and timers of a job: what one process asks for, all processes do after the same step."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from errors import JobConfigError
from runtime import processes

# They ask to stop. Schedulers send SIGTERM, or before a time limit what a job has asked for, often SIGUSR1. SIGXCPU
# comes from a limit on processor time, and SIGHUP if a terminal or its connection is closed. All but the first two are
# left to whoever has given them another meaning.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def stops() -> list[signal.Signals]:
  """The signals that ask this program to stop: without those that it was started to ignore, or that another handles."""
  own = lambda number: number in STOPS[:2] or signal.getsignal(number) == signal.SIG_DFL
  return [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN and own(number)]


@dataclasses.dataclass(frozen=True)
class Decision:
  """What all processes do after a step because at least one of them asked for it."""

  save: bool = False
  stop: bool = False
  end: bool = False  # without a save, with an error


class Requests:
  """Turns signals into requests, and the requests of single processes into decisions of all.

  The first of `STOPS` asks to stop after the current step. Then a SIGINT ends the process immediately, and the others
  change nothing: schedulers repeat theirs while a checkpoint is written. A signal that the program was started
  to ignore stays ignored: `nohup python train.py &` in a script is not for the script's Ctrl-C. Use it as a context
  manager in the main thread.

  Args:
    minutes: also asks to save when so many minutes have passed since the last save; 0: never.
    lost: says why this run may no longer write its results; "" as long as it may.
  """

  def __init__(self, minutes: float = 0, lost: Callable[[], str] = str) -> None:
    self.lost = lost
    self.signal: str | None = None  # the name of the first signal that this process received
    self._timer = Timer(minutes)
    self._just_saved = False
    self._before: dict[int, Any] = {}
    self._ballot: jax.Array | None = None
    if jax.process_count() > 1:
      mesh = jax.make_mesh((jax.device_count(),), ("all",))
      self._split = NamedSharding(mesh, P("all"))
      self._any = jax.jit(lambda votes: votes.any(axis=0), out_shardings=NamedSharding(mesh, P()))

  def __enter__(self) -> "Requests":
    if threading.current_thread() is threading.main_thread():
      self._before = {number: signal.signal(number, self._on_signal) for number in stops()}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, _: FrameType | None) -> None:
    if self.signal:
      return
    self.signal = signal.Signals(number).name
    then = ""
    if signal.SIGINT in self._before:
      signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the message says so
      then = "; another SIGINT ends it immediately"
    # Not print(): the signal may have interrupted one.
    with contextlib.suppress(OSError):  # nobody may read it
      os.write(2, f"{self.signal}: will save and end after this step{then}\n".encode())

  def save_every(self, seconds: float) -> None:
    """Changes how long after a save the next one is asked for. Only process 0's value counts."""
    self._timer.seconds = seconds

  def saved(self) -> None:
    """Must be called after each save. It answers all requests to save that were made until now."""
    self._timer.restart()
    self._just_saved = True

  def decide(self) -> Decision:
    """What all processes do now. Call it once after each step of training or evaluation is dispatched.

    In a job of several processes the votes are counted on the devices, behind the step, and read one call later, so
    that no process waits. There a request takes effect one step later.

    Raises JobConfigError if a process says that the run may no longer write its results.
    """
    mine = Decision(self._timer.due, self.signal is not None, bool(self.lost()))
    decided = mine if jax.process_count() == 1 else self._decided(mine)
    if decided.end:
      raise JobConfigError(next(filter(None, processes.all_gather(self.lost()))))
    return decided

  def _decided(self, mine: Decision) -> Decision:
    """What the processes have decided one call ago. `mine` is the vote of this one in the next decision."""
    decided = Decision() if self._ballot is None else Decision(*(bool(vote) for vote in jax.device_get(self._ballot)))
    decided = dataclasses.replace(decided, save=decided.save and not self._just_saved)
    self._just_saved = False
    votes = np.tile(np.array(dataclasses.astuple(mine)), (jax.local_device_count(), 1))
    self._ballot = self._any(jax.make_array_from_process_local_data(self._split, votes))
    return decided


class Timer:
  """Says when `minutes` have passed since the last `restart`; never if 0. Only process 0's clock counts."""

  def __init__(self, minutes: float):
    self.seconds = 60 * minutes
    self.restart()

  def restart(self) -> None:
    self.last = time.monotonic()

  @property
  def due(self) -> bool:
    return bool(self.seconds) and jax.process_index() == 0 and time.monotonic() - self.last >= self.seconds
