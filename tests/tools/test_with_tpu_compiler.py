"""The tools with the TPU compiler, but without TPUs. `make test-topology` installs the compiler."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import command_line_of

from lab.analysis.topology import machine_of
from tools import explain, plan

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/fsdp.py:tiny"
SLICE = "--topology=v5e:2x2"

no_compiler = importlib.util.find_spec("libtpu") is None
pytestmark = [
  pytest.mark.full,
  pytest.mark.skipif(no_compiler, reason="the TPU compiler is not installed; make test-topology"),
]


@pytest.mark.skipif(bool(list(Path("/dev").glob("accel*"))), reason="this machine has TPUs")
@pytest.mark.parametrize(
  "program",
  [
    [
      "-c",
      "from configs import base; from runtime.devices import start_jax; start_jax(base.get_config('tiny', 'fsdp'))",
    ],
    ["-m", "tools.plan", CONFIG, SLICE, "--config.batch_size=8", "--strategies=fsdp", "--best=1", "--compile"],
  ],
)
def test_a_machine_without_tpus_prints_nothing_about_them(program: list[str]):
  """If libtpu is installed, it looks for TPUs and prints many lines if there are none."""
  free = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  done = subprocess.run([sys.executable, *program], cwd=ROOT, env=free, capture_output=True, text=True, timeout=100)
  assert (done.returncode, done.stderr) == (0, "")


def test_the_compiler_confirms_the_plan(capsys: pytest.CaptureFixture):
  """For blocks of realistic size. Of smaller ones, more values stay on the chip than predicted (docs/evidence.md)."""
  sizes = {"width": 2048, "heads": 16, "kv_heads": 16, "mlp_width": 5632, "depth": 4, "seq_len": 1024}
  sizes |= {"vocab_size": 32_000}
  fields = [f"--config.model.{name}={size}" for name, size in sizes.items()]
  asked = command_line_of(
    plan.define, CONFIG, SLICE, *fields, "--config.batch_size=8", "--strategies=fsdp", "--best=1", "--compile"
  )
  plan.main(asked)
  said = capsys.readouterr().out.split("By the compiler:\n")[1]
  size, time = r"([\d.,]+ [GMk]?B)", r"[\d.,]+ [mµ]s"
  found = re.fullmatch(rf" 1  {size} \(predicted {size}\): fits, at least {time} a step \(\w+ binds\)\n", said)
  assert found, said
  theirs, ours = (float(text.split()[0]) * {"GB": 1e3, "MB": 1}[text.split()[1]] for text in found.groups())
  assert ours == pytest.approx(theirs, rel=0.15)


@pytest.mark.parametrize("slice_of", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_compiler_refuses_what_exceeds_the_table(slice_of: str):
  """It names the limit in GiB with two digits; libtpu 0.0.50 has 0.01 less for some kinds."""
  where = machine_of(slice_of)
  array = jax.ShapeDtypeStruct((2**38,), np.uint8, sharding=jax.sharding.SingleDeviceSharding(where.devices()[0]))
  with pytest.raises(jax.errors.JaxRuntimeError) as refused:
    jax.jit(lambda x: x + 1).lower(array).compile()
  limit = re.search(r"exceeds available HBM \(([\d.]+)G\)|of ([\d.]+)G hbm", str(refused.value))
  assert float(limit[1] or limit[2]) == pytest.approx(where.chip.memory / 2**30, abs=0.0101)


def test_explain_reports_changes_that_make_a_step_fit(capsys: pytest.CaptureFixture):
  """2.1 B parameters take 25 GB with the optimizer's state. Split over four devices they fit."""
  large = ("vocab_size=262144", "width=4096", "heads=32", "kv_heads=32", "depth=1")
  asked = command_line_of(
    explain.define, CONFIG.replace("fsdp", "data_parallel"), SLICE, *(f"--config.model.{field}" for field in large)
  )
  explain.main(asked.config, asked)
  text = capsys.readouterr().out
  assert "The step does not fit into the 16.91 GB of a device's memory that a program may use." in text
  assert re.search("It would fit with .*strategy=fsdp", text)
  assert "The compiler refused the step, so its collectives are not known." in text
  assert "binds" not in text
