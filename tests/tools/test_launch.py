"""tools.launch leaves no process behind. tests/runtime/test_processes.py runs whole jobs with it."""

import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import one_sentence

from tools import attempt, launch


class Spawned:
  """Stands in for subprocess.Popen. Starts real processes, and does `instead` or `after` at the second one."""

  def __init__(self, instead: Any = None, after: Any = None):
    self.instead, self.after, self.jobs = instead, after, []
    self.popen = subprocess.Popen

  def __call__(self, *arguments: Any, **options: Any) -> subprocess.Popen:
    second = len(self.jobs) == 1
    if second and self.instead:
      self.instead()
    self.jobs.append(self.popen(*arguments, **options))
    if second and self.after:
      self.after()
    return self.jobs[-1]

  def require_all_gone(self, count: int) -> None:
    assert len(self.jobs) == count
    for job in self.jobs:
      assert job.returncode is not None
      with pytest.raises(ProcessLookupError):
        os.kill(job.pid, 0)


@pytest.fixture
def program(tmp_path: Path) -> Path:
  (tmp_path / "program.py").write_text("import time; time.sleep(60)")
  return tmp_path / "program.py"


def test_a_process_that_cannot_be_started_ends_the_others(program: Path, monkeypatch: pytest.MonkeyPatch):
  def fail() -> None:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

  spawned, before = Spawned(instead=fail), signal.getsignal(signal.SIGTERM)
  monkeypatch.setattr(attempt.subprocess, "Popen", spawned)
  with one_sentence("process 1 cannot be started", "temporarily unavailable", "--processes"):
    launch.launch(3, 1, [], program)
  spawned.require_all_gone(1)
  assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_all_are_started_ends_those_that_are(
  number: signal.Signals, program: Path, monkeypatch: pytest.MonkeyPatch
):
  spawned = Spawned(after=lambda: signal.raise_signal(number))  # before `launch` knows the second process
  monkeypatch.setattr(attempt.subprocess, "Popen", spawned)
  assert launch.launch(3, 1, [], program) == 128 + number
  spawned.require_all_gone(2)
