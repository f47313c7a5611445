"""What experts send, compute and need, by formula and in compiled programs, for layouts that the registry lacks too."""

import collections
from typing import Any

import pytest
from helpers import laid_out, program

import strategies
from lab.analysis import memory, predict, theory
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep, compile_step
from models.flops import train_flops_per_example
from models.ops import exchange
from strategies import layout_of
from strategies.layout import Layout

EXPERT, BATCH = layout_of("expert"), 32
LAYOUTS = {
  "data_parallel": layout_of("data_parallel").on(data=8),
  "fsdp": layout_of("fsdp").on(data=8),
  "expert": EXPERT.on(expert=8),
  "expert_fsdp": layout_of("expert_fsdp").on(data=2, expert=4),
  "tensor_parallel": (layout_of("tensor_parallel") | EXPERT).on(expert=4, model=2),
  "two_d": (layout_of("tensor_parallel") | layout_of("expert_fsdp")).on(data=2, expert=2, model=2),
  "context": (layout_of("context") | EXPERT).on(context=2, expert=4),
  "own axis": layout_of("data_parallel").on(data=2) | Layout({"x": 4}, experts="x"),
  "pipeline": (layout_of("pipeline") | EXPERT).on(stage=2, data=2, expert=2),
  "three_d": (layout_of("three_d") | EXPERT).on(stage=2, data=1, expert=2, model=2),
}
WITH_ADAPTERS = {"init_from": "a model", "model__lora_rank": 8}
LATER = {"pipeline__schedule": "zero_bubble"}
CASES = [
  ("data_parallel", "auto", {}), ("fsdp", "auto", {}), ("expert", "gather", {}), ("expert", "exchange", {}),
  ("expert_fsdp", "gather", {}), ("two_d", "exchange", {}), ("context", "exchange", {}), ("pipeline", "gather", {}),
  ("fsdp", "auto", WITH_ADAPTERS), ("expert_fsdp", "gather", WITH_ADAPTERS), ("two_d", "exchange", WITH_ADAPTERS),
  ("two_d", "gather", WITH_ADAPTERS | {"sequence_parallel": False}),
  ("pipeline", "gather", LATER), ("pipeline", "exchange", LATER | {"model__remat": "minimal"}),
]  # fmt: skip
SIZES = {
  "model__width": 64, "model__heads": 4, "model__kv_heads": 2, "model__mlp_width": 128, "model__seq_len": 64,
  "model__depth": 2, "model__experts": 8, "model__remat": "full", "pipeline__microbatches": 4,
}  # fmt: skip


def built(layout: Layout, way: str, **fields: Any) -> strategies.Strategy:
  asked = SIZES | fields
  return laid_out(layout, program(**asked, model__expert_transport=way), **asked)


FIRST_ARE_DENSE = {"model__dense_layers": 2, "model__depth": 4, "model__mlp_width": 192, "model__expert_width": 128}
OF_ALL_KINDS = [
  *CASES,
  ("two_d", "exchange", FIRST_ARE_DENSE),
  ("expert_fsdp", "gather", FIRST_ARE_DENSE | {"model__remat": "minimal", "optimizer__name": "muon"}),
  ("context", "exchange", FIRST_ARE_DENSE | {"accumulation": 2}),
  ("fsdp", "auto", FIRST_ARE_DENSE | {"optimizer__on_host": True}),
  ("context", "exchange", {"model__expert_capacity": 1.0}),
  ("pipeline", "gather", FIRST_ARE_DENSE),
  ("three_d", "exchange", FIRST_ARE_DENSE | {"model__remat": "minimal"}),
]


@pytest.mark.full
@pytest.mark.parametrize("name, way, fields", OF_ALL_KINDS)
def test_theory_is_the_compiled_program(name: str, way: str, fields: dict[str, Any]):
  """Bytes by kind and mesh axis, FLOPs, and memory within a fifth. A step sums some more numbers, of 4 bytes each.

  The dense blocks are two, because XLA's CPU backend merges both passes of a single one, in spite of a barrier.
  """
  case, step = compiled_as_theory_says(name, way, **fields)
  assert memory.of(case).total == pytest.approx(step.bytes, rel=0.2)


def compiled_as_theory_says(name: str, way: str, **fields: Any) -> tuple[Case, CompiledStep]:
  """A case and its compiled step, after its bytes and FLOPs were checked."""
  runner = built(LAYOUTS[name], way, **fields)
  case, step = Case.of(runner, BATCH, "cpu"), compile_step(runner, BATCH)
  assert not step.left_out()
  found, expected = collections.Counter[Any](), collections.Counter[Any]()
  for one in step.collectives():
    found[one.kind, one.axes] += one.sent_in_step
  for row in theory.sent(case):
    expected[row.kind, row.axes] += row.bytes
  for key in {*found, *expected}:
    assert found[key] == pytest.approx(expected[key], abs=256), key
  assert step.flops() == pytest.approx(predict.flops(case), rel=0.005)
  return case, step


@pytest.mark.full
@pytest.mark.parametrize(
  "name, way, fields",
  [
    ("tensor_parallel", "gather", {}),
    ("two_d", "exchange", {"model__remat": "minimal"}),
    ("context", "gather", {}),
    ("own axis", "gather", {}),
    ("three_d", "exchange", {"pipeline__schedule": "zero_bubble"}),
  ],
)
def test_shared_experts_send_what_theory_says(name: str, way: str, fields: dict[str, Any]):
  """Beside the experts of a token, where devices share hidden units and positions. On `x` all have the same tokens."""
  compiled_as_theory_says(name, way, model__shared_experts=1, **fields)


def test_flops_of_experts_are_those_of_tokens():
  """No more than 1.3 times what is needed, if loads are equal: a backward pass computes hidden units again."""
  sizes = program(**SIZES).sizes
  for experts in (8, 64):
    case = Case(LAYOUTS["expert"], built(LAYOUTS["expert"], "exchange", model__experts=experts).program.sizes, 4096)
    needed = 3 * 6 * sizes.width * sizes.experts.per_token * sizes.experts.width
    computed = next(p.flops for p in predict.experts.products(case) if "mlp" in p.dims)
    assert 1 < computed / needed <= 1.3


def test_traffic_of_experts_is_that_of_their_blocks_of_rows():
  """Each block of rows reads the weights of its expert. With four times the tokens, blocks are larger, not more.

  More experts have smaller blocks, which read as many weights for fewer rows.
  """
  size = SIZES | {"model__width": 256, "model__expert_width": 256}
  case = lambda experts, batch: Case(LAYOUTS["fsdp"], program(**size | {"model__experts": experts}).sizes, batch)
  of = predict.experts.traffic
  (few, rows), (many, larger) = (predict.experts.blocks(case(8, batch)) for batch in (1024, 4096))
  assert (few, 4 * rows) == (many, larger)
  assert of(case(8, 1024)) < of(case(8, 4096)) < 4 * of(case(8, 1024))
  assert of(case(32, 1024)) > 1.2 * of(case(8, 1024))
  assert of(case(0, 1024)) == 0


def test_flops_of_dense_blocks_are_those_of_their_mlps():
  """6 for each weight and token: three matrices of an MLP in place of those of a token's experts, and no router."""
  fields = {"model__experts": 8, "model__expert_width": 24, "model__shared_experts": 1, "model__mlp_width": 80}
  some, none = (program(**fields, model__dense_layers=n).sizes for n in (1, 0))
  changed = some.width * (3 * 80 - 3 * 24 * (some.experts.per_token + 1) - 8)
  assert train_flops_per_example(some) - train_flops_per_example(none) == 6 * changed * some.positions


def test_a_round_has_room_for_more_than_equal_loads():
  assert exchange.round_rows(1024, 2, 8) == 320
  assert exchange.round_rows(16, 2, 1) == 32
