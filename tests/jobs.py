"""Runs of train.py in separate processes, which tests can kill and restart within a second.

Jobs of several processes are started by tools.launch, with `flags`. For `Job`, a server process imports everything once
and forks each run (multiprocessing's "forkserver"). It runs no JAX code before the fork.
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
from helpers import ROOT, config

import train
from runtime import command_line, signals
from runtime.storage import lease as leases

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["train", "helpers"])
SECONDS = 120.0  # a run that takes longer has hung
TINY = {  # for jobs of several processes
  "model__depth": 1, "model__width": 32, "model__heads": 8, "model__kv_heads": 8, "model__seq_len": 8,
  "data__name": "synthetic", "log_every": 1, "eval_every": 4, "eval_examples": 32, "sample_length": 0,
  "model__dropout": 0.1, "steps": 14, "compilation_cache_dir": "~/.cache/meshwright/tests",
}  # fmt: skip


def _run(
  log: str, strategy: str, workdir: str, hold: bool, fields: dict[str, Any], environment: dict[str, str], folder: str
) -> None:
  os.environ.update(environment)
  os.chdir(folder)
  leases.RENEW, leases.PATIENCE = 0.3, 2.0  # so that no test waits long for a killed run
  out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(out, 1)
  os.dup2(out, 2)
  sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
  if hold:
    with signals.Requests():
      print("holding")
      while True:
        time.sleep(0.1)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # the same programs start many times
  jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/meshwright/tests").expanduser()))
  with command_line.bad_input_ends_the_program():
    train.main(config(strategy, **fields | {"compilation_cache_dir": "auto"}), workdir)


class Job:
  """A run of a strategy in a workdir, which starts immediately. `fields` change the tiny preset.

  With `hold`, it handles signals as a run does, but trains nothing and never ends. With `machine`, an environment and a
  folder to run in, the workdir may be in a bucket.
  """

  def __init__(
    self, strategy: str, workdir: Path | str, log: Path, hold: bool = False,
    machine: tuple[dict[str, str], Path] | None = None, **fields: Any,
  ):  # fmt: skip
    self.log = log
    self._start = len(self.log_text())  # several jobs may share a log
    environment, folder = machine or ({}, Path.cwd())
    arguments = (str(log), strategy, str(workdir), hold, fields, environment, str(folder))
    self.process = _context.Process(target=_run, args=arguments)
    self.process.start()

  def log_text(self) -> str:
    return self.log.read_text() if self.log.exists() else ""

  @property
  def output(self) -> str:
    """What this run has printed so far."""
    return self.log_text()[self._start :]

  def wait_for(self, expected: str) -> None:
    """Waits until the run has printed `expected`."""
    self.wait_until(lambda: expected in self.output, f"printed {expected!r}")

  def wait_until(self, happened: Callable[[], bool], what: str) -> None:
    """Waits until something has happened, such as that a file is there. `what`: the same in words, after "it"."""
    until = time.monotonic() + SECONDS
    while not happened():
      assert self.process.is_alive(), f"the run ended before it {what}:\n{self.output}"
      assert time.monotonic() < until, f"the run has not in {SECONDS} s {what}:\n{self.output}"
      time.sleep(0.01)

  def send(self, number: signal.Signals) -> None:
    os.kill(self.process.pid, number)

  def wait(self) -> int:
    """Waits for the end. Returns the exit status, or minus the number of the signal that ended the run."""
    self.process.join(SECONDS)
    assert self.process.exitcode is not None, f"the run did not end in {SECONDS} s:\n{self.output}"
    return self.process.exitcode


def flags(name: str, workdir: Path, **fields: object) -> list[str]:
  """The flags of train.py for a run of TINY, to start with tools.launch."""
  given = [f"--config.{field.replace('__', '.')}={value}" for field, value in (TINY | fields).items()]
  return [f"--config={ROOT}/configs/{name}.py:tiny", f"--workdir={workdir}", *given]
