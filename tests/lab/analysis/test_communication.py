"""Compares what each strategy sends with the formulas: each kind of collective, over each mesh axis, byte by byte."""

import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import holds_all_logits, sent_and_wanted
from helpers import config, in_full, program, strategy
from variants import (
  ACCUMULATION,
  ADAFACTOR,
  ADAPTED,
  ADAPTERS,
  BATCH,
  DOCUMENTS,
  FAMILIES,
  MICROBATCHES,
  MUON,
  SHARED,
  fitting,
  make_program,
  runner_of,
)

import strategies
from lab.analysis import compiled, memory, predict
from lab.analysis.case import Case
from lab.analysis.host import to_host
from lab.analysis.pairs import in_pieces
from lab.analysis.weights import weights
from models.flops import palm_flops_per_example
from strategies import layout_of
from strategies.execution.mesh import make_mesh
from training.program import Program

# Numbers beside the formulas' terms: losses, counts and norms, and for some optimizers a number for each matrix.
SCALARS = 512

# Half of those of test_parity.py, whose steps the cache has then, and some of its own. The next strategy has the other
# half. Tests of a pair share its compiled step.
OWN = [pair for i, pair in enumerate(itertools.product(strategies.names(), ["text", MUON, ADAFACTOR])) if i % 2 == 0]
SPLIT = ("fsdp", "zero1", "zero2", "tensor_parallel")  # strategies of one mesh axis that split a weight
SIX = {"stage": 3, "model": 2, "replica": 3, "expert": 3, "context": 2}  # sizes of axes on six devices
HALF = [pair for i, pair in enumerate(SHARED) if i % 2 == 0 or not getattr(pair, "marks", ())]  # all of `make test`
PAIRS = [*HALF, ("single", ADAPTED), *in_full(OWN, ("tensor_parallel", MUON), ("pmap_ddp", ADAFACTOR))]


def compile_case(name: str, program: Program, batch_size: int, **fields: Any) -> tuple[Case, compiled.CompiledStep]:
  """What is predicted, and what is compiled."""
  return compile_runner(strategy(name, program, **fields), batch_size)


def compile_runner(runner: strategies.Strategy, batch_size: int) -> tuple[Case, compiled.CompiledStep]:
  return Case.of(runner, batch_size, "cpu"), compiled.compile_step(runner, batch_size)


def program_of(name: str, variant: str) -> Program:
  """That of test_parity.py, but for one pair: of such short texts, the CPU's compiler computes a product twice."""
  if (name, variant) == ("two_d", ADAPTED):
    return make_program(variant, model__seq_len=48)
  return fitting(name, variant)


@functools.cache
def compiled_at(name: str, variant: str, batch_size: int) -> tuple[Case, compiled.CompiledStep]:
  program = program_of(name, variant)
  if program == fitting(name, variant):
    return compile_runner(runner_of(name, variant), batch_size)
  return compile_case(name, program, batch_size, **MICROBATCHES)


def compiled_case(name: str, variant: str) -> tuple[Case, compiled.CompiledStep]:
  """Not a default of the cached function: the cache would tell the default from the same number that is given."""
  return compiled_at(name, variant, BATCH)


@functools.cache
def measured(name: str, variant: str) -> tuple[dict, dict]:
  return sent_and_wanted(*compiled_case(name, variant))


@pytest.mark.parametrize("name, variant", PAIRS)
def test_every_strategy_sends_what_theory_says_and_nothing_else(name: str, variant: str):
  ours, wanted = measured(name, variant)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


@pytest.mark.parametrize("name, variant", PAIRS)
def test_a_device_holds_the_state_that_is_predicted(name: str, variant: str, monkeypatch: pytest.MonkeyPatch):
  for traced in ("_saved", "_block"):  # not of the state, and slow
    monkeypatch.setattr(memory, traced, lambda *_: 0)
  case, step = compiled_case(name, variant)
  fields = program_of(name, variant).example_shapes().items()
  examples = case.batch_size / case.layout.shards("batch")
  size = {name: examples * math.prod(field.shape) * np.dtype(field.dtype).itemsize for name, field in fields}
  ids = size.pop("id")  # which a step without dropout does not need
  held = memory.of(case).state + to_host(case)[1]  # CPUs count their host's memory as their own
  # The rest are a few numbers, such as those of steps.
  assert 0 <= step.arguments - held - sum(size.values()) <= ids + 16


@pytest.mark.full
@pytest.mark.parametrize(
  "name", [name for name in strategies.names() if len(layout_of(name).mesh) > 1 or name in SPLIT]
)
def test_where_devices_divide_nothing_padding_is_all_that_is_added(name: str):
  """Six devices, and a model whose width, vocabulary and depth they do not divide. The batch has 16 examples."""
  heads = {"model__heads": 6, "model__kv_heads": 6, "model__head_dim": 4, "model__mlp_width": 60, "model__seq_len": 12}
  sizes = {"model__width": 64, "model__vocab_size": 97, "model__depth": 5, "model__experts": 6 * ("expert" in name)}
  axes = layout_of(name).mesh if name != "tensor_parallel" else ()
  mesh = {f"mesh__{axis}": size for axis, size in SIX.items() if axis in axes}
  runner = strategy(name, make_program("text", **heads | sizes), 6, **MICROBATCHES, **mesh)
  case, step = Case.of(runner, BATCH, "cpu"), compiled.compile_step(runner, BATCH)
  ours, wanted = sent_and_wanted(case, step)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  of_batch = sum(x.size * x.dtype.itemsize for x in runner.abstract_batch(BATCH).values()) // runner.layout.shards(
    "batch"
  )
  assert 0 <= step.arguments - memory.of(case).state - of_batch <= 16


def test_data_parallel_sends_its_gradients_twice():
  """2·P·(n−1)/n numbers, as its docstring says."""
  ours, _ = measured("data_parallel", ACCUMULATION)
  parameters = sum(math.prod(weight.shape) for weight in weights(make_program(ACCUMULATION).sizes))
  assert ours.keys() == {("all-reduce", ("data",))}
  assert ours["all-reduce", ("data",)] == pytest.approx(2 * 4 * parameters * 7 / 8, abs=SCALARS)


@pytest.mark.full
def test_pmap_sends_what_data_parallel_does():
  ours, plain = (measured(name, ACCUMULATION)[0] for name in ("pmap_ddp", "data_parallel"))
  assert ours == pytest.approx(plain, abs=SCALARS)


@pytest.mark.full
def test_zero1_sends_in_float32_what_data_parallel_does():
  """A reduce-scatter of gradients and an all-gather of new weights are an all-reduce, once a step.

  Zero2 scatters the gradients of each of the two parts. Without a reduce-scatter of its own, the CPU's compiler sends
  them twice.
  """
  plain, zero1, zero2 = (measured(name, ACCUMULATION)[0] for name in ("data_parallel", "zero1", "zero2"))
  gathered, scattered = zero1["all-gather", ("data",)], zero1["reduce-scatter", ("data",)]
  assert sum(zero1.values()) == pytest.approx(sum(plain.values()), abs=SCALARS)
  assert gathered == scattered == zero2["all-gather", ("data",)]
  assert zero2["all-reduce", ("data",)] == pytest.approx(2 * sum(plain.values()), abs=SCALARS)


def test_fsdp_sends_weights_twice():
  """2·P·(n−1)/n numbers. Exceptions: embedding and head are gathered once, and the norms are not split."""
  ours, _ = measured("fsdp", DOCUMENTS)
  of = lambda wanted: sum(math.prod(w.shape) for w in weights(make_program(DOCUMENTS).sizes) if wanted(w))
  blocks, edges = of(lambda w: w.in_blocks and w.is_matrix), of(lambda w: not w.in_blocks and w.is_matrix)
  assert ours["all-gather", ("data",)] == 4 * (2 * blocks + edges) * 7 / 8


# Strategies whose gradients are summed over these axes once a step, whatever the parts of the batch.
ONCE = {
  "data_parallel": ("data",), "hsdp": ("replica",), "pipeline": ("data",), "three_d": ("data",), "pmap_ddp": ("data",),
}  # fmt: skip


def sent_over(step: compiled.CompiledStep, axes: tuple[str, ...]) -> float:
  """Bytes that a device sends over these mesh axes in the compiled step, alone or together with other axes."""
  return sum(found.sent_in_step for found in step.collectives() if set(found.axes) & set(axes))


def assert_once(one: float, two: float, more: float) -> None:
  """Checks what is sent for one, two and four parts of a batch."""
  assert two == pytest.approx(more, abs=SCALARS)
  assert two <= one + SCALARS


@pytest.mark.full
@pytest.mark.parametrize("name", ONCE)
def test_the_bytes_of_gradients_do_not_grow_with_the_parts_of_a_batch(name: str):
  parts = {"accumulation": 4} if name not in ("pipeline", "three_d") else {}
  microbatches = {"pipeline__microbatches": 8}  # twice as many
  more = compile_case(name, make_program(ACCUMULATION, **parts), 2 * BATCH, **microbatches)[1]
  one, two = (compiled_case(name, variant)[1] for variant in ("text", ACCUMULATION))
  assert_once(*(sent_over(step, ONCE[name]) for step in (one, two, more)))


@pytest.mark.full
def test_two_layouts_together_sum_gradients_once():
  """Tensor parallelism with replicas."""
  first, second = map(strategies.layout_of, ("data_parallel", "tensor_parallel"))
  layout = (first | second).on(data=4, model=2)

  def sent(parts: int) -> float:
    trained = program(model__depth=4, model__seq_len=16, accumulation=parts)
    runner = strategies.build(config(), layout, trained, make_mesh(layout, jax.devices()))
    return sent_over(compiled.compile_step(runner, 64), ("data",))

  assert_once(*map(sent, (1, 2, 4)))


@pytest.mark.full
@pytest.mark.parametrize(
  "name, fields",
  [
    ("two_d", {"model__saved": "attention_output"}),  # whose sum is not repeated
    # Weight units repeat the forward pass, with what it sends.
    ("three_d", {"pipeline__schedule": "zero_bubble"}),
    # Stages without data parallelism.
    ("pipeline", {"mesh__stage": 8, "mesh__data": 1, "model__depth": 8}),
  ],
)
def test_other_steps_that_repeat_the_forward_pass_send_what_theory_says(name: str, fields: dict):
  ours, wanted = sent_and_wanted(*compile_case(name, program(model__remat="full", **fields), BATCH, **fields))
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what


SOME = {"query,value": "minimal", "out,gate,up,down": "dots"}  # some adapters, and remat


WITH_SOME = list(zip(["fsdp", "tensor_parallel", "two_d", "three_d"], itertools.cycle(SOME)))


@pytest.mark.full
@pytest.mark.parametrize("name, targets", WITH_SOME)
def test_some_adapters_send_and_compute_what_is_predicted(name: str, targets: str):
  remat = SOME[targets]
  fields = {"model__seq_len": 48, "model__vocab_size": 1000, "model__remat": remat, "model__lora_targets": targets}
  case, step = compile_case(name, program(**ADAPTERS | FAMILIES | fields), BATCH)
  ours, wanted = sent_and_wanted(case, step)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  assert step.flops() == round(predict.flops(case))


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "two_d"])
def test_weights_kept_for_a_step_are_gathered_once_and_their_gradients_scattered_once(name: str):
  ours, wanted = sent_and_wanted(*compile_case(name, make_program(ACCUMULATION), BATCH, gather="step"))
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=SCALARS), what
  held = sum(math.prod(weight.shape) for weight in weights(make_program(ACCUMULATION).sizes) if weight.is_matrix)
  n = strategies.layout_of(name).mesh.get("model", 1)
  group = 8 // n // strategies.layout_of(name).mesh.get("replica", 1)
  for kind in ("all-gather", "reduce-scatter"):
    assert ours[kind, ("data",)] == 4 * held / n * (group - 1) / group


@pytest.mark.parametrize("name, variant", PAIRS)
def test_no_flop_is_done_twice(name: str, variant: str):
  """The products of a device are its share of the model's and of what remat repeats; in pipelines, the busiest stage's.

  Two images a device, because the compiler writes the outer product of one with its label as no product.
  """
  in_stages = strategies.layout_of(name).layers is not None
  case, step = compiled_at(name, variant, BATCH * (2 if in_stages and "images" in variant else 1))
  assert step.flops() == round(predict.flops(case))  # which divides by the number of positions
  if not in_stages and variant in ("text", DOCUMENTS) and not in_pieces(case):
    once, sizes = step.flops() - predict.repeated_flops(case), case.sizes
    # Texts this short are one block of queries, so attention computes all pairs, as PaLM counts. Its backward pass
    # computes the scores again.
    again = 2 * sizes.depth * sizes.positions**2 * sizes.heads * sizes.head_dim
    assert once * case.layout.device_count == case.batch_size * (palm_flops_per_example(sizes) + again)


@pytest.mark.parametrize("name", in_full(["data_parallel", "zero1", "fsdp", "hsdp", "two_d"], "fsdp"))
def test_no_loop_runs_before_the_predictions_are_counted(name: str):
  """XLA's CPU backend keeps no order between independent collectives, and devices that choose other orders hang."""
  module = compiled_case(name, DOCUMENTS)[1].module
  entry = module.computations[module.entry]
  sums = [one for one in entry.values() if one.operation == "all-reduce" and one.shapes[0].dtype == "s32"]
  loops = [one for one in entry.values() if one.operation == "while"]
  assert sums
  assert len(loops) >= 2
  for loop in loops:
    needs, stack = set[str](), [loop.name]
    while stack:
      name = stack.pop()
      needs.add(name)
      stack += [operand for operand in entry[name].operands if operand in entry and operand not in needs]
    assert {one.name for one in sums} <= needs


@pytest.mark.parametrize("name", in_full(strategies.names(), "zero2"))
def test_no_step_holds_the_logits_of_all_tokens(name: str):
  """In chunks of 8 tokens. FSDP's loss that is not in chunks shows that this test would see them."""
  size = BATCH * (2 if name == "hsdp" else 1)  # whose pieces of the head have the shape of fewer logits
  assert not holds_all_logits(*compiled_at(name, ACCUMULATION, size))
  assert holds_all_logits(*compiled_case("fsdp", DOCUMENTS))
