"""Which layers are local, what they see, and that no more is computed."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_full, logits_in_parts, model_sizes, one_sentence, params_of, relative_difference

from models import parameters
from models.dimensions import UNSHARDED
from models.generate import Sampling, TextWriter, text_keys
from models.ops import attention, rotary
from models.side_inputs import SideInputs
from models.windows import kinds_of_layers, pairs, pattern_of

L, G, N = "local", "global", "nope"


@pytest.mark.parametrize(
  "pattern, expected",
  [
    ("", [L, L, L, L, L]),
    ("local:2,global:1", [L, L, G, L, L]),  # ends within a period
    ("global:1,local:1", [G, L, G, L, G]),
    ("global:3,local:2", [G, G, G, L, L]),
    ("local:1,global:1,local:2,global:1", [L, G, L, L, G]),
    ("global:3,nope:1", [G, G, G, N, G]),
  ],
)
def test_a_pattern_repeats_from_the_first_layer(pattern: str, expected: list[str]):
  assert list(kinds_of_layers(pattern, 5)) == expected
  assert list(kinds_of_layers(pattern_of(expected), 5)) == expected


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"window": -1}, ["model.window=-1", "use 0"]),
    ({"layers_pattern": "local:1"}, ["model.layers_pattern='local:1'", "set model.window"]),
    ({"layers_pattern": "nope:3", "depth": 2}, ["for 3 layers", "model.depth=2"]),
    ({"rope_base_local": 1e4}, ["model.rope_base_local=10000", "set model.window"]),
    ({"window": 4, "rope_base_local": -1.0}, ["model.rope_base_local=-1", "use 0"]),
    ({"window": 4, "mixer": "recurrence"}, ["model.window=4", "model.mixer='recurrence'"]),
    ({"window": 512, "layers_pattern": "local"}, ["'local'", "KIND:NUMBER"]),
    ({"window": 512, "layers_pattern": "near:1,global:1"}, ["'near:1'", "local or global or nope"]),
    ({"window": 512, "layers_pattern": "local:0,global:1"}, ["'local:0'", "KIND:NUMBER"]),
    ({"window": 512, "layers_pattern": "local:2,global:1"}, ["for 3 layers", "model.depth=2", "at most 2"]),
    ({"window": 512, "layers_pattern": "global:2"}, ["'global:2'", "no local layer", "model.layers_pattern=''"]),
  ],
)
def test_a_window_that_is_none_gets_one_sentence(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    model_sizes(**({"depth": 2} | fields))


def test_pairs_are_those_that_a_loop_counts():
  for length, window, causal in itertools.product((1, 5, 9), (0, 1, 4, 9, 12), (True, False)):
    reach = window or length
    seen = [(i, j) for i in range(length) for j in range(length) if abs(i - j) < reach and (j <= i or not causal)]
    assert pairs(length, window, causal) == len(seen)


def test_a_window_that_hides_nothing_makes_no_layer_local():
  """So the program is that of a model without windows."""
  sizes = model_sizes(depth=2, seq_len=48, window=48, layers_pattern="global:1,local:1")
  kinds = lambda sizes: [kind for _, kind in sizes.kinds]
  assert (sizes.window, sizes.layers_pattern, kinds(sizes)) == (48, "global:1,local:1", [G, G])
  assert kinds(dataclasses.replace(sizes, seq_len=49)) == [G, L]
  assert kinds(dataclasses.replace(sizes, rope_base_local=100.0)) == [G, L]


def logits(tokens: np.ndarray, **fields: object) -> np.ndarray:
  sizes = model_sizes(width=32, heads=4, kv_heads=2, mlp_width=32, seq_len=24, **fields)
  run = lambda params, tokens: parameters.bind(sizes, params)(tokens)
  return np.asarray(jax.jit(run)(params_of(sizes), tokens))


@pytest.mark.parametrize(
  "pattern, depth, reach",
  in_full(
    [("", 3, 9), ("local:2,global:1", 3, 23), ("local:2,global:1", 7, 23), ("local:1", 1, 3)],
    ("local:1", 1, 3),
  ),
)
def test_a_position_reaches_as_far_as_the_windows_of_all_layers(pattern: str, depth: int, reach: int):
  """In each local layer 3 positions further, with a window of 4: one position more or less would show."""
  tokens = np.random.default_rng(0).integers(0, 256, (1, 24), np.int32)
  changed = tokens + (np.arange(24) == 0)
  a, b = logits(np.concatenate([tokens, changed]), depth=depth, window=4, layers_pattern=pattern)
  differs = (a != b).any(axis=-1)
  assert differs.nonzero()[0].max() == reach


def test_layers_of_a_pattern_are_those_blocks_one_by_one():
  """A model of 7 layers in periods of 3, against its blocks run without a loop, each with the window of its kind."""
  sizes = model_sizes(
    width=32, heads=4, kv_heads=2, mlp_width=32, depth=7, seq_len=24, window=4,
    layers_pattern="local:1,nope:1,global:1",
    rope_base_local=100.0,
  )  # fmt: skip
  tokens = np.random.default_rng(0).integers(0, 256, (2, 24), np.int32)

  @jax.jit
  def both(params: dict, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    model = parameters.bind(sizes, params)
    x, side = model.embed(tokens), SideInputs.of(model.sizes, 24)
    expected = x
    for number, kind in enumerate((L, N, G, L, N, G, L)):
      frequencies = rotary.frequencies(4, 100.0 if kind == L else 1e4, ())
      angles = None if kind == N else rotary.angles(jnp.arange(24)[:, None], frequencies)
      own = SideInputs(angles, window=4 if kind == L else 0)
      weights, block_of = model.scanned("blocks", UNSHARDED)
      of_layer = jax.tree.map(lambda w, number=number: w[number], weights)
      expected = block_of(of_layer)(expected, own, UNSHARDED)[0]
    return model.run_blocks(x, side)[0], expected

  found, expected = both(params_of(sizes), tokens)
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_blockwise_computes_few_pairs_that_a_window_hides():
  """The pairs of its products, counted from the program, over those that are needed."""
  length, window = 4096, 256
  shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), "float32")] * 3
  run = functools.partial(attention.blockwise, causal=True, window=window)
  gradients = jax.grad(lambda *arrays: jnp.sum(run(*arrays)), (0, 1, 2))
  for program, times in ((run, 2), (gradients, 7)):  # scores and values; and five in the backward pass
    computed = products(jax.make_jaxpr(program)(*shapes).jaxpr)
    needed = times * 2 * 2 * 8 * pairs(length, window, True)  # two heads of 8
    assert needed <= computed <= 1.15 * needed


def products(jaxpr: jax.extend.core.Jaxpr) -> int:
  """FLOPs of all matrix products of a program without loops."""
  total = 0
  for eqn in jaxpr.eqns:
    total += sum(products(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      total += 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
  return total


@functools.cache
def writer(pattern: str, experts: int = 0) -> TextWriter:
  mixture = {"experts": experts, "dense_layers": 1} if experts else {}
  sizes = model_sizes(
    width=32, heads=4, kv_heads=2, mlp_width=32, depth=7, seq_len=24, window=5, layers_pattern=pattern, **mixture
  )
  return TextWriter(parameters.bind(sizes, params_of(sizes)), Sampling(temperature=0))


@pytest.mark.parametrize("pattern, experts", in_full([("", 0), ("local:2,global:1", 0), ("local:2,global:1", 4)],
                                                     ("local:2,global:1", 0)))  # fmt: skip
def test_texts_equal_those_that_are_read_again_for_each_token(pattern: str, experts: int):
  """Prompts shorter and longer than the window, padded; then tokens until each cache has gone round twice."""
  made, lengths = writer(pattern, experts), np.array([1, 4, 5, 11], np.int32)
  prompts = np.random.default_rng(0).integers(0, 256, (4, 11), np.int32)

  @jax.jit
  def write(prompts: jax.Array) -> jax.Array:
    texts = made.begin(prompts, jnp.asarray(lengths), text_keys(jax.random.key(0), 4), size=24)
    _, tokens = jax.lax.scan(lambda texts, _: (made.extend(texts), texts.newest), texts, length=12)
    return tokens.T

  logits = jax.jit(lambda tokens: made.model(tokens))
  found = np.asarray(write(prompts))
  for prompt, length, written in zip(prompts, lengths, found, strict=True):
    text = np.zeros((1, 24), np.int32)
    text[0, :length] = prompt[:length]
    for at, token in enumerate(written):
      assert token == np.asarray(logits(text))[0, length + at - 1].argmax(), (length, at)
      text[0, length + at] = token


def test_a_local_layer_keeps_its_window():
  """Of 5 positions, those before the newest; and the global layer the whole text."""
  sizes = model_sizes(width=32, heads=4, kv_heads=2, depth=5, seq_len=24, window=5, layers_pattern="local:2,global:1")
  cache = jax.eval_shape(lambda: sizes.mixes.empty_cache(sizes, jnp.array([3, 3]), 24))
  assert (cache.local.k.shape, cache.whole.k.shape) == ((4, 2, 2, 4, 8), (1, 2, 2, 24, 8))


@pytest.mark.full
def test_a_text_that_is_read_in_parts_equals_one_that_is_read_at_once():
  model = writer("local:2,global:1").model
  tokens = np.random.default_rng(0).integers(0, 256, (2, 24), np.int32)
  expected = jax.jit(lambda tokens: model(tokens))(tokens)
  assert relative_difference(logits_in_parts(model, tokens), expected) < 1e-5
