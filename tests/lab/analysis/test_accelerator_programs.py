"""What holds for the programs of TPUs and GPUs alike, compiled without either.

`make test-topology` installs the compilers. test_topology.py and test_gpu_topology.py test what differs between them.
"""

import dataclasses
import importlib.util

import pytest
from compiled_steps import holds_all_logits
from golden import make_explain as golden

from configs import base
from lab.analysis import predict
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep, compile_step
from lab.analysis.topology import machine_of
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


@pytest.mark.parametrize("name, chunk", [("two_d", 64), ("pipeline", 64), ("fsdp", 0)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_step_holds_the_logits_of_all_tokens(topology: str, name: str, chunk: int):
  """In chunks of 64 tokens; a loss that is not in chunks shows that this test would see them."""
  fields = {"model.vocab_size": 1000, "model.seq_len": 192, "model.loss_chunk": chunk}
  assert holds_all_logits(*compiled(topology, name, fields)) == (chunk == 0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_dots_keeps_the_results_of_attention_kernels(topology: str):
  """So the backward pass does not run the kernel of the forward pass again, as with remat "full".

  test_predict.py compares the prediction for "full" with what the compilers made of large models.
  """
  case, step = compiled(topology, "fsdp", {"model.remat": "dots"})
  full = dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, remat="full"))
  assert step.flops() == round(predict.flops(case)) < predict.flops(full)
