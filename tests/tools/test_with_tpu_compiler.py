"""The tools on TPUs that are not there, with the TPU compiler, which `make test-topology` installs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import command_line_of

from tools import explain, plan

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/fsdp.py:tiny"
SLICE = "--topology=v5e:2x2"

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed; make test-topology"
)


@pytest.mark.skipif(bool(list(Path("/dev").glob("accel*"))), reason="here are TPUs")
def test_a_machine_without_tpus_starts_in_silence():
  """Where libtpu is installed it looks for TPUs, and reports in many lines that there are none."""
  program = "from configs import base; from training import runtime; runtime.start(base.get_config('tiny', 'fsdp'))"
  free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, env=free, capture_output=True, text=True, timeout=100
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_what_plan_predicts_the_compiler_confirms(capsys: pytest.CaptureFixture):
  asked = command_line_of(plan.define, CONFIG, SLICE, "--strategies=data_parallel", "--best=1", "--compile")
  plan.main(asked)
  said = capsys.readouterr().out.split("compiled\n")[1]
  found = re.fullmatch(r" 1  ([\d.]+) GB \(predicted ([\d.]+)\): fits, at least [\d,]+ ms a step \(\w+ binds\)\n", said)
  assert found, said


def test_explain_says_what_would_make_a_step_fit(capsys: pytest.CaptureFixture):
  """2.1 B parameters on each device are 25 GB with their optimizer's state; split over four they fit."""
  large = ("vocab_size=262144", "width=4096", "heads=32", "kv_heads=32", "depth=1")
  asked = command_line_of(
    explain.define, CONFIG.replace("fsdp", "data_parallel"), SLICE, *(f"--config.model.{field}" for field in large)
  )
  explain.main(asked.config, asked)
  text = capsys.readouterr().out
  assert "does not fit into the 16.00 GB of a device" in text
  assert "strategy=fsdp would fit" in text
  assert "what is sent is not known, since the compiler refused the step" in text
  assert "binds" not in text
