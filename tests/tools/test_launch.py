"""tools.launch leaves no process behind. tests/runtime/test_processes.py runs whole jobs with it."""

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import one_sentence

from job import attempt
from tools import launch


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


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_while_the_last_process_is_started_reaches_it(
  count: int, program: Path, monkeypatch: pytest.MonkeyPatch
):
  """`Popen` has not returned then, so nobody knows the process."""
  popen, started = subprocess.Popen, []

  def spawned(*arguments: Any, **options: Any) -> subprocess.Popen:
    started.append(popen(*arguments, **options))
    if len(started) == count:
      signal.raise_signal(signal.SIGTERM)
    return started[-1]

  monkeypatch.setattr(attempt.subprocess, "Popen", spawned)
  program.write_text("import time; time.sleep(10)")
  assert launch.launch(count, 1, [], program) == 128 + signal.SIGTERM


PRINTS = """
import signal
signal.alarm(20)  # so that a test that fails ends
for _ in range(4000):
  print("x" * 50, flush=True)
"""


@pytest.mark.parametrize("why", ["Broken pipe", "No space left on device"])
def test_a_job_goes_on_if_nobody_reads_what_it_prints(
  why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  """`python -m tools.launch ... | head -1`. A process prints more than its pipe holds, and would wait for ever."""
  reader, pipe = os.pipe()
  os.close(reader)
  output = os.fdopen(pipe if why == "Broken pipe" else os.open("/dev/full", os.O_WRONLY), "w")
  monkeypatch.setattr(sys, "stdout", output)
  (tmp_path / "program.py").write_text(PRINTS)
  assert launch.launch(1, 1, [], tmp_path / "program.py") == 0
  output.close()
  assert capsys.readouterr().err.count(f"error: standard output cannot be written ({why})") == 1


def test_whatever_fails_a_process_can_go_on_printing(tmp_path: Path):
  def take(rank: int, line: str) -> None:
    raise ValueError("I/O operation on closed file")

  (tmp_path / "program.py").write_text(PRINTS)
  with attempt.Forwarded() as signals:
    started = attempt.Attempt(attempt.Here(1, 1), [0], [], tmp_path / "program.py", take, signals)
    with started:
      assert started.ended(30) == 0
    assert started.status(0) == 0


FORKS = """
import os, sys, time
child = os.fork()
if not child:
  if "--leaves" in sys.argv:
    os.setsid()
  time.sleep(20)
print(child, flush=True)
if "--leaves" not in sys.argv:
  time.sleep(60)
"""


def is_alive(pid: int) -> bool:
  with contextlib.suppress(FileNotFoundError):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("leaves", [False, True])
def test_what_a_process_starts_does_not_keep_the_job(leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """A child has its output. It is ended with it; one that has left its session is not waited for."""
  monkeypatch.setattr(attempt, "SECONDS_TO_READ", 0.1)
  (tmp_path / "program.py").write_text(FORKS)
  lines: queue.SimpleQueue[str] = queue.SimpleQueue()
  flags, take = ["--leaves"] * leaves, lambda rank, line: lines.put(line)
  with attempt.Forwarded() as signals:
    with attempt.Attempt(attempt.Here(1, 1), [0], flags, tmp_path / "program.py", take, signals) as started:
      child = int(lines.get(timeout=30))
      assert not leaves or started.ended(30) == 0
  if leaves:
    os.kill(child, signal.SIGKILL)
  else:
    until = time.monotonic() + 10
    while is_alive(child):
      assert time.monotonic() < until
      time.sleep(0.01)
