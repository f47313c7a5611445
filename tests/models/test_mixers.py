"""Mixers and MLPs by name: the recurrence against a loop, its cache, one of a user's own, and what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
  assert_trees_close,
  config,
  initial_state,
  logits_in_parts,
  model_sizes,
  one_sentence,
  params_of,
  program,
  random_batch,
  relative_difference,
  strategy,
)

from checkpointing.pretrained import families
from lab.analysis import predict
from lab.analysis.case import Case
from lab.analysis.compiled import compile_step
from models import mixers, mlps, parameters
from models.dimensions import UNSHARDED
from models.flops import palm_flops_per_example, train_flops_per_example
from models.generate import Sampling, TextWriter
from models.ops.layers import linear, weight
from models.ops.recurrence import states
from reporting import summary

RECURRENT = {"mixer": "recurrence"}
OWN = {"model__mixer": "shift", "model__mlp": "relu", "data__packing": "documents"}
FORK = Path(__file__).parents[2] / "docs/fork.md"


class Relu(nnx.Module):
  """An MLP without a gate."""

  products, adapted = ("mlp_up", "mlp_output"), ()

  def __init__(self, sizes: Any, rngs: nnx.Rngs, hidden: int = 0):
    d, f, dtype = sizes.width, hidden or sizes.mlp_width, sizes.param_dtype
    self.up = weight(rngs.weights, (d, f), ("embed", "mlp"), std=0.1, dtype=dtype)
    self.down = weight(rngs.weights, (f, d), ("mlp", "embed"), std=0.1, dtype=dtype)

  def __call__(self, x: jax.Array, sharding: Any) -> jax.Array:
    h = jax.nn.relu(linear(sharding.whole_sequence(x), self.up[...], sharding))
    return sharding.split_sequence(linear(h, self.down[...], sharding, flat=False))


@pytest.fixture(autouse=True)
def own_kinds(monkeypatch: pytest.MonkeyPatch):
  """The mixer of docs/fork.md, and an MLP."""
  (code,) = re.findall(r"```python\n(class Shift.*?)```", FORK.read_text(), re.DOTALL)
  monkeypatch.setitem(mixers.MIXERS, "shift", mixers.Mixer)  # so that it is removed again
  exec(code, vars(mixers) | {"__name__": "own"})
  monkeypatch.setitem(mlps.MLPS, "relu", Relu)


def test_the_states_and_their_gradients_are_those_of_a_loop():
  """Also at the beginnings of documents, where a state begins with 0."""
  random = np.random.default_rng(0)
  decay, new, weights = (random.uniform(0, 1, (2, 13, 3, 2)).astype(np.float32) for _ in range(3))
  segments = np.array([[1] * 5 + [2] + [3] * 4 + [0] * 3, [1] * 13])

  def loop(decay: jax.Array, new: jax.Array) -> jax.Array:
    found, state = [], jnp.zeros_like(new[:, 0])
    for t in range(13):
      begins = np.ones(2, bool) if t == 0 else segments[:, t] != segments[:, t - 1]
      state = jnp.where(begins[:, None, None], 0, decay[:, t] * state) + new[:, t]
      found.append(state)
    return jnp.stack(found, axis=1)

  def both(of: Any) -> tuple:
    return jax.jit(jax.value_and_grad(lambda *given: jnp.sum(weights * of(*given)), argnums=(0, 1)))(decay, new)

  ours, expected = both(lambda *given: states(*given, segments, UNSHARDED)), both(loop)
  assert_trees_close(ours, expected, 1e-5)


def test_texts_that_go_on_from_the_state_have_the_same_logits():
  """Read in three parts; and after prompts of different lengths, whose padding leaves the state as it is."""
  sizes = model_sizes(**RECURRENT)
  model, tokens = parameters.bind(sizes, params_of(sizes)), np.random.default_rng(0).integers(0, 256, (2, 24))
  apply = jax.jit(lambda tokens: model(tokens))
  logits = lambda tokens: np.asarray(apply(tokens))
  assert relative_difference(np.asarray(logits_in_parts(model, tokens)), logits(tokens)) < 1e-5

  lengths, writer = np.array([5, 9], np.int32), TextWriter(model, Sampling(temperature=0))

  @jax.jit
  def write(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    texts = writer.begin(tokens, lengths, jax.random.split(jax.random.key(0), 2), size=16)
    return texts.newest, writer.extend(texts).newest

  first, second = write(tokens[:, :9])
  texts = tokens.copy()
  texts[[0, 1], lengths] = first
  best = np.argmax(logits(texts), axis=-1)
  np.testing.assert_array_equal(first, best[[0, 1], lengths - 1])
  np.testing.assert_array_equal(second, best[[0, 1], lengths])


def test_flops_of_a_recurrence_count_its_products_and_no_pairs():
  sizes = model_sizes(**RECURRENT)
  params = jax.eval_shape(lambda: parameters.init_params(sizes, jax.random.key(0)))
  others = ("scale", "embedding", "decay_bias")
  matrices = sum(x.size for path, x in jax.tree.leaves_with_path(params) if path[-1].key not in others)
  assert train_flops_per_example(sizes) == palm_flops_per_example(sizes) == sizes.seq_len * 6 * matrices


def test_a_mixer_and_an_mlp_of_ones_own_equal_a_single_device_and_compute_what_is_predicted():
  made = program(**OWN)
  runners = [strategy("single", made), strategy("two_d", made)]
  assert compile_step(runners[1], 16).flops() == predict.flops(Case.of(runners[1], 16, "cpu"))
  batch = random_batch(made, 16)
  of = lambda runner: jax.device_get(runner.gradients(initial_state(runner), runner.shard(batch, 16))[1])
  expected, ours = map(of, runners)
  assert ours["blocks"].keys() == {"shift", "shift_norm", "mlp", "mlp_norm"}
  assert_trees_close(ours, expected, 1e-5)


@pytest.mark.parametrize("name", ["context", "long_context"])
def test_a_mixer_that_does_not_say_that_positions_may_split_is_refused(name: str):
  with one_sentence("model.mixer='shift'", "mesh.context=", "context and long_context", "another mixer"):
    strategy(name, program(**OWN))


def test_a_run_with_a_mixer_without_a_cache_makes_no_sample_and_says_so():
  runner, dataset = strategy("single", program(**OWN)), SimpleNamespace(text="a text")
  assert summary.sample(config(**OWN, sample_length=5), runner, dataset, None) is None
  shown = "none: the mixer is shift, which has no cache, so the run writes no sample"
  assert summary.model_line(runner) == {"attention": shown}


def test_a_mixer_without_a_cache_writes_and_scores_nothing():
  runner = strategy("single", program(**OWN))
  params = runner.abstract_state().params
  tokens, words = np.zeros((1, 4), np.int32), ["model.mixer='shift'", "no cache", "'attention' or 'recurrence'"]
  with one_sentence(*words):
    runner.writing.generate(params, tokens, length=2, seed=0, temperature=0.0)
  with one_sentence(*words):
    runner.writing.log_likelihoods(params, tokens, tokens > 0)


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"mixer": "attentoin"}, ["model.mixer='attentoin'", "did you mean 'attention'"]),
    ({"mlp": "swigul"}, ["model.mlp='swigul'", "did you mean 'swiglu'"]),
    ({**RECURRENT, "kv_heads": 3}, ["model.kv_heads=3", "model.heads=16"]),
    ({**RECURRENT, "qk_norm": True}, ["model.qk_norm=True", "'recurrence'", "False"]),
    ({"mixer": "shift", "lora_rank": 2}, ["query, key, value, out", "model.mixer='shift'", "'gate,up,down'"]),
    ({"mixer": "shift", "mlp": "relu", "lora_rank": 2}, ["model.mlp='relu'", "model.lora_rank=0"]),
  ],
)
def test_bad_fields_are_refused_in_one_sentence(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    model_sizes(**fields)


def test_other_mixers_have_no_form_of_hugging_face():
  with one_sentence("model.mixer='recurrence'", "no known family", "model.mixer='attention'"):
    families.write(model_sizes(**RECURRENT), "float32", None)
