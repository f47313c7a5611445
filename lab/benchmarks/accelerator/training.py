"""Runs train.py as a user does, and ends it in time. For the steps that train."""

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import ConfigError
from lab.benchmarks.pages import ROOT
from reporting.metrics import read

TO_STOP = 60  # seconds that a run may take to save its checkpoint
TRAIN = (sys.executable, "train.py")


def train(
  arguments: Sequence[str], workdir: Path, seconds: float, program: Sequence[str] = TRAIN
) -> list[dict[str, Any]]:
  """Runs `train.py ARGUMENTS --workdir=WORKDIR` and returns the lines of its metrics.jsonl.

  After `seconds` it is asked to stop, as by SIGTERM from a scheduler: it saves a checkpoint, and the same command goes
  on from there. Raises ConfigError, with the program's own last line, if it fails.
  """
  with tempfile.TemporaryFile("w+") as errors:
    running = subprocess.Popen([*program, *arguments, f"--workdir={workdir}"], cwd=ROOT, stderr=errors)
    try:
      with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(max(0.0, seconds))
      if running.poll() is None:
        running.send_signal(signal.SIGTERM)
        running.wait(TO_STOP)
    except subprocess.TimeoutExpired:
      raise ConfigError(f"train.py did not stop within {TO_STOP} s of a SIGTERM") from None
    finally:
      if running.poll() is None:
        running.kill()
        running.wait()
    errors.seek(0)
    said = errors.read().strip().splitlines()
  if running.returncode:
    raise ConfigError(f"train.py ended with status {running.returncode}: {said[-1] if said else 'no message'}")
  return read(workdir / "metrics.jsonl")


def last(lines: Sequence[dict[str, Any]], split: str) -> dict[str, Any] | None:
  """The last line of a split ("train" or "validation")."""
  return next((line for line in reversed(lines) if line["split"] == split), None)
