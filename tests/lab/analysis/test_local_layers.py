"""What local layers send and compute is what theory says: halos of shared positions, and pairs within windows."""

import dataclasses

import pytest
from compiled_steps import sent_and_wanted
from helpers import config, in_full, laid_out

from lab.analysis import compiled, predict, theory
from lab.analysis.case import Case
from strategies import layout_of
from strategies.layout import Layout
from training import settings

BATCH = 16
# As in tests/strategies/test_local_layers.py: with 8 devices a halo is as long as two chunks.
SMALL = {
  "model__width": 64, "model__heads": 16, "model__kv_heads": 16, "model__mlp_width": 64, "model__vocab_size": 64,
  "model__seq_len": 48, "model__window": 7, "model__layers_pattern": "local:1,global:1", "optimizer__clip_norm": 0.0,
}  # fmt: skip
CONTEXT = layout_of("context")
IN_STAGES = layout_of("pipeline") | CONTEXT
CASES = {
  "a chunk's halo": (CONTEXT.on(context=2), {}),
  "two chunks' halo": (CONTEXT.on(context=8), {"data__packing": "documents", "model__remat": "dots"}),
  "all local, grouped keys": (
    (layout_of("fsdp") | CONTEXT).on(data=2, context=4),
    {"model__layers_pattern": "", "model__kv_heads": 2, "model__rope_base_local": 100.0},
  ),
  "heads split": ((layout_of("tensor_parallel") | CONTEXT).on(context=4, model=2), {"model__remat": "full"}),
  "norms over split heads": (
    (layout_of("tensor_parallel") | CONTEXT).on(context=2, model=4),
    {"model__norms": "after", "model__qk_norm": True, "model__qk_norm_over": "width", "model__remat": "full"},
  ),
  "stages": (IN_STAGES.on(stage=2, data=2, context=2), {}),
  "stages, dense blocks": (
    IN_STAGES.on(stage=2, data=1, context=4),
    {"model__experts": 8, "model__dense_layers": 2, "model__depth": 6, "pipeline__schedule": "zero_bubble"},
  ),
  "stages, every second block with experts": (
    IN_STAGES.on(stage=2, data=2, context=2),
    {"model__experts": 8, "model__experts_every": 2, "model__layers_pattern": "", "model__remat": "full"},
  ),
  "every second block with experts": (
    (layout_of("expert_fsdp") | CONTEXT).on(data=2, expert=2, context=2),
    {"model__experts": 8, "model__experts_every": 2, "model__layers_pattern": "global:1", "model__window": 0},
  ),
  "whole texts": (layout_of("fsdp").on(data=8), {}),
}  # fmt: skip


def case_of(layout: Layout, **fields: object) -> tuple[Case, compiled.CompiledStep]:
  pipeline = {name: fields.pop(name) for name in ("pipeline__schedule",) if name in fields}
  program = settings.program(config(steps=20, **(SMALL | fields)), "cpu")
  runner = laid_out(layout, program, pipeline__microbatches=4, **pipeline)
  return Case.of(runner, BATCH, "cpu"), compiled.compile_step(runner, BATCH)


@pytest.mark.parametrize("name", in_full(CASES, "two chunks' halo"))
def test_local_layers_send_and_compute_what_theory_says(name: str):
  layout, fields = CASES[name]
  case, step = case_of(layout, **fields)
  ours, wanted = sent_and_wanted(case, step)
  for what in ours | wanted:
    assert ours[what] == pytest.approx(wanted[what], rel=1e-6, abs=512), what
  if name != "stages, dense blocks":  # one period is no loop, so the compiler need not compute scores again
    assert step.flops() == round(predict.flops(case))


def halo_bytes(length: int, devices: int) -> float:
  """What a device sends for the local layers of a model, for one text."""
  layout = CONTEXT.on(context=devices)
  program = settings.program(config(steps=20, **(SMALL | {"model__seq_len": length})), "cpu")
  case = Case.of(laid_out(layout, program), BATCH, "cpu")
  return sum(row.bytes for row in theory.sent(case) if "halos" in row.what)


def test_a_halo_grows_neither_with_the_text_nor_with_the_devices():
  """Keys and values of 6 positions before each of two chunks, forward, and their gradients back: 2 local layers."""
  found = {halo_bytes(length, devices) for length, devices in ((48, 2), (96, 8), (960, 8))}
  assert found == {
    16 * 2 * 2 * 2 * 2 * 6 * 16 * 4 * 4
  }  # texts · layers · chunks · k, v · both ways · positions · bytes


def test_a_window_that_hides_nothing_has_no_halo():
  """Its layers differ from the others by their angles only."""
  program = settings.program(config(**(SMALL | {"model__window": 48, "model__rope_base_local": 100.0})), "cpu")
  case = Case.of(laid_out(CONTEXT.on(context=4), program), BATCH, "cpu")
  assert len(case.sizes.groups) == 2
  plain = dataclasses.replace(case.sizes, window=0, layers_pattern="", rope_base_local=0.0)
  assert theory.sent(case) == theory.sent(dataclasses.replace(case, sizes=plain))


def test_groups_are_the_blocks_of_each_kind():
  program = settings.program(
    config(**(SMALL | {"model__experts": 8, "model__dense_layers": 3, "model__depth": 8})), "cpu"
  )
  groups = program.sizes.groups
  assert {kind: group.layers for kind, group in groups.items()} == {
    ("dense_blocks", "global"): 1, ("dense_blocks", "local"): 2, ("blocks", "global"): 3, ("blocks", "local"): 2,
  }  # fmt: skip
  assert [bool(group.sizes.shown) for group in groups.values()] == [False, True, False, True]
  assert [bool(group.sizes.experts) for group in groups.values()] == [False, False, True, True]
  alike = dataclasses.replace(program.sizes, window=0, layers_pattern="")
  assert [group.layers for group in alike.groups.values()] == [3, 5]
