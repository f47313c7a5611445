"""What holds for the programs of TPUs and GPUs alike, compiled without either.

`make test-topology` installs the compilers. test_topology.py and test_gpu_topology.py test what differs between them.
"""

import importlib.util

import pytest
from golden import make_explain as golden
from helpers import holds_all_logits

from analysis import predict
from analysis.case import Case
from analysis.compiled import CompiledStep, compile_step
from analysis.topology import machine_of
from configs import base
from runtime.devices import has_gpu_compiler
from tools import explain as tool

pytestmark = pytest.mark.full
no_tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
no_gpu = pytest.mark.skipif(not has_gpu_compiler(), reason="the GPU compiler is not installed")
TOPOLOGIES = [pytest.param(golden.SLICE, marks=no_tpu), pytest.param("h100:1x8", marks=no_gpu)]


def compiled(topology: str, name: str, fields: dict[str, object]) -> tuple[Case, CompiledStep]:
  """The compiled step of a strategy, and what predictions of it start from."""
  config, where = base.get_config("tiny", name), machine_of(topology)
  config.update_from_flattened_dict(golden.FIELDS | golden.TPU_FIELDS | fields)
  runner = tool.create(config, where)
  return Case.of(runner, config.batch_size, where.platform), compile_step(runner, config.batch_size)


@pytest.mark.parametrize("name", ["fsdp", "two_d", "pipeline"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_step_holds_the_logits_of_all_tokens(topology: str, name: str):
  """In chunks of 64 tokens; a loss that is not in chunks shows that this test would see them."""
  sizes = {"model.vocab_size": 1000, "model.seq_len": 192}
  found = {chunk: compiled(topology, name, sizes | {"model.loss_chunk": chunk}) for chunk in (64, 0)}
  assert {chunk: holds_all_logits(*step) for chunk, step in found.items()} == {64: False, 0: True}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_dots_keeps_the_results_of_attention_kernels(topology: str):
  """So the backward pass does not run the kernel of the forward pass again, as with remat "full"."""
  flops = {}
  for remat in ("dots", "full"):
    case, step = compiled(topology, "fsdp", {"model.remat": remat})
    flops[remat] = step.flops()
    assert flops[remat] == round(predict.flops(case))
  assert flops["dots"] < flops["full"]
