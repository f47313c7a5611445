"""`tools.benchmark` finds every measurement, and its old name says what it is called now."""

import importlib
import subprocess
import sys

import pytest
from helpers import ROOT

from tools import benchmark


def test_every_measurement_can_be_started():
  found = benchmark.measurements()
  assert {"throughput", "accelerator", "predictions", "input_pipeline"} <= found.keys()
  for name, (module, about) in found.items():
    assert callable(importlib.import_module(module).main), name
    assert about.endswith("."), name


def test_an_unknown_measurement_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  monkeypatch.setattr(sys, "argv", ["benchmark", "thruput"])
  with pytest.raises(SystemExit) as ended:
    benchmark.main()
  assert ended.value.code == 2
  assert "measurement='thruput'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["throughput", "accelerator"])
def test_the_old_name_says_the_new_one(name: str):
  done = subprocess.run(
    [sys.executable, "-m", f"benchmarks.{name}", "--rounds=2"], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 2
  assert done.stderr == f"error: benchmarks is lab/benchmarks now; run python -m tools.benchmark {name}\n"
