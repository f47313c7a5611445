"""No two random numbers of a run come from the same key, whatever they are for."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import IMAGES, in_full, program, random_batch

from models.generate import Sampling, TextWriter, generate
from models.parameters import bind
from training.optimizers import rounding
from training.program import TrainState

EXAMPLES = 3
DRAWS, MAKES_KEYS = ("normal", "bernoulli", "randint", "bits", "categorical", "hashed"), ("fold_in", "split")
SMALL = {
  "model__width": 16, "model__depth": 3, "model__heads": 2, "model__kv_heads": 2, "model__mlp_width": 8,
  "model__vocab_size": 8, "model__seq_len": 8,
}  # fmt: skip
# Everything that is random while a model trains: dropout, augmentation, rounding and the adapters' weights.
ALL = IMAGES | SMALL | {
  "data__augment": True, "model__dropout": 0.1, "model__image_size": 4, "model__patch_size": 2,
  "optimizer__moments": "bfloat16", "model__param_dtype": "bfloat16", "init_from": "a model",
  "model__lora_rank": 1, "model__lora_targets": "query,up",
}  # fmt: skip


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter]:
  """Counts, for each function of `jax.random`, how often programs that run call it with each key."""
  found = {name: Counter() for name in (*DRAWS, *MAKES_KEYS)}

  def counted(function: Callable[..., Any], counter: Counter) -> Callable[..., Any]:
    def call(key: jax.Array, *args: Any, **options: Any) -> Any:
      words = key if function is rounding.hashed else jax.random.key_data(key)
      jax.debug.callback(lambda words: counter.update(map(tuple, words.reshape(-1, 2).tolist())), words)
      return function(key, *args, **options)

    return call

  for name, counter in found.items():
    module = rounding if name == "hashed" else jax.random
    monkeypatch.setattr(module, name, counted(getattr(module, name), counter))
  return found


@pytest.mark.parametrize("seeds, steps", in_full([(2, 8), (4, 25)], (2, 8)))
def test_no_random_key_is_used_twice(seeds: int, steps: int, uses: dict[str, Counter]):
  """For several seeds and many steps. A key that others are made from is not drawn from, or numbers would repeat."""
  trained, text = program(**ALL), program(**SMALL)
  batch = random_batch(trained, EXAMPLES) | {"id": jnp.array([[0, 0], [1, 0], [0, 1]], jnp.uint32)}

  @jax.jit
  def at_first(seed: jax.Array) -> tuple[TrainState, jax.Array]:
    root = jax.random.key(seed)
    params = jax.tree.map(jnp.zeros_like, jax.eval_shape(text.init, root).params)
    writer = TextWriter(bind(text.sizes, params), Sampling())
    return trained.init(root), generate(writer, jnp.zeros((EXAMPLES, 1), int), length=4, key=root)

  @jax.jit
  def at_step(seed: jax.Array, state: TrainState) -> TrainState:
    seeded = dataclasses.replace(trained, seed=seed)
    _, sums = seeded.loss_sums(state.params, batch, state.step)
    return seeded.apply_gradients(state, sums, trained.trained(state.params))[0]

  for seed in range(seeds):
    state, _ = at_first(seed)
    for _ in range(steps):
      state = at_step(seed, state)
  jax.effects_barrier()
  assert all(uses.values())  # all kinds of numbers were drawn
  drawn, parents = (sum((uses[name] for name in names), Counter()) for names in (DRAWS, MAKES_KEYS))
  assert {key for key, count in drawn.items() if count > 1} == set()
  assert drawn.keys() & parents.keys() == set()
