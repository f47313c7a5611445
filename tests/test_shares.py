"""Shares of `full`: together they run all but some cases of large tables, and each what must run on both stacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import shares
import skips

TESTS = """
import pytest

NAMES = ["single", "fsdp", "two_d", "pipeline"]
VARIANTS = ["tokens", "small", "text", "adapters", "images", "gather", "remat", "deep", "bias", "devices"]

@pytest.mark.full
@pytest.mark.parametrize("name, variant", [(name, variant) for name in NAMES for variant in VARIANTS])
def test_of_a_table(name, variant):
  if name == "fsdp":
    pytest.skip("no compiler")

@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_of_the_same_cases(name, variant):
  pass

@pytest.mark.full
@pytest.mark.parametrize("other", [object(), {"a": 1}, {"a": 2}, print])
def test_of_other_values(other):
  pass

@pytest.mark.full
@pytest.mark.both_stacks
@pytest.mark.parametrize("name", NAMES)
def test_of_both(name):
  pass

@pytest.mark.full
def test_without_cases():
  pass

@pytest.mark.parametrize("name", NAMES)
def test_of_make_test(name):
  pass
"""
BOTH = {*(f"test_of_{of}[{name}]" for of in ("both", "make_test") for name in ("single", "fsdp", "two_d", "pipeline"))}


def passed(folder: Path, workers: int, share: str) -> set[str]:
  """The tests that a share passes. It writes what it skips and leaves to `folder/share`."""
  (folder / "test_some.py").write_text(TESTS)
  (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  full\n  both_stacks\n")
  environment = os.environ | {shares.SHARE: share, skips.FILE: str(folder / f"share{share}")}
  environment["PYTHONPATH"] = str(Path(__file__).parent)
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-rp", "-p", "shares", "-p", "skips", "-n", str(workers)],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return {line.partition("::")[2] for line in done.stdout.splitlines() if line.startswith("PASSED")}


@pytest.mark.full
@pytest.mark.parametrize("workers", [2, 0])
def test_two_shares_run_every_test_once_but_some_cases_of_large_tables(
  workers: int, tmp_path: Path, capsys: pytest.CaptureFixture
):
  first, second, whole = (passed(tmp_path, workers, share) for share in ("1", "2", ""))
  assert first & second == BOTH
  of = lambda test, passing: {case.partition("[")[2] for case in passing if case.startswith(test)}
  nowhere = whole - first - second
  table, same = "test_of_a_table", "test_of_the_same_cases"
  assert nowhere == {case for case in nowhere if case.startswith((table, same))}
  for passing in (first, second, nowhere):
    assert of(table, passing) <= of(same, passing)  # so the tests of a case share its program
  for name in ("single", "fsdp", "two_d", "pipeline"):
    count = [sum(case.startswith(name) for case in of(same, passing)) for passing in (first, second, nowhere)]
    assert sum(count) == 10
    assert count[0] >= 5
  left = len(of(same, nowhere)) + len(of(table, nowhere) | {case for case in of(same, nowhere) if "fsdp" in case})
  # What one share skips and the other leaves ran nowhere, too.
  skips.main([str(tmp_path / "share1"), str(tmp_path / "share2")])
  skipped = 10 - sum("fsdp" in case for case in of(same, nowhere))
  said = capsys.readouterr().out
  assert said.startswith(f"{left + skipped} tests ran nowhere:\n")
  assert f"{skipped}  no compiler\n        test_some.py: {skipped}\n" in said
  assert f"{left}  is in neither share; make test-all runs it\n        test_some.py: {left}\n" in said
