"""Products in float8 are those of a single device under every strategy, and only products of blocks are in float8.

In float32, one rounding to float8 that flips moves losses by 4e-3 in 20 steps, so no tolerance there both holds and
finds errors. In float64 nothing else rounds. A scale of a device's own numbers shows as 1e-3 at once.
"""

import collections
import dataclasses
import functools
import importlib.util
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import FIELDS, in_float64
from helpers import (
  PARITY,
  assert_trees_close,
  config,
  each_once,
  equations,
  in_full,
  initial_state,
  random_batch,
  strategy,
)
from variants import BATCH, MICROBATCHES, VARIANTS, make_program

import strategies
from errors import ConfigError
from lab.analysis import compiled, predict, theory
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep
from lab.analysis.topology import machine_of
from models.ops import float8
from runtime.devices import has_gpu_compiler
from runtime.hardware import CHIPS, chip
from strategies.execution.choice import MULTIPLY_FLOAT8, on_device
from strategies.execution.constraints import Constraints
from training import settings

IN_FLOAT64 = 1e-12
SCALARS = 512  # bytes of losses, counts and norms
STRATEGIES = [name for name in strategies.names() if name != "single"]
KINDS = ["text", "text, accumulated, remat", "documents with prompts, tied, remat dots", "experts"]
OTHERS = ["adapters, accumulated, remat", "recurrence, documents, saved by name"]
STAGED = [name for name in STRATEGIES if strategies.layout_of(name).layers]
FAR = (
  "zero1",
  "zero2",
  "long_context",
  "expert_fsdp",
  "three_d",
  "data_parallel",
  "expert",
)  # another strategy sends as they do
CASES = each_once([name for name in STRATEGIES if name not in FAR], KINDS, ("pipeline", "text"))
CASES += [pytest.param(name, kind, marks=pytest.mark.full) for i, name in enumerate(FAR) for kind in KINDS[i % 2 :: 2]]
CASES += [pytest.param(name, OTHERS[i % 2], marks=pytest.mark.full) for i, name in enumerate(STRATEGIES)]


@functools.cache
def gradients(name: str, variant: str, parts: int = 1, products: str = "float8", **fields: Any) -> tuple[float, Any]:
  """The loss and the gradients of a step. `parts` multiplies those in which the variant runs a batch."""
  fields |= {"accumulation": VARIANTS[variant].get("accumulation", 1) * parts} if parts > 1 else {}
  program = make_program(variant, model__products=products, **fields)
  runner = strategy(name, program, 1 if name == "single" else 8, **MICROBATCHES)
  batch = runner.shard(random_batch(program, BATCH), BATCH)
  metrics, found = jax.device_get(runner.gradients(initial_state(runner), batch))
  return float(metrics["loss"]), found


def as_on_one_device(name: str, variant: str, **fields: Any) -> tuple[float, Any]:
  """What a single device finds with as many parts as a strategy has: a microbatch has scales of its own."""
  return gradients("single", variant, MICROBATCHES["pipeline__microbatches"] if name in STAGED else 1, **fields)


@pytest.mark.parametrize("name, variant", CASES)
def test_gradients_in_float8_equal_those_of_a_single_device(name: str, variant: str):
  with in_float64():
    (loss, found), (expected, alone) = gradients(name, variant, **FIELDS), as_on_one_device(name, variant, **FIELDS)
  assert loss == pytest.approx(expected, rel=IN_FLOAT64)
  assert_trees_close(found, alone, IN_FLOAT64)


@pytest.mark.full
def test_a_scale_of_a_devices_own_numbers_would_be_seen(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(Constraints, "largest", lambda self, x, *dims: x)
  variant = "text, accumulated, remat"
  with in_float64():
    found = gradients.__wrapped__("context", variant, **FIELDS)[1]
    with pytest.raises(AssertionError, match="arrays differ: "):
      assert_trees_close(found, as_on_one_device("context", variant, **FIELDS)[1], 1e-4)


@pytest.mark.parametrize("name", in_full(["fsdp", "tensor_parallel", "context", "hsdp"], "fsdp"))
@pytest.mark.parametrize("products, tolerance", [("float8", 2e-2), pytest.param("float8_gathers", PARITY)])
def test_a_step_in_float32_is_near_that_of_a_single_device(name: str, products: str, tolerance: float):
  (loss, found), (expected, alone) = (
    gradients(name, "text", products=products),
    gradients("single", "text", 1, products),
  )
  assert loss == pytest.approx(expected, rel=PARITY)
  assert_trees_close(found, alone, tolerance)


def products_of(program: Any) -> collections.Counter[tuple[str, str]]:
  """How many products of a step have operands of which dtypes."""
  state = program.abstract_state()
  batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, random_batch(program, BATCH)))
  jaxpr = jax.make_jaxpr(program.gradient_sums)(state.params, batch, state.step)
  operands = (
    [x.aval.dtype.name for x in one.invars] for one in equations(jaxpr.jaxpr) if "dot_general" in str(one.primitive)
  )
  return collections.Counter(map(tuple, operands))


def test_products_of_blocks_multiply_float8_numbers_and_no_others_do():
  found = products_of(make_program("text", model__products="float8", model__dtype="bfloat16"))
  small, wide = "float8_e4m3fn", "float8_e5m2"
  weights = 7  # of a block, which the program has once
  assert found[small, small] == found[wide, small] == found[small, wide] == weights
  assert {pair for pair in found if any("float8" in name for name in pair)} == {
    (small, small), (wide, small), (small, wide)
  }  # fmt: skip
  plain = products_of(make_program("text", model__dtype="bfloat16"))
  assert sum(found.values()) == sum(plain.values())
  assert set(plain) == {pair for pair in found if "float8" not in pair[0] + pair[1]}


@pytest.mark.parametrize("form, top", [(float8.E4M3, 448), (float8.E5M2, 57344)])
def test_a_scale_is_the_least_power_of_two_that_fits_and_what_is_not_finite_stays_so(form: Any, top: int):
  largest = np.concatenate([np.geomspace(1e-25, 1e25, 997), top * 2.0 ** np.arange(-40, 40), [np.nextafter(top, 1e9)]])
  largest = np.concatenate([largest, [0, np.inf, np.nan]]).astype(np.float32)

  @jax.jit
  def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = float8.inverse_scale(x, form)
    return inverse, float8.in_float8(x, inverse, form).astype(jnp.float32)

  inverse, found = map(np.asarray, scaled(largest))
  assert (np.frexp(inverse)[0] == 0.5).all()  # powers of two
  assert (largest[:-3] / inverse[:-3] <= top).all()
  assert (largest[:-3] / inverse[:-3] > top / 2).all()
  assert inverse[-3] == 1
  assert np.isfinite(found).tolist() == [True] * (len(found) - 2) + [False] * 2


def test_weights_of_blocks_are_gathered_in_one_byte_each():
  """Beside them only maxima are sent: 4 bytes for each of 8 products of a block, and for each of its 7 weights."""
  runner = strategy("fsdp", make_program("text", model__products="float8"))
  case, step = Case.of(runner, BATCH, "cpu"), compiled.compile_step(runner, BATCH)
  sent: collections.Counter = collections.Counter()
  for one in step.collectives():
    sent[one.kind] += one.sent_in_step
  wanted: collections.Counter = collections.Counter()
  for row in theory.sent(case):
    wanted[row.kind] += row.bytes
  depth = runner.program.sizes.depth
  assert sent["all-gather"] == wanted["all-gather"]
  assert 0 < sent["all-reduce"] - wanted["all-reduce"] <= 2 * 4 * (8 + 7) * depth + SCALARS
  plain = Case.of(strategy("fsdp", make_program("text")), BATCH, "cpu")
  blocks = lambda case: next(row.bytes - row.edges for row in theory.sent(case) if row.kind == "all-gather")
  assert 4 * blocks(case) == blocks(plain)  # a number of float32 has four bytes


@pytest.mark.parametrize("kind, platform", [("TPU v5 lite", "tpu"), ("NVIDIA A100-SXM4-80GB", "gpu")])
def test_devices_that_gain_nothing_refuse_and_say_what_to_use(kind: str, platform: str):
  sizes = make_program("text", model__products="float8", model__unroll="scan").sizes
  device: Any = types.SimpleNamespace(device_kind=kind, platform=platform)
  with pytest.raises(ConfigError, match=f"gains nothing on {kind}, .*; use 'float8_gathers'"):
    on_device(sizes, strategies.layout_of("single"), device)
  gathers = dataclasses.replace(sizes, products="float8_gathers")
  assert on_device(gathers, strategies.layout_of("single"), device) == gathers


def test_the_devices_that_multiply_float8_are_those_with_a_peak():
  known = {kind for kind, figures in CHIPS.items() if figures and figures.float8}
  assert known == {kind for kind, figures in CHIPS.items() if figures and kind.startswith(MULTIPLY_FLOAT8)}


@pytest.mark.parametrize("name", ["nvfp4", "MXFP8"])
def test_formats_with_scales_of_blocks_are_refused_by_name(name: str):
  with pytest.raises(ConfigError, match=f"model.products='{name}' .*scale.*use 'float8'"):
    make_program("text", model__products=name)


@functools.cache
def lm_1b(products: str, topology: str = "h100:1x1", name: str = "single", size: int = 16) -> CompiledStep:
  fields = {"model__products": products, "model__unroll": "auto", "model__loss_chunk": 4096}
  asked = config(name, "lm_1b", batch_size=size, **fields)
  where = machine_of(topology, None).devices()
  return compiled.compile_step(strategies.create(asked, settings.program(asked, where[0].platform), where), size)


@pytest.mark.full
@pytest.mark.skipif(not has_gpu_compiler(), reason="the GPU compiler is not installed; make test-topology")
def test_on_gpus_every_product_of_blocks_is_a_call_for_float8_and_the_bound_is_two_thirds():
  plain, step = lm_1b("dtype"), lm_1b("float8")
  figures = chip("NVIDIA H100 80GB HBM3")
  assert figures
  bound = lambda step: max(figures.seconds(step.flops(), step.float8_flops()), step.traffic() / figures.bandwidth)
  assert step.flops() == pytest.approx(plain.flops(), rel=1e-6)
  calls = [one for computation in step.module.computations.values() for one in computation.values()]
  assert sum("__cublas$lt$matmul$f8" in one.attributes for one in calls) == 16 * 7 * 3
  assert bound(step) < 0.66 * bound(plain)


@pytest.mark.full
@pytest.mark.parametrize("topology, products", [("h100:1x8", "float8"), ("v5p:2x2x2", "float8_gathers")])
def test_accelerators_gather_weights_of_blocks_in_one_byte_each(topology: str, products: str):
  if not (has_gpu_compiler() if topology.startswith("h") else importlib.util.find_spec("libtpu")):
    pytest.skip("the compiler is not installed; make test-topology")
  asked = config("fsdp", "throughput_gpu", model__products=products, batch_size=32, model__depth=4)
  where = machine_of(topology, None).devices()
  runner = strategies.create(asked, settings.program(asked, where[0].platform), where)
  step, case = compiled.compile_step(runner, 32), Case.of(runner, 32, where[0].platform)
  sent = sum(one.sent_in_step for one in step.collectives() if one.kind == "all-gather")
  wanted = sum(row.bytes for row in theory.sent(case) if row.kind == "all-gather")
  assert sent == pytest.approx(wanted, rel=1e-3)
  assert step.float8_flops() == pytest.approx(predict.float8_flops(case), rel=1e-3)
