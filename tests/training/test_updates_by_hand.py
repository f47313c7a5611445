"""Updates of the optimizers, and rounding at random, written out in NumPy: one small program compares them all."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_trees_close

from training.optimizer import Optimizer
from training.optimizers import OPTIMIZERS
from training.optimizers.muon import flops
from training.optimizers.rounding import hashed, rounded_as

B1, B2, EPS, MOMENTUM = 0.8, 0.9, 1e-3, 0.7
SETTINGS = Optimizer(
  learning_rate=0.1, schedule="constant", warmup=0, steps=2, final_fraction=0.0, decay_fraction=0.0, b1=B1, b2=B2,
  eps=EPS, weight_decay=0.0, clip_norm=0.0, name="adamw", momentum=MOMENTUM, moments="float32", on_host=False, ema=0.0,
)  # fmt: skip
# Each as the stacked matrices [stack, rows, columns] that it is made of, and how its shape is made of those: in a wide
# and a tall one, in those of experts, and in what is no matrix of a block.
MATRICES = {"query": (2, 4, 6), "out": (2, 6, 4), "experts": (6, 4, 5), "scale": None, "embedding": None, "norm": None}
WEIGHTS: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
  "query": ((2, 4, 3, 2), ("layers", "embed", "heads", None)),
  "out": ((2, 3, 2, 4), ("layers", "heads", None, "embed")),
  "experts": ((2, 3, 4, 5), ("layers", "experts", "embed", "mlp")), "scale": ((2, 4), ("layers", None)),
  "embedding": ((7, 4), ("vocab", "embed")), "norm": ((4,), (None,)),
}  # fmt: skip
SHAPES, DIMS = ({name: each[i] for name, each in WEIGHTS.items()} for i in (0, 1))
STEPS = 2
NAMES = ("adafactor", "lion", "muon", "sgd")


def gradients(step: int) -> dict[str, np.ndarray]:
  """Those of the second step are larger, so that Adafactor makes its updates smaller. An expert had no tokens."""
  random = np.random.default_rng(step)
  found = {name: random.standard_normal(shape) * 4**step for name, shape in SHAPES.items()}
  found["experts"][1, 2] = 0
  return {name: x.astype(np.float32) for name, x in found.items()}


WORDS = np.array([[3, 2**31], [77, 5]], np.uint32)  # of two layers
OLD = np.zeros((2, 3, 5), jnp.bfloat16)
NEW = np.random.default_rng(7).standard_normal(OLD.shape).astype(np.float32)
NEW[0, 0, :3] = np.inf, -np.inf, 3.38e38


@jax.jit
def everything(of_steps: list[Any], words: jax.Array, new: jax.Array) -> dict[str, Any]:
  found: dict[str, Any] = {name: [] for name in NAMES}
  for name in NAMES:
    rule = OPTIMIZERS[name](SETTINGS, DIMS, "float32")
    state = rule.transform.init(of_steps[0])
    for given in of_steps:
      updates, state = rule.transform.update(given, state, given)
      found[name].append(updates)
  low, high = hashed(words, OLD.shape), hashed(words[0], OLD.shape)
  return found | {"hashed": (low, high), "rounded": rounded_as(jnp.asarray(OLD), new, words)}


def stacked(name: str, g: np.ndarray) -> np.ndarray:
  """A gradient as stacked matrices; what is no block's matrix is one, or for `scale` one row for each layer."""
  shape = MATRICES[name] or {"scale": (2, 1, 4), "norm": (1, 1, 4), "embedding": (1, 7, 4)}[name]
  return np.float64(g).reshape(shape)


def adafactor(name: str) -> list[np.ndarray]:
  found, rows, columns, whole = [], 0.0, 0.0, 0.0
  for step in range(STEPS):
    g = stacked(name, gradients(step)[name])
    decay = min(1 - (step + 1) ** -0.8, B2)
    mixed = lambda old, axis, g=g, decay=decay: decay * old + (1 - decay) * (g**2 + 1e-30).mean(axis, keepdims=True)
    rows, columns, whole = mixed(rows, 2), mixed(columns, 1), mixed(whole, ())
    is_matrix = name not in ("scale", "norm")
    second = rows / rows.mean(1, keepdims=True) * columns if is_matrix else whole
    update = g / np.sqrt(second)
    found.append(update / np.maximum(1, np.sqrt((update**2).mean((1, 2), keepdims=True))))
  return found


def lion(name: str) -> list[np.ndarray]:
  first, second = (np.float64(gradients(step)[name]) for step in range(STEPS))
  return [np.sign(first), np.sign(B1 * (1 - B2) * first + (1 - B1) * second)]


def sgd(name: str) -> list[np.ndarray]:
  first, second = (np.float64(gradients(step)[name]) for step in range(STEPS))
  return [first, second + MOMENTUM * first]


def muon(name: str) -> list[np.ndarray]:
  if MATRICES[name] is None:
    return adam(name)
  found = []
  for moment, g in zip(sgd(name), (gradients(step)[name] for step in range(STEPS)), strict=True):
    x = stacked(name, g + MOMENTUM * moment)
    x = x / (np.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-8)
    for _ in range(5):
      square = x @ x.swapaxes(1, 2)
      x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    found.append(0.2 * math.sqrt(max(x.shape[1:])) * x)
  return found


def adam(name: str) -> list[np.ndarray]:
  m = v = 0.0
  found = []
  for step in range(STEPS):
    g = np.float64(gradients(step)[name])
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
    found.append(m / (1 - B1 ** (step + 1)) / (np.sqrt(v / (1 - B2 ** (step + 1))) + EPS))
  return found


def mixed(number: int) -> int:
  """The finalizer of MurmurHash3 (`fmix32`)."""
  number = (number ^ number >> 16) * 0x85EBCA6B % 2**32
  number = (number ^ number >> 13) * 0xC2B2AE35 % 2**32
  return number ^ number >> 16


def test_two_steps_of_every_optimizer_equal_those_by_hand():
  found = jax.device_get(everything([gradients(step) for step in range(STEPS)], WORDS, NEW))
  for optimizer, by_hand in {"adafactor": adafactor, "lion": lion, "muon": muon, "sgd": sgd}.items():
    for name, shape in SHAPES.items():
      wanted = [x.reshape(shape) for x in by_hand(name)]
      assert_trees_close([each[name] for each in found[optimizer]], wanted, 1e-4)

  # The place of an element within its layer, then each word of the layer's key.
  by_layer = [[mixed(mixed(place ^ int(a)) ^ int(b)) & 0xFFFF for place in range(15)] for a, b in WORDS]
  whole = [mixed(mixed(place ^ int(WORDS[0, 0])) ^ int(WORDS[0, 1])) & 0xFFFF for place in range(30)]
  np.testing.assert_array_equal(found["hashed"][0].ravel(), np.ravel(by_layer))
  np.testing.assert_array_equal(found["hashed"][1].ravel(), whole)

  bits = NEW.view(np.uint32).ravel() + np.ravel(by_layer).astype(np.uint32)
  carried = (bits >> 16 << 16).view(np.float32)
  wanted = np.where(np.isfinite(NEW.ravel()), carried, NEW.ravel())
  np.testing.assert_array_equal(np.float32(found["rounded"]).ravel(), wanted)


def test_flops_of_five_iterations():
  """A matrix of 4 × 6: products 4 × 6 × 4 and 4 × 4 × 6, and one of 4 × 4 × 4; two FLOPs each time."""
  assert flops(4, 6) == flops(6, 4) == 5 * 2 * (4 * 6 * 4 + 4 * 4 * 6 + 4 * 4 * 4)
