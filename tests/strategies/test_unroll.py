"""Blocks that run one after another, without a loop: the same gradients.

lab/benchmarks/test_upgrade.py has their bytes and memory, from a record.
"""

import functools
import types
import warnings
from typing import Any

import jax
import pytest
from helpers import PARITY, assert_trees_close, in_full, initial_state, random_batch, strategy
from variants import make_program

import strategies
from strategies.execution.choice import UNROLLED, on_device

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


@pytest.mark.parametrize(
  "platform, devices, depth, found",
  [("gpu", 1, UNROLLED, "all"), ("gpu", 1, UNROLLED + 1, "scan"), ("gpu", 8, 2, "scan"), ("tpu", 1, 2, "scan")],
)
def test_automatically_a_gpu_alone_has_no_loop(platform: str, devices: int, depth: int, found: str):
  device: Any = types.SimpleNamespace(device_kind="NVIDIA H200", platform=platform)
  sizes = make_program("text", model__depth=depth).sizes
  layout = strategies.layout_of("data_parallel").on(data=devices)
  assert sizes.unroll == "auto"
  assert on_device(sizes, layout, device).unroll == found
  assert on_device(sizes, layout, None).unroll == "scan"


def test_a_pipeline_keeps_the_loop_and_says_so():
  with warnings.catch_warnings(action="error"):
    strategy("pipeline", make_program("text"))
  with pytest.warns(UserWarning, match="model.unroll='all' runs as 'scan', because the stages of a pipeline"):
    runner = strategy("pipeline", make_program("text", model__unroll="all"))
  assert runner.program.sizes.unroll == "scan"
