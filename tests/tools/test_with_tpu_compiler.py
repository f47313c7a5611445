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
@pytest.mark.parametrize(
  "program",
  [
    ["-c", "from configs import base; from training import runtime; start_jax(base.get_config('tiny', 'fsdp'))"],
    ["-m", "tools.plan", CONFIG, SLICE, "--config.batch_size=32", "--strategies=fsdp", "--best=1", "--compile"],
  ],
)
def test_a_machine_without_tpus_starts_in_silence(program: list[str]):
  """Where libtpu is installed it looks for TPUs, and reports in many lines that there are none."""
  free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  done = subprocess.run([sys.executable, *program], cwd=ROOT, env=free, capture_output=True, text=True, timeout=100)
  assert (done.returncode, done.stderr) == (0, "")


def test_what_plan_predicts_the_compiler_confirms(capsys: pytest.CaptureFixture):
  sizes = {"width": 1024, "heads": 8, "kv_heads": 8, "mlp_width": 2816, "depth": 4, "seq_len": 512, "vocab_size": 8192}
  fields = [f"--config.model.{name}={size}" for name, size in sizes.items()]
  asked = command_line_of(
    plan.define, CONFIG, SLICE, *fields, "--config.batch_size=32", "--strategies=fsdp", "--best=1", "--compile"
  )
  plan.main(asked)
  said = capsys.readouterr().out.split("compiled\n")[1]
  size, time = r"([\d.,]+ [GMk]?B)", r"[\d.,]+ [mµ]s"
  found = re.fullmatch(rf" 1  {size} \(predicted {size}\): fits, at least {time} a step \(\w+ binds\)\n", said)
  assert found, said
  theirs, ours = (float(text.split()[0]) * {"GB": 1e3, "MB": 1}[text.split()[1]] for text in found.groups())
  assert ours == pytest.approx(theirs, rel=0.15)


def test_explain_says_what_would_make_a_step_fit(capsys: pytest.CaptureFixture):
  """2.1 B parameters on each device are 25 GB with their optimizer's state; split over four they fit."""
  large = ("vocab_size=262144", "width=4096", "heads=32", "kv_heads=32", "depth=1")
  asked = command_line_of(
    explain.define, CONFIG.replace("fsdp", "data_parallel"), SLICE, *(f"--config.model.{field}" for field in large)
  )
  explain.main(asked.config, asked)
  text = capsys.readouterr().out
  assert "does not fit into the 17.18 GB of a device" in text
  assert "strategy=fsdp would fit" in text
  assert "what is sent is not known, since the compiler refused the step" in text
  assert "binds" not in text
