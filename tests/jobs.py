"""Runs of train.py in processes of their own that can be killed, and started again in a second instead of several.

A server process imports everything once and forks the runs off (multiprocessing's "forkserver"); nothing of JAX runs
in it before the fork.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from helpers import config

import train

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["train", "helpers"])
SECONDS = 120.0  # after which something hangs


def _run(log: str, strategy: str, workdir: str, hold: bool, fields: dict[str, Any]) -> None:
  out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(out, 1)
  os.dup2(out, 2)
  sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
  if hold:
    with train.signals.Requests():
      print("holding")
      while True:
        time.sleep(0.1)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # these start again and again
  jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/meshwright/tests").expanduser()))
  train.main(config(strategy, **fields | {"compilation_cache_dir": ""}), Path(workdir))


class Job:
  """A run of a strategy in a workdir, started at once; `fields` change the tiny preset's.

  With `hold` it takes requests, as a run does, but trains nothing and never ends.
  """

  def __init__(self, strategy: str, workdir: Path, log: Path, hold: bool = False, **fields: Any):
    self.log = log
    self._said_before = len(self.everything_said())
    self.process = _context.Process(target=_run, args=(str(log), strategy, str(workdir), hold, fields))
    self.process.start()

  def everything_said(self) -> str:
    return self.log.read_text() if self.log.exists() else ""

  @property
  def said(self) -> str:
    """What this run has printed."""
    return self.everything_said()[self._said_before :]

  def wait_for(self, seen: str | Callable[[str], bool]) -> None:
    """Waits until it has printed something."""
    until = time.monotonic() + SECONDS
    while not (seen in self.said if isinstance(seen, str) else seen(self.said)):
      assert self.process.is_alive(), f"ended before it said {seen!r}:\n{self.said}"
      assert time.monotonic() < until, f"never said {seen!r}:\n{self.said}"
      time.sleep(0.01)

  def send(self, number: signal.Signals) -> None:
    os.kill(self.process.pid, number)

  def wait(self) -> int:
    """Its exit status, or the negative number of the signal that ended it."""
    self.process.join(SECONDS)
    assert self.process.exitcode is not None, f"still runs:\n{self.said}"
    return self.process.exitcode
