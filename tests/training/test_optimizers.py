"""Updates of every optimizer, compared with optax's for one matrix at a time; and moments in bfloat16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import PARITY, assert_trees_close, in_full, one_sentence, program, random_params
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from optax.contrib._muon import scale_by_shape

from training.optimizer import Optimizer
from training.optimizers import OPTIMIZERS
from training.optimizers.rounding import rounded_at_random, stored
from training.program import Program

STEPS = 3
# Five iterations make small singular values up to 500 times larger, and so what is rounded in them.
TOLERANCE = {"muon": 10 * PARITY}


def small(**fields: Any) -> Program:
  sizes = {"width": 32, "depth": 3, "heads": 8, "kv_heads": 4, "mlp_width": 48, "seq_len": 16, "vocab_size": 64}
  return program(**{f"model__{name}": size for name, size in sizes.items()} | {"optimizer__warmup": 0} | fields)


MIXTURE = {"model__experts": 4, "model__expert_width": 24, "model__shared_experts": 2}


def matrices(blocks: dict[str, Any]) -> dict[str, Any]:
  """The blocks' weights as stacked matrices, each expert's a matrix of its own, and the scales of norms as they are."""
  attention, mlp = blocks["attention"], blocks["mlp"]
  pair = lambda w, rows: w.reshape(len(w), *((rows, -1)))
  d = attention["query"].shape[1]
  split = {name: pair(attention[name], d) for name in ("query", "key", "value")}
  out = attention["out"].reshape(len(attention["out"]), -1, d)
  apart = {name: mlp[name].reshape(-1, *mlp[name].shape[2:]) for name in ("gate", "up", "down")}
  return blocks | {"attention": split | {"out": out}, "mlp": mlp | apart}


def factored(b2: float) -> optax.GradientTransformation:
  decay = lambda step, _: jnp.minimum(1 - (step + 1.0) ** -0.8, b2)
  rms = optax.scale_by_factored_rms(min_dim_size_to_factor=1, decay_rate_fn=decay)
  return optax.chain(rms, optax.clip_by_block_rms(1.0))


def orthogonal(momentum: float) -> optax.GradientTransformation:
  """Muon of optax, for one matrix. Its own Nesterov momentum corrects a bias, which ours and the original do not."""
  numbers = lambda tree: jax.tree.map(lambda _: MuonDimensionNumbers(), tree)
  return optax.chain(
    optax.trace(momentum, nesterov=True),
    scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers),
    scale_by_shape(weight_dimension_numbers=numbers, consistent_rms=0.2),
  )


adam = lambda o: optax.scale_by_adam(o.b1, o.b2, o.eps)
# For each optimizer, that of a block's matrix, and that of the other weights.
REFERENCES: dict[str, tuple[Callable[[Optimizer], optax.GradientTransformation], ...]] = {
  "adamw": (adam, adam),
  "lion": (lambda o: optax.scale_by_lion(o.b1, o.b2),) * 2,
  "sgd": (lambda o: optax.trace(o.momentum),) * 2,
  "adafactor": (lambda o: factored(o.b2),) * 2,
  "muon": (lambda o: orthogonal(o.momentum), adam),
}


@pytest.mark.parametrize("name", in_full(REFERENCES))  # in make test: test_updates_by_hand.py
def test_updates_equal_optax_for_each_matrix(name: str):
  """Each layer and each expert apart, by `vmap`, with the heads of a matrix as one dimension."""
  p = small(optimizer__name=name, optimizer__clip_norm=0.0, optimizer__weight_decay=0.0, **MIXTURE)
  of_matrices, of_others = (make(p.optimizer) for make in REFERENCES[name])
  params = random_params(p.sizes)
  transform, random = p.rule.transform, np.random.default_rng(0)
  state, update = jax.jit(transform.init)(params), jax.jit(transform.update)
  flat = lambda tree: {"/".join(key.key for key in path): x for path, x in jax.tree.leaves_with_path(tree)}
  shaped = lambda tree: flat(tree | {"blocks": matrices(tree["blocks"])})
  chosen = {
    path: of_matrices if path.startswith("blocks") and x.ndim == 3 else of_others for path, x in shaped(params).items()
  }
  by_layer = {path: jax.vmap if path.startswith("blocks") else (lambda f: f) for path in chosen}
  expected = jax.jit(lambda params: {path: by_layer[path](chosen[path].init)(x) for path, x in params.items()})(
    shaped(params)
  )
  update_each = jax.jit(
    lambda gradients, states: {
      path: by_layer[path](chosen[path].update)(g, states[path], g) for path, g in gradients.items()
    }
  )
  for step in range(STEPS):
    gradients = jax.tree.map(lambda w: random.normal(size=w.shape).astype(np.float32), params)
    updates, state = update(gradients, state, params, key=jax.random.key(step))
    found = update_each(shaped(gradients), expected)
    wanted, expected = ({path: pair[i] for path, pair in found.items()} for i in (0, 1))
    assert_trees_close(shaped(jax.device_get(updates)), wanted, TOLERANCE.get(name, PARITY))


B2, LONG = 0.999, 4000  # steps; the moment is then within 2% of where it goes


def after_constant_gradients(transform: optax.GradientTransformationExtraArgs) -> tuple[jax.Array, jax.Array]:
  """Both moments of Adam after many steps with the same gradients, relative to where they go."""
  gradients = jnp.linspace(0.5, 2.0, 500)
  body = lambda state, step: (transform.update(gradients, state, key=jax.random.key(step))[1], None)
  state = jax.jit(lambda: jax.lax.scan(body, transform.init(gradients), jnp.arange(LONG))[0])()
  return state.mu.astype(jnp.float32) / gradients, state.nu.astype(jnp.float32) / gradients**2


def test_moments_in_bfloat16_follow_those_in_float32():
  """Each within 5%, and their mean within 0.1%. A bfloat16 and the next differ by up to 0.8%.

  Rounding to nearest stops where a step changes less than half of that: at 0.4 of the second moment or below.
  """
  adam = optax.scale_by_adam(b2=B2)
  exact, ours = (after_constant_gradients(stored(adam, dtype)) for dtype in ("float32", "bfloat16"))
  to_nearest = lambda x, key: x.astype(jnp.bfloat16)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("training.optimizers.rounding.rounded_at_random", to_nearest)
    nearest = after_constant_gradients(stored(adam, "bfloat16"))
  for moment in (0, 1):
    assert float(abs(ours[moment] - exact[moment]).max()) < 0.05
    assert float(abs((ours[moment] - exact[moment]).mean())) < 0.001
  assert float(nearest[1].max()) < 0.4


def test_rounding_at_random_keeps_what_bfloat16_can_hold():
  round_ = jax.jit(lambda x: rounded_at_random(x, jax.random.key(0)))
  exact = np.float32([0.0, 1.0, -2.5, 2.0**-100, np.inf, -np.inf, 3.3895314e38])
  found = np.asarray(round_(np.concatenate([exact, [np.nan]], dtype=np.float32)), np.float32)
  np.testing.assert_array_equal(found, [*exact, np.nan])
  third = np.asarray(round_(np.full(30000, 1 + 1 / 384, np.float32)), np.float32)  # between 1 and 1 + 1/128
  assert set(np.unique(third)) == {1.0, 1 + 1 / 128}
  assert float(third.mean()) == pytest.approx(1 + 1 / 384, rel=1e-4)


def test_moments_have_the_dtype_asked_for_whatever_the_weights():
  for name in OPTIMIZERS:
    for moments in ("float32", "bfloat16"):
      p = small(optimizer__name=name, optimizer__moments=moments, model__param_dtype="bfloat16")
      state = jax.eval_shape(p.init, jax.random.key(0))
      after, _ = jax.eval_shape(lambda s, p=p: p.apply_gradients(s, {"loss": 1.0, "count": 1}, s.params), state)
      assert {x.dtype.name for x in jax.tree.leaves(after.opt_state) if x.ndim} == {moments}
      assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_factored_moments_do_not_depend_on_sizes_or_depth():
  """Rows and columns of each layer, also where layers are as many as rows, and in square weights."""
  for depth in (2, 64):
    p = small(optimizer__name="adafactor", model__depth=depth)
    moments = jax.eval_shape(p.init, jax.random.key(0)).opt_state[0].moments["blocks"]
    shapes = jax.tree.map(lambda x: x.shape, moments, is_leaf=lambda x: hasattr(x, "shape"))
    assert shapes["attention"]["query"] == {"rows": (depth, 32), "columns": (depth, 8, 4)}
    assert shapes["attention"]["out"] == {"rows": (depth, 8, 4), "columns": (depth, 32)}
    assert shapes["mlp"]["up"] == {"rows": (depth, 32), "columns": (depth, 48)}
    assert shapes["mlp_norm"]["scale"] == {"all": (depth, 32)}


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"optimizer__name": "moun"}, ["optimizer.name='moun'", "did you mean 'muon'"]),
    (
      {"optimizer__name": "muon", "optimizer__on_host": True},
      ["optimizer.on_host=True", "optimizer.name='muon'", "adamw, lion, sgd"],
    ),
    ({"optimizer__moments": "float16"}, ["optimizer.moments='float16'", "'bfloat16'"]),
    ({"optimizer__momentum": 1.0}, ["optimizer.momentum=1.0"]),
  ],
)
def test_invalid_optimizers_are_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    program(**fields)
