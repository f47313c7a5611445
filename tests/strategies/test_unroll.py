"""Blocks that run one after another, without a loop: the same gradients, the same bytes, and no more memory."""

import functools
from typing import Any

import jax
import pytest
from helpers import PARITY, assert_trees_close, config, in_full, initial_state, random_batch, strategy
from variants import make_program

import strategies
from lab.analysis.compiled import CompiledStep, compile_step
from lab.analysis.topology import machine_of
from runtime.devices import has_gpu_compiler
from training import settings

BATCH = 16
NO_STAGES = [name for name in strategies.names() if not strategies.layout_of(name).layers]


@functools.cache
def gradients(name: str, unroll: str, remat: str) -> Any:
  runner = strategy(name, make_program("text", model__unroll=unroll, model__remat=remat), 1 if name == "single" else 8)
  return jax.device_get(
    runner.gradients(initial_state(runner), runner.shard(random_batch(runner.program, BATCH), BATCH))
  )


@pytest.mark.parametrize("name", in_full(NO_STAGES, "fsdp"))
def test_gradients_without_a_loop_equal_those_of_the_loop_on_a_single_device(name: str):
  remat = ("minimal", "dots", "full")[NO_STAGES.index(name) % 3]
  assert_trees_close(gradients(name, "all", remat), gradients("single", "scan", "minimal"), PARITY)


def test_a_pipeline_keeps_the_loop_and_says_so():
  with pytest.warns(UserWarning, match="model.unroll='all' runs as 'scan', because the stages of a pipeline"):
    runner = strategy("pipeline", make_program("text", model__unroll="all"))
  assert runner.program.sizes.unroll == "scan"


@pytest.mark.full
@pytest.mark.skipif(not has_gpu_compiler(), reason="the GPU compiler is not installed; make test-topology")
def test_on_gpus_it_sends_the_same_with_less_traffic_and_memory():
  """lm_1b on eight GPUs. Weights are still gathered a block at a time: whole, they would take more than is saved."""

  def step(unroll: str) -> CompiledStep:
    asked = config("fsdp", "lm_1b", model__unroll=unroll, batch_size=64)
    where = machine_of("h100:1x8", None).devices()
    return compile_step(strategies.create(asked, settings.program(asked, "gpu"), where), 64)

  loop, plain = step("scan"), step("all")
  sent = lambda step: sum(one.sent_in_step for one in step.collectives())
  assert sent(plain) == pytest.approx(sent(loop), rel=1e-3)
  assert plain.flops() == pytest.approx(loop.flops(), rel=0.01)
  assert plain.traffic() < 0.85 * loop.traffic()
  assert plain.temporary < loop.temporary
