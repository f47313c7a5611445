"""A training step written out in NumPy: sums over parts, clipping, AdamW, the learning rate, the average of weights.

Nothing here is computed with a function of the trainer. So a mistake that all strategies share is found, too.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close

from models.dimensions import UNSHARDED, Sharding
from models.inputs import Field, Shapes
from training.optimizer import Optimizer
from training.program import Batch, Params, Program, Sums, TrainState, Traits

PEAK, WARMUP, STEPS, FINAL, CLIP, DECAY, EMA = 0.1, 2, 6, 0.1, 0.4, 0.3, 0.15
B1, B2, EPS = 0.8, 0.9, 1e-3
IN, OUT, ROWS, PARTS = 3, 2, 12, 3
ERRORS = (4.0, 0.75, 0.25, 0.1)  # of what steps predict
# Part i takes the rows i, i + 3, ...: so 1, 3 and 4 of them count. Means of these parts have another mean than all.
COUNTED = np.array([0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1], bool)


class Line(Program):
  """Predicts x·scale @ kernel + bias. The loss of a row is half of the squared distance."""

  traits = Traits("line")

  def init_params(self, key: jax.Array) -> Params:
    return jax.tree.map(jnp.asarray, start())

  def dims(self) -> dict[str, Any]:
    return {"layer": {"kernel": ("embed", None), "bias": (None,), "scale": (None,)}}

  def fields(self) -> Shapes:
    return {"x": Field((IN,), np.float32), "y": Field((OUT,), np.float32)}

  def no_sums(self, step: jax.Array | None) -> Sums:
    return {"loss": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}

  def loss_sums(
    self, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding = UNSHARDED
  ) -> tuple[jax.Array, Sums]:
    w = params["layer"]
    away = (batch["x"] * w["scale"]) @ w["kernel"] + w["bias"] - batch["y"]
    loss = jnp.sum(jnp.where(batch["mask"], jnp.sum(away**2, axis=1) / 2, 0))
    return loss, {"loss": loss, "count": jnp.sum(batch["mask"], dtype=jnp.int32)}


def start() -> Params:
  random = np.random.default_rng(0)
  shapes = {"kernel": (IN, OUT), "bias": (OUT,), "scale": (IN,)}
  return {"layer": {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}}


def batch(step: int) -> dict[str, np.ndarray]:
  """The later the step, the smaller its errors: the first gradients are clipped, the last are not."""
  random, w = np.random.default_rng(step), start()["layer"]
  x = random.standard_normal((ROWS, IN)).astype(np.float32)
  y = (x * w["scale"]) @ w["kernel"] + w["bias"] + np.float32(ERRORS[step]) * random.standard_normal((ROWS, OUT))
  return {"x": x, "y": y.astype(np.float32), "id": np.zeros((ROWS, 2), np.uint32), "mask": COUNTED}


def by_hand(w: dict[str, np.ndarray], of: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
  """The mean loss of the rows that count, and its gradient."""
  x, y = (np.float64(of[name])[COUNTED] for name in "xy")
  away = (x * w["scale"]) @ w["kernel"] + w["bias"] - y
  of_x = away @ w["kernel"].T
  sums = {"kernel": (x * w["scale"]).T @ away, "bias": away.sum(axis=0), "scale": (of_x * x).sum(axis=0)}
  return float((away**2).sum() / 2 / len(x)), {name: g / len(x) for name, g in sums.items()}


def rate_by_hand(step: int) -> float:
  """In a line from a third of the peak, which step 2 has, then half a cosine down to a tenth of it at step 6."""
  if step < WARMUP:
    return PEAK * (step + 1) / (WARMUP + 1)
  return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2)


def program(**fields: Any) -> Line:
  settings = {
    "learning_rate": PEAK, "schedule": "cosine", "warmup": WARMUP, "steps": STEPS, "final_fraction": FINAL,
    "decay_fraction": 0.2, "b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "clip_norm": CLIP, "name": "adamw",
    "momentum": 0.9, "moments": "float32", "on_host": False, "ema": EMA,
  }  # fmt: skip
  return Line(optimizer=Optimizer(**(settings | fields)), seed=0, accumulation=PARTS)


@functools.partial(jax.jit, static_argnums=0)
def step_of(p: Line, state: TrainState, given: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
  return p.apply_gradients(state, *p.gradient_sums(state.params, given, state.step))


def test_four_steps_equal_those_by_hand():
  p, w = program(), {name: np.float64(x) for name, x in start()["layer"].items()}
  like = lambda value=0.0: {name: np.full_like(x, value) for name, x in w.items()}
  m, v, mean, norms = like(), like(), dict(w), []
  moments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), p.abstract_state().opt_state)
  state = TrainState(np.zeros((), np.int32), start(), moments._replace(ema=start()))
  for t in range(4):
    loss, g = by_hand(w, batch(t))
    norms.append(math.sqrt(sum((x**2).sum() for x in g.values())))
    for name, x in g.items():
      x = x * min(1.0, CLIP / norms[-1])
      m[name] = B1 * m[name] + (1 - B1) * x
      v[name] = B2 * v[name] + (1 - B2) * x**2
      change = m[name] / (1 - B1 ** (t + 1)) / (np.sqrt(v[name] / (1 - B2 ** (t + 1))) + EPS)
      if name == "kernel":  # neither biases nor the scales of norms are decayed
        change = change + DECAY * w[name]
      w[name] = w[name] - rate_by_hand(t) * change
      share = 1 - min(EMA, (1 + t) / (10 + t))
      mean[name] = mean[name] + share * (w[name] - mean[name])
    state, metrics = step_of(p, state, batch(t))
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5), f"the loss of step {t}"
    assert float(metrics["grad_norm"]) == pytest.approx(norms[-1], rel=1e-4), f"the gradient of step {t}"
    assert float(metrics["learning_rate"]) == pytest.approx(rate_by_hand(t), rel=1e-5), f"the rate of step {t}"
    assert_trees_close(state.params["layer"], w, 1e-5)
    assert_trees_close(p.averaged(jax.device_get(state))["layer"], mean, 1e-5)
  assert int(state.step) == 4
  assert norms[0] > 2 * CLIP > norms[1] > CLIP > norms[3], "steps with and without clipping are tested"
