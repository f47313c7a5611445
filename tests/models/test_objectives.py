"""Inputs and objectives combine: a token classifier is tokens × class, without code of its own."""

import jax
import numpy as np
import pytest
from helpers import (
  IMAGES,
  PARITY,
  assert_trees_close,
  initial_state,
  one_sentence,
  params_of,
  program,
  random_batch,
  strategy,
)

from data.synthetic import Synthetic
from models.parameters import bind
from training.program import Program

BATCH = 16


def classifier() -> Program:
  sizes = {"depth": 2, "seq_len": 16, "mlp_width": 64, "classes": 10}
  return program(model__objective="class", **{f"model__{name}": size for name, size in sizes.items()})


def test_a_token_classifier_reads_all_tokens_and_predicts_one_class():
  p = classifier()
  assert {name: field.shape for name, field in p.example_shapes().items()} == {
    "tokens": (16,), "label": (), "segments": (16,), "id": (2,), "mask": (),
  }  # fmt: skip
  params = params_of(p.sizes)
  run = jax.jit(lambda tokens: bind(p.sizes, params)(tokens))
  tokens = np.arange(16)[None]
  logits = run(tokens)
  assert logits.shape == (1, p.sizes.classes)
  changed = run(np.where(tokens == 15, 99, tokens))
  assert np.abs(np.asarray(logits) - changed).max() > 1e-4  # the last token affects the class


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp", "two_d", "three_d"])
def test_a_sharded_token_classifier_equals_a_single_device(name: str):
  p = classifier()
  batch, found = random_batch(p, BATCH), []
  for runner in (strategy(name, p), strategy("single", p)):
    metrics, gradients = runner.gradients(initial_state(runner), runner.shard(batch, BATCH))
    found.append(jax.device_get((metrics["loss"], gradients)))
  assert_trees_close(*found, PARITY)


@pytest.mark.parametrize(
  "fields",
  [
    {"model__objective": "class", "model__classes": 3},
    {"data__packing": "documents"},
    {"data__packing": "documents", "data__prompt_field": "prompt"},
  ],
)
def test_synthetic_data_fits_the_model(fields: dict):
  sizes = program(**fields).sizes
  batch, shapes = Synthetic(sizes, first=0, size=64).read(np.arange(64)), sizes.example_shapes()
  assert {name: (x.shape[1:], x.dtype) for name, x in batch.items()} == {n: f[:2] for n, f in shapes.items()}
  assert all(x.min() >= 0 and x.max() < shapes[name].below for name, x in batch.items())
  steps = np.diff(batch["segments"], axis=1)
  assert (batch["segments"][:, 0] == 1).all()  # and on from there in steps of 1, until the padding
  assert ((steps == 0) | (steps == 1) | (batch["segments"][:, 1:] == 0)).all()
  assert (batch["segments"] == 0).any()
  assert batch["segments"].max() == (4 if sizes.predicts.causal else 1)


def test_a_model_cannot_predict_the_next_token_of_an_image():
  with one_sentence("model.objective='next_token'", "model.inputs='images'", "'class'"):
    program(**IMAGES | {"model__objective": "next_token"})
