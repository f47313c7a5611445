"""Skipped tests: collected from every worker, listed by reason, and a failure where nothing may be skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import skips

TESTS = """
import pytest

def test_that_runs():
  pass

@pytest.mark.parametrize("n", [1, 2])
def test_that_needs(n):
  pytest.skip("torch is not installed")

@pytest.fixture
def browser():
  pytest.importorskip("no_such_module", reason="no browser found")

def test_of_a_page(browser):
  pass

@pytest.mark.xfail(reason="known")
def test_that_is_known_to_fail():
  assert False
"""
MODULE = (
  "import pytest\n\npytest.importorskip('no_such_module', reason='nbclient runs it')\n\ndef test_one():\n  pass\n"
)
EXPECTED = {
  "test_some.py::test_that_needs[1]": "torch is not installed",
  "test_some.py::test_that_needs[2]": "torch is not installed",
  "test_some.py::test_of_a_page": "no browser found",
  "test_whole.py": "nbclient runs it",
}


def run(folder: Path, workers: int, **environment: str) -> subprocess.CompletedProcess[str]:
  (folder / "test_some.py").write_text(TESTS)
  (folder / "test_whole.py").write_text(MODULE)
  (folder / "pytest.ini").write_text("[pytest]\n")
  given = {name: value for name, value in os.environ.items() if name not in (skips.FILE, skips.STRICT)}
  return subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-p", "skips", "-n", str(workers)],
    cwd=folder,
    env=given | {"PYTHONPATH": str(Path(__file__).parent)} | environment,
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_skipped_tests_are_written_and_fail_the_run_if_asked(workers: int, tmp_path: Path):
  file = tmp_path / "skipped"
  done = run(tmp_path, workers, **{skips.FILE: str(file), skips.STRICT: "1"})
  assert done.returncode == 1
  assert "1 passed" in done.stdout  # everything else runs as ever
  for test, reason in EXPECTED.items():
    assert f"FAILED: {test} was skipped, but {skips.STRICT} is set: {reason}\n" in done.stdout
  assert skips.read(file) == EXPECTED


@pytest.mark.full
def test_a_run_with_skipped_tests_passes_unless_asked(tmp_path: Path):
  assert run(tmp_path, 0).returncode == run(tmp_path, 0, **{skips.STRICT: ""}).returncode == 0


def test_the_list_has_what_ran_nowhere_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture):
  """A test that one stack skips and another runs is not listed."""
  one, other, none = (tmp_path / name for name in ("one", "other", "none"))
  skips.add(one, EXPECTED | {"test_old.py::test_of_one_stack": "needs a newer jax"})
  skips.add(other, EXPECTED)
  skips.add(none, {})
  skips.main([str(one), str(other)])
  assert capsys.readouterr().out.splitlines() == [
    "4 tests ran nowhere:",
    "   2  torch is not installed",
    "        test_some.py: 2",
    "   1  nbclient runs it",
    "        test_whole.py: 1",
    "   1  no browser found",
    "        test_some.py: 1",
  ]
  skips.main([str(one), str(none)])
  assert capsys.readouterr().out == "every test ran\n"
