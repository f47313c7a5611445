"""Several documents in a row: each is computed as if it were alone, and padding changes nothing."""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  CORES,
  in_full,
  model_sizes,
  params_of,
  program,
  random_batch,
  random_segments,
  relative_difference,
)

from lab.analysis import gpus
from models import parameters, side_inputs
from models.ops import attention
from models.sizes import ModelSizes
from training.program import Program

Core = Callable[..., jax.Array]


def alone(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, segments: np.ndarray) -> jax.Array:
  """Attention that runs each segment of each row by itself."""
  rows = []
  for b, row in enumerate(segments):
    edges = np.flatnonzero(np.diff(row)) + 1
    parts = [jnp.split(x[b : b + 1], edges, axis=1) for x in (q, k, v)]
    rows.append(jnp.concatenate([attention.plain(*part, causal=causal) for part in zip(*parts, strict=True)], axis=1))
  return jnp.concatenate(rows)


def heads_of(rows: int, length: int, size: int) -> tuple[np.ndarray, ...]:
  """Random queries, keys and values."""
  random = np.random.default_rng(0)
  return tuple(random.standard_normal((rows, length, heads, size), np.float32) for heads in (4, 2, 2))


@functools.cache
def with_gradients(core: Core, causal: bool) -> tuple[jax.Array, ...]:
  """Attention over rows of several documents, and its gradients."""
  segments = random_segments(np.random.default_rng(0), 3, 150)
  assert segments[1].max() > 2
  segments[-1] = 0
  run = functools.partial(core, causal=causal, segments=segments)
  gradients = jax.grad(lambda *arrays: jnp.sum(jnp.sin(run(*arrays))), argnums=(0, 1, 2))
  return jax.jit(lambda *arrays: (run(*arrays), *gradients(*arrays)))(*heads_of(3, 150, 8))


@pytest.mark.parametrize(
  "core, causal",
  in_full(itertools.product(CORES, [True, False]), ("plain", False), ("blockwise", False), ("splash", True)),
)
def test_attention_stays_in_its_segment(core: str, causal: bool):
  """Three blocks of queries. The last row is padding only."""
  for ours, expected in zip(with_gradients(CORES[core], causal), with_gradients(alone, causal), strict=True):
    assert relative_difference(ours, expected) < 1e-5  # which also refuses NaN


def test_positions_restart_in_each_segment():
  segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 0, 0, 3]])
  np.testing.assert_array_equal(
    jax.jit(side_inputs.positions_in)(segments),
    [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 0, 0, 1, 0]],
  )


@functools.cache
def logits_of(sizes: ModelSizes) -> Callable[..., jax.Array]:
  params = params_of(sizes)
  return jax.jit(lambda tokens, segments=None: parameters.bind(sizes, params)(tokens, segments=segments))


def test_a_document_has_the_same_logits_anywhere_in_a_row():
  """Even with angles so large that float32 cannot tell them from their neighbors.

  Rotary attention depends only on distances, so otherwise it would hardly matter where positions begin.
  """
  logits = logits_of(model_sizes(rope_base=1e-20))
  random = np.random.default_rng(0)
  tokens, document, starts = random.integers(0, 256, (4, 32)), random.integers(0, 256, 7), (0, 1, 13, 25)
  segments = np.ones((4, 32), np.int32)
  for row, start in enumerate(starts):
    tokens[row, start : start + 7] = document
    segments[row] += (np.arange(32) >= start) * (start > 0) + (np.arange(32) >= start + 7)
  found = np.asarray(logits(tokens, segments))
  for row, start in enumerate(starts):
    assert relative_difference(found[row, start : start + 7], found[0, :7]) < 1e-5


def test_a_prediction_counts_if_the_next_token_is_of_the_same_document():
  p = program(data__packing="documents", model__seq_len=8)
  batch = {
    "segments": jnp.array([[1, 1, 1, 2, 3, 3, 0, 0, 0], [1] * 9, [1] * 9, [0] * 9]),
    "mask": jnp.array([True, True, False, True]),
    "tokens": jnp.zeros((4, 9), int),
  }
  expected = np.zeros((4, 8), bool)
  expected[0, [0, 1, 4]] = expected[1] = True
  np.testing.assert_array_equal(jax.jit(p.targets)(batch).counted, expected)


def test_with_prompts_a_prediction_counts_if_the_next_token_is_of_a_completion():
  p = program(data__packing="documents", data__prompt_field="prompt", model__seq_len=8)
  batch = {
    "segments": jnp.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9]),
    "completions": jnp.array([[0, 0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1, 1]], bool),
    "mask": jnp.array([True, True]),
    "tokens": jnp.zeros((2, 9), int),
  }
  expected = np.zeros((2, 8), bool)
  expected[0, [1, 2, 4, 5]] = expected[1, [6, 7]] = True  # not 3: document 2 has no prompt, so nothing comes before it
  np.testing.assert_array_equal(jax.jit(p.targets)(batch).counted, expected)


def test_padding_changes_neither_loss_nor_gradient():
  """Whatever its token ids are; and a row that is only padding counts nothing."""
  p = program(data__packing="documents")
  batch = random_batch(p, 4)
  batch["segments"][1] = 0
  other = batch | {"tokens": np.where(batch["segments"] > 0, batch["tokens"], (batch["tokens"] + 1) % 256)}
  assert (other["tokens"] != batch["tokens"]).sum() > 33
  (sums, gradients), (other_sums, other_gradients) = map(gradients_of(p), (batch, other))
  assert int(sums["count"]) == np.sum((np.diff(batch["segments"]) == 0) & (batch["segments"][:, 1:] > 0)) > 0
  jax.tree.map(np.testing.assert_array_equal, (sums, gradients), (other_sums, other_gradients))
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))


def gradients_of(p: Program) -> Callable[..., tuple]:
  params = params_of(p.sizes)
  return jax.jit(lambda batch: p.gradient_sums(params, batch, jnp.int32(0)))


@pytest.mark.parametrize("length", [1, 6, 15])
def test_the_class_of_a_text_does_not_depend_on_padding(length: int):
  logits = logits_of(model_sizes(objective="class", classes=5, seq_len=16))
  random = np.random.default_rng(0)
  tokens = random.integers(0, 256, (2, 16))
  tokens[1, :length] = tokens[0, :length]
  segments = np.tile(np.arange(16) < length, (2, 1)).astype(np.int32)
  expected = np.asarray(logits(tokens[:1, :length]))[0]
  for found in np.asarray(logits(tokens, segments)):
    assert relative_difference(found, expected) < 1e-5


def test_the_class_of_an_empty_text_is_finite():
  p = program(model__objective="class", model__classes=5, model__seq_len=16)
  batch = random_batch(p, 4)
  batch["segments"][:] = 0
  sums, gradients = gradients_of(p)(batch)
  assert float(sums["loss"]) == pytest.approx(4 * np.log(5))  # all logits are 0
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_gets_even_lengths_and_heads_of_eight(causal: bool, documents: bool, monkeypatch: pytest.MonkeyPatch):
  """Its own kernel needs a GPU. Here XLA computes what cuDNN is asked for, after JAX has checked it for training."""
  segments, given = random_segments(np.random.default_rng(0), 4, 33) if documents else None, []
  q, k, v = heads_of(4, 33, 12)
  with gpus.assumed():
    loss = lambda *arrays: jnp.sum(attention.cudnn(*arrays, causal=causal, segments=segments))
    jax.eval_shape(jax.grad(loss), *(array.astype(jnp.bfloat16) for array in (q, k, v)))

  def compute(*arrays: jax.Array, implementation: str, **options: object) -> jax.Array:
    given.extend(array.shape for array in arrays)
    return xla(*arrays, **options)

  xla = jax.nn.dot_product_attention
  monkeypatch.setattr(jax.nn, "dot_product_attention", compute)
  run = lambda core: jax.jit(functools.partial(core, causal=causal, segments=segments))(q, k, v)
  assert relative_difference(run(attention.cudnn), run(attention.plain)) < 1e-5
  assert {(length, size) for _, length, _, size in given} == {(34, 16)}
