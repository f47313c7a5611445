"""The budget of programs: counted in every worker, printed, and too many fail the run of `make test` alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import in_full

TESTS = """
import jax

def test_that_compiles():
  for factor in (2.0, 3.0):
    jax.jit(lambda x: factor * x).lower(1.0).compile()

def test_that_compiles_in_another_worker():
  jax.jit(lambda x: x + 1.0).lower(1.0).compile()

def test_without_a_program():
  pass
"""


@pytest.mark.parametrize(
  "limit, selection, workers, status",
  in_full([(2, "not full", 2, 1), (3, "not full", 2, 0), (2, "not full", 0, 1), (2, "", 0, 0)], (2, "not full", 0, 1)),
)
def test_too_many_programs_fail_make_test(limit: int, selection: str, workers: int, status: int, tmp_path: Path):
  (tmp_path / "test_two.py").write_text(TESTS)
  (tmp_path / "pytest.ini").write_text(f"[pytest]\ntest_programs = {limit}\nmarkers = full\n")
  options = ["-q", "-p", "budget", "-n", str(workers), "-m", selection]
  done = subprocess.run(
    [sys.executable, "-m", "pytest", *options],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == status, done.stdout + done.stderr
  assert "3 passed" in done.stdout
  assert re.search(r" 3 programs, .* all$", done.stdout, re.MULTILINE)
  assert re.search(r" 2 programs, .*test_two.py::test_that_compiles$", done.stdout, re.MULTILINE)
  assert (f"3 programs are more than test_programs={limit}" in done.stdout) == (status == 1)
