"""Local layers under shared positions equal a single device: with every kind of model, alone and with other axes."""

import functools
from typing import Any

import jax
import pytest
from helpers import (
  PARITY,
  assert_trees_close,
  assert_writes_as,
  config,
  in_full,
  initial_state,
  laid_out,
  one_sentence,
  step_and_evaluation,
)

import strategies
from strategies import layout_of
from strategies.execution.stages.stage import Stage
from strategies.layout import Layout
from training import settings
from training.program import Params, Program

BATCH = 16
# With 48 positions, each of 2, 4 or 8 devices has two chunks of 12, 6 or 3. So a halo of 6 is shorter than a chunk, as
# long as one, or as long as two.
SMALL = {
  "model__width": 64, "model__heads": 16, "model__kv_heads": 16, "model__mlp_width": 64, "model__vocab_size": 64,
  "model__seq_len": 48, "model__window": 7, "model__layers_pattern": "local:1,global:1", "optimizer__clip_norm": 0.0,
}  # fmt: skip
VARIANTS = {
  "text": {},
  "documents": {"data__packing": "documents", "data__prompt_field": "prompt", "model__remat": "dots"},
  "grouped keys": {
    "model__kv_heads": 2, "model__rope_base_local": 100.0, "model__layers_pattern": "", "eval_by_position": True,
  },
  "dropout, accumulated": {"model__dropout": 0.1, "accumulation": 2, "model__remat": "full", "model__loss_chunk": 5},
  "adapters": {"model__lora_rank": 4, "init_from": "a model", "model__dropout": 0.1},
  "norms": {
    "model__norms": "both", "model__norm_offset": 1.0, "model__qk_norm": True, "model__qk_norm_over": "width",
    "model__mlp": "geglu", "model__embedding_scale": 8.0, "model__attention_scale": 0.2,
  },
  "experts": {"model__experts": 8, "model__dense_layers": 2, "model__router_z": 0.03, "model__depth": 6},
  "sinks": {
    "model__attention_sinks": True, "model__qkv_bias": True, "model__out_bias": True, "model__mlp_bias": True,
    "model__mlp": "swiglu_clamped",
  },
  "every second": {
    "model__experts": 8, "model__experts_every": 2, "model__depth": 8, "model__router_z": 0.03, "model__remat": "full",
  },
}  # fmt: skip
VARIANTS["sinks, experts"] = VARIANTS["sinks"] | {"model__experts": 8, "data__packing": "documents"}
CONTEXT = layout_of("context")
ALONE = {f"context-{n}": CONTEXT.on(context=n) for n in (2, 4, 8)}
WITH_OTHERS = {
  "fsdp": (layout_of("fsdp") | CONTEXT).on(data=2, context=4),
  "tensor_parallel": (layout_of("tensor_parallel") | CONTEXT).on(context=4, model=2),
  "pipeline": (layout_of("pipeline") | CONTEXT).on(stage=2, data=2, context=2),
  "zero_bubble": (layout_of("pipeline") | CONTEXT).on(stage=2, data=1, context=4),
  "expert": (layout_of("expert") | CONTEXT).on(expert=2, context=4),
}
WHOLE = {"fsdp-8": layout_of("fsdp").on(data=8), "three_d": layout_of("three_d").on(stage=2, data=2, model=2)}
LAYOUTS = ALONE | WITH_OTHERS | WHOLE
OTHERS = [
  ("tensor_parallel", "norms"),  # heads that devices split
  ("pipeline", "documents"),  # ends that are gathered
  ("context-8", "sinks"), ("tensor_parallel", "sinks"), ("expert", "sinks, experts"), ("pipeline", "sinks, experts"),
  *((name, "every second") for name in ("pipeline", "zero_bubble", "interleaved", "three_d")),
  ("fsdp-8", "every second"), ("expert", "every second"),
]  # fmt: skip
SHORT = [("context-8", "documents")]
CASES = [(name, variant) for i, name in enumerate(LAYOUTS) for j, variant in enumerate(VARIANTS) if (i + j) % 3 == 0]
LAYOUTS["interleaved"] = LAYOUTS["pipeline"]  # which needs two periods a stage


def program_of(variant: str, **fields: object) -> Program:
  return settings.program(config(steps=20, **(SMALL | VARIANTS[variant] | fields)), "cpu")


def schedule_of(name: str) -> dict[str, object]:
  schedule = name if name in ("zero_bubble", "interleaved") else "1f1b"
  return {"pipeline__schedule": schedule, "pipeline__microbatches": 4}


def gradients(layout: Layout, variant: str, **fields: object) -> tuple[Any, Params, Any]:
  runner = laid_out(layout, program_of(variant), **fields)
  return step_and_evaluation(runner, initial_state(runner), BATCH)


@functools.cache
def expected(variant: str) -> tuple[Any, Params, Any]:
  return gradients(layout_of("single"), variant)


@pytest.mark.parametrize("name, variant", in_full([*dict.fromkeys([*CASES, *OTHERS, *SHORT])], *SHORT))
def test_local_layers_equal_a_single_device(name: str, variant: str):
  """In the loss, every gradient, and the sums of an evaluation."""
  ours = gradients(LAYOUTS[name], variant, **schedule_of(name))
  assert_trees_close(ours, expected(variant), PARITY)


@pytest.mark.parametrize("variant", in_full(["text", "every second"], "text"))
def test_the_slots_of_a_stage_hold_no_weights(variant: str, monkeypatch: pytest.MonkeyPatch):
  """A stage has them already. Those of a period must be known as weights, or each microbatch would keep a copy."""
  program, kept = program_of(variant, model__mlp_width=40), list[tuple[int, ...]]()
  runner = laid_out(LAYOUTS["pipeline"], program, **schedule_of("pipeline"))
  linearize = Stage.linearize

  def seen(stage: Stage, *given: Any) -> Any:
    found = linearize(stage, *given)
    kept.extend(residual.shape for residual in found[2])
    return found

  monkeypatch.setattr(Stage, "linearize", seen)
  runner.lower_train_step(BATCH)
  assert kept
  assert not [shape for shape in kept if {*shape[-2:]} == {40, 64}]


@pytest.mark.full
@pytest.mark.parametrize(
  "name, variant", [("fsdp-8", "grouped keys"), ("pipeline", "grouped keys"), ("pipeline", "every second")]
)
def test_texts_are_scored_and_continued(name: str, variant: str):
  program = program_of(variant)
  ours = laid_out(LAYOUTS[name], program, **schedule_of(name))
  assert_writes_as(ours, laid_out(layout_of("single"), program))


@pytest.mark.parametrize(
  "name, fields, parts",
  [
    (
      "pipeline",
      {"mesh__stage": 4, "mesh__data": 2, "model__layers_pattern": "local:2,global:1", "model__depth": 8},
      ["model.layers_pattern='local:2,global:1'", "3 layers", "model.depth=8", "multiple of 12"],
    ),
    (
      "pipeline",
      {"mesh__stage": 4, "mesh__data": 2, "model__experts": 4, "model__experts_every": 2, "model__layers_pattern": ""},
      ["model.experts_every=2 repeats after 2 layers", "model.depth=4", "multiple of 8"],
    ),
    (
      "context",
      {"model__objective": "class", "model__inputs": "features", "model__features": 4, "model__classes": 2,
       "model__heads": 2, "model__kv_heads": 2, "data__name": "synthetic", "mesh__context": 8},
      ["model.window", "causal objective", "2 query heads"],
    ),
  ],
)  # fmt: skip
def test_mistakes_get_one_sentence(name: str, fields: dict, parts: list[str]):
  with one_sentence(*parts):
    asked = config(name, **(SMALL | fields))
    strategies.create(asked, settings.program(asked, "cpu"), jax.devices())
