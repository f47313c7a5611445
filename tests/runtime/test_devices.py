"""How a run starts JAX: the memory settings of CPUs and of GPUs, and where JAX runs already."""

import os
import subprocess
import sys

import jax
import pytest
from helpers import ROOT, config, one_sentence

from runtime import devices


@pytest.mark.parametrize(
  "platforms, plugin, device, expected",
  [
    (None, False, False, True),
    (None, True, True, False),
    ("cuda", True, True, False),
    ("cpu", True, True, True),  # asked to leave the accelerator alone
    ("", True, False, True),  # a compiler alone
    ("", False, True, True),  # a GPU that jax cannot drive
  ],
)
@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_only_cpus_keep_freed_memory_and_only_gpus_get_a_larger_share(
  kind: str, platforms: str | None, plugin: bool, device: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
):
  found = {"_has_tpus": False, "_has_gpus": False, "_has_tpu_compiler": False, "has_gpu_compiler": False}
  found |= {f"_has_{kind}s": device, "has_gpu_compiler" if kind == "gpu" else "_has_tpu_compiler": plugin}
  for name, value in found.items():
    monkeypatch.setattr(devices, name, lambda value=value: value)
  kept = []
  monkeypatch.setattr(devices, "_keep_freed_memory", lambda: kept.append(True))
  monkeypatch.setattr(devices, "_has_compiler_alone", lambda: False)
  order = []  # a process of several knows its GPUs once it has joined the others, and JAX takes memory as it starts
  monkeypatch.setattr(devices.processes, "join", lambda _: order.append("join"))
  monkeypatch.setattr(devices.device_memory, "ask", lambda: order.append("ask"))
  monkeypatch.setattr(jax, "devices", lambda start=jax.devices: order.append("start") or start())
  before = jax.config.jax_platforms
  try:
    jax.config.update("jax_platforms", platforms)
    devices.start_jax(config())
  finally:
    jax.config.update("jax_platforms", before)
  assert kept == [True] * expected
  assert order == (["join", "ask", "start"] if kind == "gpu" and not expected else ["join", "start"])


def test_too_late_to_simulate_another_number_of_devices_is_one_sentence():
  """As in a notebook that has used JAX: here with the eight devices of the tests."""
  with one_sentence("simulated_devices=4", "runs already", "set it to 8", "jax_num_cpu_devices"):
    devices.start_jax(config(simulated_devices=4))


def test_as_many_devices_as_jax_runs_with_already_are_used():
  """Whatever gave them: here JAX starts with three by a flag of XLA."""
  program = (
    "import jax; there = jax.devices(); from configs import base; from runtime import devices\n"
    "config = base.get_config('tiny'); config.simulated_devices = 3; config.compilation_cache_dir = ''\n"
    "assert devices.start_jax(config) == there and len(there) == 3"
  )
  flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
  subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | flags, check=True)
