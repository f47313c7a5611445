"""Processes that measure end when the command ends, whatever ends it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.benchmarks import rounds
from lab.benchmarks.pages import ROOT

# A process that starts another one, says both, and works for an hour.
WORKER = (
  "import os, subprocess, sys, time; from pathlib import Path; "
  "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)']); "
  "part = Path(sys.argv[1] + '.part'); part.write_text(f'{os.getpid()} {child.pid}'); part.rename(sys.argv[1]); "
  "time.sleep(3600)"
)
# What `python -m tools.benchmark throughput` does with signals, with that process in place of a measurement.
COMMAND = (
  "import sys; from lab.benchmarks import rounds, throughput; "
  "throughput.measure_or_check = lambda: rounds.run([sys.executable, '-S', '-c', *sys.argv[1:]], {}); "
  "throughput.main()"
)


def wait_for(condition, seconds: float = 60):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def is_there(process: int) -> bool:
  """Whether a process runs. One that has ended, and that nobody waits for, does not."""
  try:
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
  except OSError:
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_all_that_it_started(number: signal.Signals, tmp_path: Path):
  file = tmp_path / "processes"
  command = subprocess.Popen(
    [sys.executable, "-c", COMMAND, WORKER, str(file)], cwd=ROOT, stderr=subprocess.PIPE, text=True
  )
  try:
    wait_for(file.exists)
    started = [int(word) for word in file.read_text().split()]
    assert all(map(is_there, started))
    command.send_signal(number)
    said = command.communicate(timeout=60)[1]
    assert command.returncode == 130
    assert said.splitlines()[-1] == "stopped: the processes that measured are ended, and nothing was written"
    assert "Traceback" not in said
    assert not any(map(is_there, started))
  finally:
    command.kill()


def test_a_process_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path):
  file = tmp_path / "processes"
  found = rounds.run([sys.executable, "-S", "-c", WORKER, str(file)], {}, limit=3)
  assert found == {"error": "not finished after 3 s"}
  assert not any(is_there(int(word)) for word in file.read_text().split())


def test_nothing_is_begun_after_the_deadline():
  in_time = rounds.in_time(time.monotonic() - 1)
  assert in_time(["/no/such/program"], {}) == {"error": rounds.NO_TIME}
  soon = rounds.in_time(time.monotonic() + 0.5)
  assert soon([sys.executable, "-S", "-c", "import time; time.sleep(3600)"], {}) == {"error": rounds.NO_TIME}
  assert "cannot be started" in rounds.in_time(time.monotonic() + 60)(["/no/such/program"], {})["error"]
