"""Context parallelism equals a single device: in every way, for every kind of model, alone and with other axes."""

import functools
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from helpers import (
  IMAGES,
  PARITY,
  assert_trees_close,
  assert_writes_as,
  config,
  in_every_way,
  in_full,
  initial_state,
  laid_out,
  one_sentence,
  random_batch,
  step_and_evaluation,
  trained,
)
from parting import explained

import strategies
from lab.analysis import hlo
from models import mixers
from models.ops import rotary
from strategies import Strategy, layout_of
from strategies.execution.mesh import abstract_mesh, on_mesh
from strategies.layout import Layout
from training import settings
from training.program import Params, Program

STEPS, BATCH = 20, 16
# Without clipping, Adam's first moment after one step is (1 − b1) times the gradient.
SMALL = {
  "model__width": 64, "model__heads": 16, "model__kv_heads": 16, "model__mlp_width": 64, "model__vocab_size": 64,
  "model__seq_len": 48, "optimizer__clip_norm": 0.0,
}  # fmt: skip
VARIANTS = {
  "text": {},
  "documents": {
    "data__packing": "documents", "data__prompt_field": "prompt", "model__remat": "dots", "eval_by_position": True,
  },
  "grouped keys": {"model__kv_heads": 2, "model__tied_embedding": True, "eval_by_position": True},
  "dropout, accumulated": {"model__dropout": 0.1, "accumulation": 2, "model__remat": "full", "model__loss_chunk": 5},
  "images": {**IMAGES, "model__dropout": 0.1},
  "adapters": {"model__lora_rank": 4, "init_from": "a model", "model__dropout": 0.1},
}  # fmt: skip
WAYS = ("gather", "exchange", "ring")
CONTEXT = layout_of("context")
ALONE = {f"context-{n}": CONTEXT.on(context=n) for n in (2, 4, 8)}
WITH_OTHERS = {
  "long_context": layout_of("long_context").on(replica=2, data=2, context=2),
  "fsdp": (layout_of("fsdp") | CONTEXT).on(data=2, context=4),
  "zero1": (layout_of("zero1") | CONTEXT).on(data=2, context=2),
  "zero2": (layout_of("zero2") | CONTEXT).on(data=2, context=4),
  "hsdp": (layout_of("hsdp") | CONTEXT).on(replica=2, data=2, context=2),
  "tensor_parallel": (layout_of("tensor_parallel") | CONTEXT).on(context=4, model=2),
  "two_d": (layout_of("two_d") | CONTEXT).on(data=2, context=2, model=2),
  "pipeline": (layout_of("pipeline") | CONTEXT).on(stage=2, data=2, context=2),
  "zero_bubble": (layout_of("pipeline") | CONTEXT).on(stage=2, data=1, context=4),
  "three_d": (layout_of("three_d") | CONTEXT).on(stage=2, data=1, context=2, model=2),
}
LAYOUTS = ALONE | WITH_OTHERS


def program_of(way: str, variant: str, **fields: object) -> Program:
  asked = SMALL | VARIANTS[variant] | fields
  return settings.program(config(steps=STEPS, model__attention_context=way, **asked), "cpu")


def build(layout: Layout, program: Program, **fields: object) -> Strategy:
  with warnings.catch_warnings(action="ignore"):  # a pipeline's ring falls back to gather: tested below
    return laid_out(layout, program, **fields)


def gradients(runner: Strategy) -> tuple[Any, Params, Any]:
  return step_and_evaluation(runner, initial_state(runner), BATCH)


@functools.cache
def expected(variant: str) -> tuple[Any, Params, Any]:
  return gradients(build(layout_of("single"), program_of("auto", variant)))


SHORT = ("context-4", "ring", "documents")
CASES = [
  *in_every_way(ALONE, WITH_OTHERS, WAYS, VARIANTS),
  SHORT,
  ("pipeline", "ring", "grouped keys"),  # in a pipeline, it becomes gather
]
assert len(set(CASES)) == len(CASES)


def schedule_of(name: str) -> dict[str, object]:
  return {"pipeline__schedule": "zero_bubble" if name == "zero_bubble" else "1f1b", "pipeline__microbatches": 4}


@pytest.mark.parametrize("name, way, variant", in_full(CASES, SHORT))
def test_shared_positions_equal_a_single_device(name: str, way: str, variant: str):
  """In the loss, every gradient, and the sums of an evaluation."""
  runner = build(LAYOUTS[name], program_of(way, variant), **schedule_of(name))
  ours = gradients(runner)
  with explained(runner, build(layout_of("single"), program_of("auto", variant)), BATCH):
    assert_trees_close(ours, expected(variant), PARITY)


def test_no_sum_over_devices_may_run_beside_the_model():
  """XLA's CPU backend may begin what is independent at once. A device that waits in both holds two of its threads."""
  runner = build(LAYOUTS["context-2"], program_of("ring", "text"))
  program = hlo.parse(runner.lower_train_step(BATCH).compile().as_text())
  main = program.computations[program.entry]
  sums = [x for x in main.values() if x.operation == "all-reduce"]
  loops = {x.name for x in main.values() if x.operation == "while" and "collective-permute" in operations(program, x)}
  assert sums
  assert len(loops) == 2  # forward and backward
  for found in sums:
    assert loops <= needed(main, found), f"{found.op_name} does not wait for the model"


def operations(program: hlo.Module, loop: hlo.Instruction) -> set[str]:
  """What runs in a loop."""
  return {visit.instruction.operation for visit in hlo.Module(program.computations, loop.attribute("body")).walk()}


def needed(main: hlo.Computation, found: hlo.Instruction) -> set[str]:
  """What must have run before an instruction of a program."""
  names = set(found.operands)
  while more := {name for known in names for name in main[known].operands} - names:
    names |= more
  return names


def losses(runner: Strategy) -> np.ndarray:
  return trained(runner, STEPS, BATCH)["loss"]


@pytest.mark.full
@pytest.mark.parametrize("name, way", [("context-4", "ring"), ("fsdp", "gather"), ("pipeline", "exchange")])
def test_losses_of_20_steps_equal_a_single_device(name: str, way: str):
  """test_parity.py tests the strategies of the registry, in the way that 'auto' chooses."""
  program = program_of(way, "documents")
  ours, alone = losses(build(LAYOUTS[name], program, **schedule_of(name))), losses(build(layout_of("single"), program))
  np.testing.assert_allclose(ours, alone, rtol=PARITY)
  assert len(set(ours)) == STEPS


def test_training_and_evaluation_compute_with_own_positions(monkeypatch: pytest.MonkeyPatch):
  """A device has 48 / 8 positions. Whole positions would give the same numbers, with all work on every device."""
  lengths, rotate = [], rotary.rotate

  def rotated(x: jax.Array, angles: jax.Array, scale: float) -> jax.Array:
    lengths.append(x.shape[1])
    return rotate(x, angles, scale)

  monkeypatch.setattr(mixers, "rotate", rotated)
  runner = build(LAYOUTS["context-8"], program_of("ring", "documents"))
  params, batch = runner.abstract_state().params, runner.shard(random_batch(runner.program, BATCH), BATCH)
  with on_mesh(runner.mesh):
    for sums in (runner.runner.eval_sums, functools.partial(runner.runner.gradient_sums, step=0)):
      lengths.clear()
      jax.eval_shape(sums, params, batch)
      assert set(lengths) == {6}


@pytest.mark.full
def test_texts_of_any_length_are_scored_and_continued():
  """Their positions stay whole."""
  program = program_of("ring", "text")
  assert_writes_as(build(LAYOUTS["fsdp"], program), build(layout_of("single"), program))


def test_a_ring_in_a_pipeline_falls_back_to_gather_and_says_so():
  program = program_of("ring", "text")
  with pytest.warns(UserWarning, match=r"model\.attention_context='ring'.*permutes wait for all devices.*'gather'"):
    runner = strategies.build(config("context"), LAYOUTS["pipeline"], program, abstract_mesh(LAYOUTS["pipeline"]))
  assert runner.program.sizes.attention_context == "gather"


def test_a_mesh_that_repeats_work_gets_one_sentence():
  idle = Layout({"spare": 2, "context": 4}, positions="context")
  with one_sentence("mesh.spare=2 splits nothing", "the same work", "mesh.spare=1"):
    build(idle, program_of("auto", "text"))
  build(idle.on(spare=1), program_of("auto", "text"))


@pytest.mark.parametrize(
  "name, fields, parts",
  [
    ("context", {"model__seq_len": 40}, ["mesh.context=8", "40 positions", "multiple of 16", "model.seq_len=48"]),
    ("context", {**IMAGES, "model__image_size": 8}, ["mesh.context=8", "4 positions", "16", "use 1 or 2 devices"]),
    (
      "context",
      {"model__attention_context": "exchange", "model__heads": 4, "model__kv_heads": 4},
      ["model.attention_context='exchange'", "mesh.context=8", "4 query heads", "'gather' or 'ring'"],
    ),
    ("context", {"model__attention_context": "rings"}, ["model.attention_context='rings'", "did you mean 'ring'"]),
    ("fsdp", {"mesh__context": 2}, ["mesh.context=2", "no 'context' axis"]),
    ("long_context", {"mesh__context": 3}, ["mesh.context=3", "8 devices"]),
    ("single", {"mesh__data": 8}, ["mesh.data=8 splits nothing", "the same work", "mesh.data=1"]),
  ],
)
def test_mistakes_get_one_sentence(name: str, fields: dict, parts: list[str]):
  with one_sentence(*parts):
    asked = config(name, **fields)
    strategies.create(asked, settings.program(asked, "cpu"), jax.devices())
