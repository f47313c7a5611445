"""The command that prints the timelines of the pipeline schedules."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import one_sentence

from lab.analysis.timeline import describe
from lab.analysis.timeline import schedules as timelines
from tools import schedules


def test_the_command_prints_every_schedule(capsys: pytest.CaptureFixture):
  schedules.main(["--stages=2", "--microbatches=4", "--chunks=3"])
  printed = capsys.readouterr().out
  for name, schedule in timelines(2, 4, 3).items():
    assert describe(name, schedule) in printed


@pytest.mark.parametrize(
  "argument, parts",
  [
    ("--stages=0", ["stages=0", "at least 1"]),
    ("--microbatches=-1", ["microbatches=-1", "at least 1"]),
    ("--chunks=0", ["chunks=0", "at least 1"]),
    ("--stages=9999999999", ["stages=9999999999", "2147483648"]),
    ("--stages=4", ["microbatches=6", "multiple of stages=4", "chunks=1"]),
  ],
)
def test_a_mistake_is_one_sentence(argument: str, parts: list[str]):
  with one_sentence(*parts):
    schedules.main(["--microbatches=6", argument])


@pytest.mark.full
def test_a_mistake_on_the_command_line_ends_with_one_line():
  root = Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-m", "tools.schedules", "--stages=0"], capture_output=True, text=True, cwd=root
  )
  assert done.returncode == 2
  assert done.stderr == "error: stages=0 must be at least 1\n"
