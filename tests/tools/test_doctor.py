"""tools.doctor says whether a machine is fit. tests/runtime/test_checkup.py has the kinds of problems."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, one_sentence

from errors import ConfigError
from runtime.checkup import Check
from tools import doctor


def test_a_problem_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
  monkeypatch.setattr(doctor, "checks", lambda *_: [Check("one", lambda: "fine")])
  doctor.main([])
  assert capsys.readouterr().out == "ok       one         fine\n"

  def refuses() -> str:
    raise ConfigError("x=1 is wrong; use 2")

  monkeypatch.setattr(doctor, "checks", lambda *_: [Check("one", refuses), Check("two", lambda: "fine")])
  with pytest.raises(SystemExit) as ended:
    doctor.main([])
  assert ended.value.code == 1
  assert capsys.readouterr().out == "problem  one         x=1 is wrong; use 2\nok       two         fine\n"


def test_the_lock_is_read_for_this_python():
  assert doctor.locked()["jax"] == importlib.metadata.version("jax")
  assert doctor.packages().startswith(f"python {sys.version_info.major}.{sys.version_info.minor}.")


@pytest.mark.full
def test_this_machine_is_fit(tmp_path: Path):
  command = [sys.executable, "-m", "tools.doctor", f"--workdir={tmp_path}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
  assert done.returncode == 0, done.stdout + done.stderr
  about = re.findall(r"^(?:ok|warning) +(\w+) ", done.stdout, re.MULTILINE)
  assert about == [check.about for check in doctor.checks("", "")]
  assert "a tiny model has the loss" in done.stdout
  assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("loss", [5.0, float("nan")])
def test_a_step_with_another_loss_is_a_problem(loss: float, monkeypatch: pytest.MonkeyPatch):
  """Weights of zero make every token equally likely, so the loss is known."""
  fake = SimpleNamespace(
    program=SimpleNamespace(fields=dict), abstract_state=dict, state_sharding=None, shard=lambda *_: {},
    train_step=lambda *_: ({}, {"loss": loss}),
  )  # fmt: skip
  monkeypatch.setattr(doctor.strategies, "create", lambda *_: fake)
  with one_sentence(f"has the loss {loss:.4f}, not 5.5452; do not train here"):
    doctor.step()
