"""Weights stored in bfloat16: small changes count in the mean, sums are in float32, and layers may come one by one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import config, in_full, measured, program, random_batch, random_params

import strategies
import train
from models.dimensions import Sharding
from models.keys import Purpose
from strategies.execution.mesh import on_mesh
from training.optimizers import OPTIMIZERS
from training.optimizers.rounding import rounded_as, words_of_keys
from training.program import Params, Program, TrainState

SIZES = {"width": 32, "depth": 4, "heads": 4, "kv_heads": 4, "mlp_width": 32, "seq_len": 16, "vocab_size": 64}
SIZES = {f"model__{name}": size for name, size in SIZES.items()}


def small(**fields: Any) -> Program:
  plain = {"optimizer__warmup": 0, "optimizer__clip_norm": 0.0, "model__param_dtype": "bfloat16"}
  return program(**SIZES | plain | fields)


LONG, RATE, DECAY = 300, 1e-4, 1.0


@pytest.mark.parametrize("name", in_full(OPTIMIZERS, "adamw"))
def test_decay_alone_moves_weights_and_small_gradients_the_scales_of_norms(name: str):
  """In the mean. Each step takes a share of 1e-4, less than half of a last bit, which rounding to nearest would lose.

  Gradients of matrices are zero, and no optimizer makes anything of that. Those of scales are one.
  """
  p = small(steps=LONG, **{f"optimizer__{field}": value for field, value in {
    "learning_rate": RATE, "weight_decay": DECAY, "final_fraction": 1.0, "name": name,
  }.items()})  # fmt: skip
  before, is_scale = random_params(p.sizes), lambda path: path[-1].key == "scale"
  gradients = jax.tree.map_with_path(lambda path, w: np.full(w.shape, is_scale(path), np.float32), before)

  @jax.jit
  def after(params: Params) -> Params:
    state = TrainState(jnp.zeros((), jnp.int32), params, p.rule.transform.init(params))
    step = lambda state, _: (p.apply_gradients(state, p.no_sums(0) | {"count": 1}, gradients)[0], None)
    return jax.lax.scan(step, state, length=LONG)[0].params

  found, moved = jax.device_get(after(before)), []
  for (path, w), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(found), strict=True):
    w, new = (np.asarray(x, np.float64) for x in (w, new))
    if is_scale(path):
      moved.append(w - new)
    else:
      assert np.sum(w * new) / np.sum(w * w) == pytest.approx((1 - RATE * DECAY) ** LONG, abs=3e-3), path
  kept = p.optimizer.momentum if name == "sgd" else 0  # the others step by the rate, however large the gradient is
  steps = sum((1 - kept**t) / (1 - kept) for t in range(1, LONG + 1))
  assert np.mean(np.concatenate([x.ravel() for x in moved])) == pytest.approx(RATE * steps, rel=0.1)


def test_each_element_is_rounded_by_a_number_of_its_own():
  """Numbers are evenly spread, and those of neighbours, layers, weights and steps are independent."""
  old = {name: {"w": np.zeros((3, 64, 128), jnp.bfloat16)} for name in ("blocks", "head")}
  half = jax.tree.map(lambda w: np.full(w.shape, 1 + 2.0**-8, np.float32), old)  # between 1 and 1 + 2^-7

  @jax.jit
  def rounded(step: int) -> Params:
    key = Purpose.WEIGHT_ROUNDING.key(jax.random.key(0))
    return jax.tree.map(rounded_as, old, half, words_of_keys(old, jax.random.fold_in(key, step), ["blocks"]))

  up = np.stack([np.asarray(x, np.float32) > 1 for step in (0, 1) for x in jax.tree.leaves(rounded(step))])
  sign = np.where(up, 1.0, -1.0)  # [2 steps × 2 weights, 3 layers, rows, columns]
  apart = {
    "rows": (sign[:, :, 1:], sign[:, :, :-1]), "columns": (sign[..., 1:], sign[..., :-1]),
    "layers": (sign[:, 1:], sign[:, :-1]), "weights": (sign[::2], sign[1::2]), "steps": (sign[:2], sign[2:]),
  }  # fmt: skip
  assert abs(sign.mean(axis=(2, 3))).max() < 4 / (64 * 128) ** 0.5
  for what, (a, b) in apart.items():
    assert abs(np.mean(a * b)) < 4 / a.size**0.5, what


def test_rounding_keeps_the_mean_and_what_bfloat16_can_hold():
  exact = np.float32([0.0, 1.0, -2.5, 2.0**-100, np.inf, -np.inf, 3.3895314e38, np.nan])
  third = np.full(30000, 1 + 1 / 384, np.float32)  # between 1 and 1 + 1/128
  given = {"a": exact, "b": third}
  old = jax.tree.map(lambda x: x.astype(jnp.bfloat16), given)
  found = jax.jit(lambda new: jax.tree.map(rounded_as, old, new, words_of_keys(old, jax.random.key(0), [])))(given)
  np.testing.assert_array_equal(np.asarray(found["a"], np.float32), exact)
  b = np.asarray(found["b"], np.float32)
  assert set(np.unique(b)) == {1.0, 1 + 1 / 128}
  assert float(b.mean()) == pytest.approx(1 + 1 / 384, rel=1e-4)


@pytest.mark.parametrize("parts", in_full([1, 512, 1024], 1, 512))
def test_gradients_are_summed_and_divided_in_float32(parts: int):
  """Added up in bfloat16, a sum would stop at 256 times a part. No bfloat16 is 1,023, nor a 1,023rd of another one."""
  p = small(accumulation=parts)
  shape = jax.eval_shape(p.init, jax.random.key(0)).params
  part = lambda *_: (p.no_sums(0), jax.tree.map(lambda w: jnp.full(w.shape, 0.01, w.dtype), shape))
  batch = {name: np.zeros((parts, *field.shape), field.dtype) for name, field in p.example_shapes().items()}

  @jax.jit
  def norm() -> jax.Array:
    _, gradients = p.gradient_sums(shape, jax.tree.map(jnp.asarray, batch), jnp.int32(0), of_part=part)
    return p.apply_gradients(p.init(jax.random.key(0)), p.no_sums(0) | {"count": 1023}, gradients)[1]["grad_norm"]

  each = float(jnp.bfloat16(0.01)) * parts / 1023
  size = sum(w.size for w in jax.tree.leaves(shape))
  assert float(norm()) == pytest.approx(each * size**0.5, rel=1e-5)


def test_the_biases_of_routers_do_not_stop():
  """From 0.5 on, a bfloat16 and the next differ by 0.0039, and to nearest a step of 0.001 would do nothing."""
  p = small(model__experts=4, model__router="sigmoid_bias", model__router_bias_rate=1e-3)
  mlp = jax.eval_shape(p.init, jax.random.key(0)).params["blocks"]["mlp"]
  load = np.tile(np.int32([4, 0, 2, 2]), (4, 1))
  params = {"blocks": {"mlp": {"bias": np.full(mlp["bias"].shape, 0.6, mlp["bias"].dtype)}}}
  after = jax.jit(
    lambda params: jax.lax.scan(lambda x, _: (p.updated(x, {"load": load}, jnp.bool_(True)), None), params, length=100)[
      0
    ]
  )(params)
  np.testing.assert_allclose(after["blocks"]["mlp"]["bias"], np.tile([0.5, 0.7, 0.6, 0.6], (4, 1)), atol=1e-5)
  assert mlp["router"].dtype == jnp.bfloat16


@pytest.mark.full
@pytest.mark.parametrize("name, devices", [("single", 1), ("fsdp", 7), ("tensor_parallel", 7), ("two_d", 6)])
def test_an_embedding_adds_up_gradients_in_float32(name: str, devices: int):
  """One id stands in half of all places, over 5,000. In bfloat16, a device alone would keep a tenth of its sum.

  A device's sum is rounded once, and again when those of all devices are added up: by at most 2^-8 each time.
  """
  each = {7: 14, 6: 12}.get(devices, 8)
  sizes = {"width": 112, "heads": each, "kv_heads": each, "head_dim": 4, "mlp_width": 168, "vocab_size": 97}
  fields = {"model__dtype": "bfloat16", "model__param_dtype": "bfloat16"}
  p = program(**fields, **{f"model__{name}": size for name, size in sizes.items()})
  runner = strategies.create(config(name), p, jax.devices()[:devices])
  random = np.random.default_rng(0)
  ids = random.integers(0, 97, (168, 64)).astype(np.int32)
  ids[:, ::2] = 5
  table = random.standard_normal((97, 112)).astype(jnp.bfloat16)
  cotangent = (1 + 0.1 * random.standard_normal((168, 64, 112))).astype(jnp.bfloat16)

  @jax.jit
  def rows(table: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    found, transpose = jax.vjp(lambda table: p.sizes.reads.embed(table, ids, runner.runner.sharding), table)
    return found, transpose(cotangent)[0]

  with on_mesh(runner.mesh):
    found, gradient = jax.device_get(rows(table, cotangent))
  expected = np.zeros((97, 112))
  np.add.at(expected, ids, cotangent.astype(np.float64))
  np.testing.assert_array_equal(found, table[ids])
  np.testing.assert_allclose(gradient.astype(np.float64), expected, rtol=1.001 * (2**-8 if devices == 1 else 2**-7))


@pytest.mark.full
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_frequent_id_keeps_its_gradient_in_bfloat16(stored: str):
  """In a batch of 1,024 places that all have one id. What is left of a distance from float32 is that of rounding."""

  def gradient(dtype: str, stored: str) -> np.ndarray:
    p = small(model__dtype=dtype, model__param_dtype=stored)
    batch = random_batch(p, 64)
    batch["tokens"] = np.where(np.arange(17) < 16, 5, batch["tokens"])
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(stored), random_params(p.sizes))
    found = jax.jit(lambda params: p.part_gradient_sums(params, batch, 0)[1])(params)
    return jax.tree.map(lambda g: np.asarray(g, np.float64), found)

  exact, ours = gradient("float32", "float32"), gradient("bfloat16", stored)
  apart = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), ours, exact)
  assert 0 < apart["embedding"] < 0.02, apart


@pytest.mark.full
@pytest.mark.parametrize("pieces", [1, 2])
def test_layers_that_are_updated_one_by_one_are_rounded_as_all_at_once(pieces: int):
  """With the optimizer's state in the host's memory; `pieces` are those of stages."""
  p = small()
  on_host = dataclasses.replace(p, optimizer=dataclasses.replace(p.optimizer, on_host=True))

  class Stages(Sharding):
    def shards(self, dim: str, among: str | None = None) -> int:
      return pieces if dim == "layers" else 1

  def after(params: Params, gradients: Params, p: Program) -> Params:
    moments = p.rule.transform.init(params)
    if p.optimizer.on_host:
      moments = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, moments)
    state, sums = TrainState(jnp.zeros((), jnp.int32), params, moments), p.no_sums(0) | {"count": 1}
    return p.apply_gradients(state, sums, gradients, Stages())[0].params

  params, random = random_params(p.sizes), np.random.default_rng(0)
  gradients = jax.tree.map(lambda w: random.normal(size=w.shape).astype(np.float32), params)
  ours, expected = (jax.device_get(jax.jit(after, static_argnums=2)(params, gradients, p)) for p in (on_host, p))
  jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.full
def test_200_steps_end_within_a_percent_of_float32(tmp_path):
  run = functools.partial(config, steps=200, eval_every=0, log_every=100, sample_length=0)
  losses = {}
  for dtype in ("float32", "bfloat16"):
    train.train(run(model__param_dtype=dtype, optimizer__learning_rate=3e-4), tmp_path / dtype)
    losses[dtype] = measured(tmp_path / dtype)[-1]["loss"]
  assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)
