"""`tools.benchmark` finds every measurement."""

import importlib
import sys

import pytest

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
