"""A mixture of experts equals a single device: in every way, for every kind of model, on any mesh, for any loads."""

import dataclasses
import functools
from pathlib import Path
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
  initial_state,
  laid_out,
  measured,
  one_sentence,
  step_and_evaluation,
  trained,
)

import strategies
import train
from strategies import Strategy, layout_of
from strategies.execution.constraints import Constraints
from strategies.execution.stages.orders import ORDERS
from strategies.execution.transfers import Transfers
from strategies.layout import Layout
from training import settings
from training.program import Params, Program

STEPS, BATCH = 20, 16
SMALL = {
  "model__width": 32, "model__heads": 4, "model__kv_heads": 2, "model__mlp_width": 32, "model__vocab_size": 64,
  "model__seq_len": 16, "model__depth": 2, "model__experts": 8, "model__router_z": 0.01, "optimizer__clip_norm": 0.0,
}  # fmt: skip
FIRST_IS_DENSE = {"model__dense_layers": 1, "model__mlp_width": 48, "model__expert_width": 32}
FIRST_ARE_DENSE = FIRST_IS_DENSE | {"model__dense_layers": 2, "model__depth": 4}
VARIANTS = {
  "text": {},
  "documents": {"data__packing": "documents", "data__prompt_field": "prompt", "model__remat": "dots"},
  "dropout, accumulated": {
    "model__dropout": 0.1,
    "accumulation": 2,
    "model__remat": "full",
    "model__shared_experts": 1,
  },
  "images": {**IMAGES, "model__router": "topk_softmax", "model__experts_per_token": 1},
  "one has all": {"model__router": "sigmoid_bias", "model__router_scale": 2.5},
  "one has none": {"model__router": "sigmoid_bias", "model__experts_per_token": 3, **FIRST_IS_DENSE},
  "adapters": {"init_from": "a model", "model__lora_rank": 4, "model__shared_experts": 1},
}
# What is added to the scores of the first and of the last experts, in these variants.
BIASES = {"one has all": (9.0, 0.0), "one has none": (0.0, -9.0), "limited": (0.0, 9.0)}
# Mixtures whose experts have a capacity, and mixtures whose first blocks are dense.
OTHERS = {
  "limited": {
    "data__packing": "documents",
    "accumulation": 2,
    "model__remat": "full",
    "model__router": "sigmoid_bias",
    "model__expert_capacity": 0.75,
  },
  "dense first": {**FIRST_ARE_DENSE, "model__shared_experts": 1},
  "dense first, in chunks": {**FIRST_ARE_DENSE, "model__depth": 6, "model__router": "sigmoid_bias"},
  "dense first, documents": {
    **FIRST_ARE_DENSE,
    "data__packing": "documents",
    "model__dropout": 0.1,
    "accumulation": 2,
    "model__remat": "full",
  },
  "dense first, adapters": {
    **FIRST_ARE_DENSE, "model__lora_rank": 4, "model__lora_targets": "query,key,value,out", "init_from": "a model"
  },
}  # fmt: skip
WAYS = ("gather", "exchange", "ragged")
EXPERT = layout_of("expert")
ALONE = {f"expert-{n}": EXPERT.on(expert=n) for n in (2, 4, 8)}
WITH_OTHERS = {
  "expert_fsdp": layout_of("expert_fsdp").on(data=2, expert=4),
  "zero1": (layout_of("zero1") | EXPERT).on(data=4, expert=2),
  "zero2": (layout_of("zero2") | EXPERT).on(data=2, expert=4),
  "hsdp": (layout_of("hsdp") | EXPERT).on(replica=2, data=2, expert=2),
  "tensor_parallel": (layout_of("tensor_parallel") | EXPERT).on(expert=4, model=2),
  "two_d": (layout_of("tensor_parallel") | layout_of("expert_fsdp")).on(data=2, expert=2, model=2),
  "context": (layout_of("context") | EXPERT).on(context=2, expert=4),
  "pipeline": (layout_of("pipeline") | EXPERT).on(stage=2, data=2, expert=2),
  "interleaved": (layout_of("pipeline") | EXPERT).on(stage=2, data=1, expert=4),
  "three_d": (layout_of("three_d") | EXPERT).on(stage=2, data=1, expert=2, model=2),
  "zero_bubble": (layout_of("pipeline") | EXPERT).on(stage=2, data=1, expert=4),
}
LAYOUTS = ALONE | WITH_OTHERS
CASES = [
  (name, way, variant)
  for name, way, variant in in_every_way(ALONE, WITH_OTHERS, WAYS, VARIANTS)
  if not (LAYOUTS[name].layers and variant == "one has none")  # too few blocks
]
CASES += [
  ("two_d", "exchange", "one has all"), ("pipeline", "ragged", "dropout, accumulated"),
  ("expert_fsdp", "gather", "dense first"), ("context", "exchange", "dense first, documents"),
  ("expert_fsdp", "exchange", "dense first, adapters"),
  ("gpipe", "exchange", "dense first"), ("pipeline", "ragged", "dense first, documents"),
  ("interleaved", "gather", "dense first, in chunks"), ("zero_bubble", "exchange", "dense first, in chunks"),
  ("three_d", "gather", "dense first"), ("expert-8", "exchange", "limited"), ("context", "ragged", "limited"),
  ("own axis", "exchange", "text"),
]  # fmt: skip
# For the cases above only. The devices along `x` have the same tokens.
LAYOUTS |= {
  "gpipe": LAYOUTS["pipeline"],
  "own axis": layout_of("data_parallel").on(data=2) | Layout({"x": 4}, experts="x"),
}
assert len(set(CASES)) == len(CASES)


def program_of(way: str, variant: str, **fields: object) -> Program:
  asked = SMALL | (VARIANTS | OTHERS)[variant] | fields
  return settings.program(config(steps=STEPS, model__expert_transport=way, **asked), "cpu")


def state_of(runner: Strategy, variant: str) -> Any:
  """An initial state; with biases in those of its routers."""
  state = initial_state(runner)
  if variant not in BIASES:
    return state
  mlp, (first, last) = state.params["blocks"]["mlp"], BIASES[variant]
  bias = np.zeros(mlp["bias"].shape, np.float32)
  bias[:, : runner.program.sizes.experts.per_token] += first
  bias[:, -1] += last
  mlp = mlp | {"bias": jax.device_put(bias, mlp["bias"].sharding)}
  return dataclasses.replace(state, params=state.params | {"blocks": state.params["blocks"] | {"mlp": mlp}})


def gradients(runner: Strategy, variant: str) -> tuple[Any, Params, Any]:
  return step_and_evaluation(runner, state_of(runner, variant), BATCH)


@functools.cache
def expected(variant: str) -> tuple[dict[str, np.ndarray], Params, Any]:
  return gradients(laid_out(layout_of("single"), program_of("auto", variant)), variant)


def schedule_of(name: str) -> dict[str, object]:
  """Two microbatches of each part of a batch."""
  schedule = name if name in ORDERS else "1f1b"
  return {"pipeline__schedule": schedule, "pipeline__microbatches": 2}


@pytest.mark.full
@pytest.mark.parametrize("name, way, variant", CASES)
def test_shared_experts_equal_a_single_device(name: str, way: str, variant: str):
  """In the loss, every gradient, and the sums of an evaluation, loads and losses of routers among them."""
  ours = gradients(laid_out(LAYOUTS[name], program_of(way, variant), **schedule_of(name)), variant)
  assert_trees_close(ours, expected(variant), PARITY)


@pytest.mark.full
def test_all_tokens_go_to_the_experts_that_the_variant_says():
  """Else its cases would test nothing."""
  load = expected("one has all")[2]["load"]
  assert (load[:, :2] > 0).all()
  assert not load[:, 2:].any()


@pytest.mark.full
def test_some_choices_are_dropped_as_the_variant_says():
  found = expected("limited")[2]
  assert 0.1 < found["dropped"] / found["load"].sum() < 0.9


@pytest.mark.full
def test_no_token_goes_to_the_expert_that_the_variant_says():
  load = expected("one has none")[2]["load"]
  assert not load[:, -1].any()
  assert load[:, :-1].any(axis=0).all()


@pytest.mark.full
@pytest.mark.parametrize("name, way", [("expert-8", "exchange"), ("expert_fsdp", "gather"), ("pipeline", "ragged")])
def test_20_steps_equal_a_single_device(name: str, way: str):
  """Losses and loads, with the biases that follow the loads; in two parts, where the single device has one."""
  make = functools.partial(program_of, variant="documents", model__router="sigmoid_bias", model__router_bias_rate=0.01)
  ours = trained(laid_out(LAYOUTS[name], make(way, accumulation=2), **schedule_of(name)), STEPS, BATCH)
  alone = trained(laid_out(layout_of("single"), make("auto")), STEPS, BATCH)
  for metric in ("loss", "balance_loss", "router_z_loss", "router_entropy", "load_max", "idle_experts", "load"):
    np.testing.assert_allclose(ours[metric], alone[metric], rtol=PARITY, err_msg=metric)
  assert len(set(ours["loss"])) == STEPS


@pytest.mark.full
@pytest.mark.parametrize(
  "name, fields", [("expert_fsdp", {"optimizer__on_host": True}), ("two_d", {"optimizer__name": "muon"})]
)
def test_10_steps_of_a_mixture_with_dense_blocks_equal_a_single_device(name: str, fields: dict):
  """With the optimizer's state in the host's memory, which a single device does not have, and with whole matrices."""
  make = functools.partial(program_of, variant="dense first", model__router="sigmoid_bias")
  ours = trained(laid_out(LAYOUTS[name], make("gather", **fields)), 10, BATCH)
  alone = trained(laid_out(layout_of("single"), make("auto", **fields | {"optimizer__on_host": False})), 10, BATCH)
  for metric in ("loss", "grad_norm", "balance_loss", "load_max", "idle_experts"):
    np.testing.assert_allclose(ours[metric], alone[metric], rtol=PARITY, err_msg=metric)


@pytest.mark.full
def test_a_mixture_with_dense_blocks_resumes_under_another_strategy(tmp_path: Path):
  """The loss of a run that goes on, with its state in other pieces, is that of a run that was never stopped."""
  run = {
    **SMALL, **OTHERS["dense first"], "steps": 4, "batch_size": 8, "log_every": 1, "eval_examples": 8,
    "eval_batch_size": 8, "sample_length": 0, "data__name": "synthetic",
  }  # fmt: skip
  train.train(config("single", **run), tmp_path / "whole")
  train.train(config("expert_fsdp", **run, stop_after=2), tmp_path / "parts")
  train.train(config("two_d", **run), tmp_path / "parts")
  whole, parts = (
    [line["loss"] for line in measured(tmp_path / name) if "grad_norm" in line] for name in ("whole", "parts")
  )
  assert len(whole) == 4
  np.testing.assert_allclose(parts, whole, rtol=PARITY)
  with one_sentence("model.dense_layers was 2 and is now 1"):
    train.train(config("two_d", **run | {"model__dense_layers": 1}), tmp_path / "parts")


def test_devices_that_write_the_same_texts_have_the_same_tokens_and_send_none():
  """Those that train have other ones, and so have those that score."""
  same = lambda sharding: sharding.shards("batch", among="experts") == 1
  for name in ("expert-4", "expert_fsdp", "two_d", "context"):
    layout = LAYOUTS[name]
    outside = Constraints.outside(layout, Transfers.of(layout))
    inside = Constraints.inside(layout, Transfers.of(layout), width=64)
    assert same(outside.place(batch=None))
    assert not same(outside)
    assert not same(inside)


@pytest.mark.full
@pytest.mark.parametrize(
  "name, variant", [("expert_fsdp", "text"), ("expert_fsdp", "dense first"), ("pipeline", "dense first")]
)
def test_texts_are_scored_and_continued(name: str, variant: str):
  program = program_of("exchange", variant)
  assert_writes_as(laid_out(LAYOUTS[name], program), laid_out(layout_of("single"), program))


@pytest.mark.parametrize(
  "name, fields, parts",
  [
    ("expert", {"model__experts": 6}, ["mesh.expert=8", "model.experts=6", "use 1, 2, 3 or 6"]),
    ("fsdp", {"mesh__expert": 2}, ["mesh.expert=2", "no 'expert' axis"]),
    (
      "pipeline",
      {"model__experts": 8, "model__dense_layers": 1},
      ["mesh.stage=4", "model.depth - model.dense_layers=3", "use mesh.stage=1 or 2"],
    ),
  ],
)
def test_mistakes_get_one_sentence(name: str, fields: dict, parts: list[str]):
  with one_sentence(*parts):
    asked = config(name, **fields)
    strategies.create(asked, settings.program(asked, "cpu"), jax.devices())
