"""Commands that have another name now say so. A fork has no old names, so tools.fork leaves this file out."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize("name", ["throughput", "accelerator"])
def test_the_old_name_says_the_new_one(name: str):
  done = subprocess.run(
    [sys.executable, "-m", f"benchmarks.{name}", "--rounds=2"], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 2
  assert done.stderr == f"error: benchmarks is lab/benchmarks now; run python -m tools.benchmark {name}\n"
