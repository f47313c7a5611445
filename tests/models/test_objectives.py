"""Inputs and objectives combine: a token classifier is tokens × class, without code of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, config, initial_state, one_sentence, program, random_batch, strategy

import data
from models.transformer import bind, init_params
from training.program import Program

BATCH = 16


def classifier() -> Program:
  return program(model__objective="class", model__depth=2, model__seq_len=16, model__mlp_width=64)


def test_a_token_classifier_reads_all_tokens_and_predicts_one_class():
  p = classifier()
  assert {name: shape for name, (shape, _) in p.example_shapes().items()} == {
    "tokens": (16,), "label": (), "id": (2,), "mask": (),
  }  # fmt: skip
  model = bind(p.model, jax.jit(init_params, static_argnums=0)(p.model, jax.random.key(0)))
  tokens = jnp.arange(16)[None]
  logits = model(tokens)
  assert logits.shape == (1, p.model.classes)
  changed = model(tokens.at[0, -1].set(99))
  assert np.abs(logits - changed).max() > 1e-4  # the last token affects the class


@pytest.mark.parametrize("name", ["fsdp", "two_d", "three_d"])
def test_a_sharded_token_classifier_equals_a_single_device(name: str):
  p = classifier()
  batch, found = random_batch(p, BATCH), []
  for runner in (strategy(name, p), strategy("single", p)):
    metrics, gradients = runner.gradients(initial_state(runner), runner.shard(batch, BATCH))
    found.append(jax.device_get((metrics["loss"], gradients)))
  assert_trees_close(*found, PARITY)


def test_synthetic_data_fits_a_token_classifier():
  p = classifier()
  dataset = data.load(config(data__name="synthetic").data, p.model)
  batch = data.Batches(dataset.train, 4).train(0)
  assert {name: (x.shape[1:], x.dtype) for name, x in batch.items()} == p.example_shapes()


def test_a_model_cannot_predict_the_next_token_of_an_image():
  with one_sentence("model.objective='next_token'", "model.inputs='images'", "'class'"):
    program(model__inputs="images")
