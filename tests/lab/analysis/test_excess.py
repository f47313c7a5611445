"""explain says where a compiled step sends more than theory says: of which weights, and what to do."""

import dataclasses

from helpers import program

import strategies
from lab.analysis import theory
from lab.analysis.case import Case
from lab.analysis.communication import Collective
from lab.analysis.excess import excess
from lab.analysis.hlo import Shape

WIDTH, MLP, DEPTH, DATA = 256, 1024, 4, 8


def case() -> Case:
  sizes = dataclasses.replace(program(model__mlp_width=MLP).sizes, width=WIDTH, depth=DEPTH, dtype="bfloat16")
  return Case(strategies.layout_of("fsdp").on(data=DATA), sizes, 64)


def compiled(case: Case, all_reduced: bool) -> list[Collective]:
  """What theory says, in one collective for each row. With `all_reduced`, the gradients of `up` are all-reduced."""
  of = lambda kind, size, times: Collective(
    "name", kind, ("data",), DATA, (Shape("bf16", (int(size),), False),), times, "op"
  )
  per_byte = {"all-gather": DATA - 1, "reduce-scatter": (DATA - 1) / DATA, "all-reduce": 2 * (DATA - 1) / DATA}
  found = [of(row.kind, row.bytes / per_byte[row.kind] / 2, 1) for row in theory.sent(case)]
  return found + [of("all-reduce", WIDTH * MLP, DEPTH)] * all_reduced


def test_a_step_that_sends_what_theory_says_has_no_excess():
  assert excess(case(), compiled(case(), False), theory.sent(case()), False) == []


def test_all_reduced_gradients_are_named_with_what_to_do():
  step = case()
  (row,) = excess(step, compiled(step, True), theory.sent(step), False)
  more = DEPTH * 2 * 2 * WIDTH * MLP * (DATA - 1) / DATA
  assert (row["kind"], row["axes"]) == ("all-reduce", ("data",))
  assert row["sent"] - row["theory"] == more
  assert row["weights"] == ["blocks/mlp/down", "blocks/mlp/gate", "blocks/mlp/up"]
  for part in ("all-reduces over data send 3.69 MB a step", "theory says", "blocks/mlp/up", "mesh.replica"):
    assert part in row["said"]
  (row,) = excess(step, compiled(step, True), theory.sent(step), True)
  assert "compiler_options='recommended'" in row["said"]


def test_a_small_excess_does_not_matter():
  """A tenth of what theory says of a kind, and a hundredth of all that is sent."""
  step = case()
  more = dataclasses.replace(compiled(step, True)[-1], times=1, operands=(Shape("bf16", (WIDTH,), False),))
  assert excess(step, [*compiled(step, False), more], theory.sent(step), False) == []
