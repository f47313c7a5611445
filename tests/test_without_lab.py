"""The trainer runs when the laboratory and the commands are deleted, and so do its tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from jobs import TINY

from reporting import recorded

GONE = ("lab", "tools", "benchmarks.py", "docs", "runs", "findings")
ITS_TESTS = ("tests/strategies/test_layout.py", "tests/models/test_losses.py", "tests/training/test_program.py")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A copy of the repository without the laboratory and the commands."""
  copy = tmp_path_factory.mktemp("trainer") / "copy"
  shutil.copytree(ROOT, copy, ignore=lambda folder, names: {
    name for name in names if name.startswith(".") or name == "__pycache__" or (folder == str(ROOT) and name in GONE)
  })  # fmt: skip
  return copy


def python(trainer: Path, *arguments: str) -> None:
  """Runs Python in the copy, and fails if it fails."""
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  subprocess.run([sys.executable, *arguments], cwd=trainer, check=True, env=environment)


@pytest.mark.full
def test_it_trains_twenty_steps_and_resumes(trainer: Path, tmp_path: Path):
  fields = (f"--config.{name.replace('__', '.')}={value}" for name, value in (TINY | {"steps": 20}).items())
  command = ["train.py", "--config=configs/fsdp.py:tiny", f"--workdir={tmp_path / 'run'}", *fields]
  python(trainer, *command, "--config.stop_after=10")
  python(trainer, *command)
  events = recorded.load(tmp_path / "run").events
  assert [event["step"] for event in events if event["event"] in ("start", "end")] == [0, 10, 10, 20]


@pytest.mark.full
def test_its_tests_pass(trainer: Path):
  python(trainer, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", *ITS_TESTS)
