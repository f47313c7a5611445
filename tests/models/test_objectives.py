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
NUMBERS = {
  "model__inputs": "features", "model__objective": "regression", "model__features": 10, "model__outputs": 3,
  "model__depth": 2, "model__seq_len": 16,
}  # fmt: skip


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
    NUMBERS,
  ],
)
def test_synthetic_data_fits_the_model(fields: dict):
  sizes = program(**fields).sizes
  batch, shapes = Synthetic(sizes, first=0, size=64).read(np.arange(64)), sizes.example_shapes()
  assert {name: (x.shape[1:], x.dtype) for name, x in batch.items()} == {n: f[:2] for n, f in shapes.items()}
  whole = {name: x for name, x in batch.items() if shapes[name].below is not None}
  assert all(x.min() >= 0 and x.max() < shapes[name].below for name, x in whole.items())
  if not sizes.segments:
    assert all(np.isfinite(x).all() and x.min() < 0 < x.max() for x in batch.values())
    return
  steps = np.diff(batch["segments"], axis=1)
  assert (batch["segments"][:, 0] == 1).all()  # and on from there in steps of 1, until the padding
  assert ((steps == 0) | (steps == 1) | (batch["segments"][:, 1:] == 0)).all()
  assert (batch["segments"] == 0).any()
  assert batch["segments"].max() == (4 if sizes.predicts.causal else 1)


def test_a_regression_sums_the_errors_of_all_numbers_that_count():
  """Against the predictions of the model itself, example by example. The gradient of the head is that of the mean."""
  p = program(**NUMBERS)
  params, batch = params_of(p.sizes), random_batch(p, 5)
  batch["mask"] = np.array([1, 1, 0, 1, 1], bool)
  sums, gradients = jax.device_get(jax.jit(p.gradient_sums)(params, batch, np.int32(0)))
  predicted = np.asarray(jax.jit(lambda x: bind(p.sizes, params)(x))(batch["features"]), np.float64)
  errors = (predicted - batch["target"])[batch["mask"]]
  assert errors.shape == (4, 3)
  assert sums["count"] == 12
  assert sums["loss"] == pytest.approx((errors**2).sum(), rel=PARITY)
  assert sums["absolute_error"] == pytest.approx(np.abs(errors).sum(), rel=PARITY)
  # Of another head, the loss differs by the gradient times the change.
  change = 1e-3 * np.random.default_rng(0).standard_normal(params["head"].shape)
  loss = jax.jit(lambda head: p.loss_sums(params | {"head": head}, batch, np.int32(0))[0])
  up, down = (float(loss((params["head"] + sign * change).astype(np.float32))) for sign in (1, -1))
  assert up - down == pytest.approx(2 * float((gradients["head"] * change).sum()), rel=0.01)


def test_features_of_any_numbers_are_read_as_they_are():
  """Twice the features are twice the embedding, and each position has its own."""
  p = program(**NUMBERS)
  model = bind(p.sizes, params_of(p.sizes))
  x = random_batch(p, 2)["features"]
  embed = jax.jit(model.embed)
  np.testing.assert_allclose(embed(2 * x), 2 * np.asarray(embed(x)), rtol=1e-5)
  expected = np.asarray(x, np.float64) @ np.asarray(params_of(p.sizes)["embedding"], np.float64)
  np.testing.assert_allclose(embed(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"model__features": 0}, ["model.features=0", "set it"]),
    ({"model__outputs": 0}, ["model.outputs=0", "set it"]),
    ({"model__tied_embedding": True}, ["model.tied_embedding=True", "next_token"]),
    ({"model__objective": "next_token"}, ["model.objective='next_token'", "model.inputs='features'"]),
    ({"eval_by_position": True}, ["eval_by_position=True", "model.objective='regression'"]),
  ],
)
def test_a_regression_that_cannot_be_is_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    program(**NUMBERS | fields)


def test_a_model_cannot_predict_the_next_token_of_an_image():
  with one_sentence("model.objective='next_token'", "model.inputs='images'", "'class'"):
    program(**IMAGES | {"model__objective": "next_token"})
