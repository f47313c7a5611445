"""The model's parts, compared with simpler ways to compute the same: attention, generation, dropout, images."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  CORES,
  IMAGES,
  each_once,
  equations,
  in_full,
  logits_in_parts,
  model_sizes,
  one_sentence,
  params_of,
  program,
  relative_difference,
)

from models import parameters
from models.dimensions import UNSHARDED
from models.flops import palm_flops_per_example, train_flops_per_example
from models.generate import Sampling, TextWriter, generate, text_keys
from models.inputs import patches
from models.ops import attention, layers, rotary
from models.side_inputs import SideInputs
from models.sizes import ModelSizes


def apply(sizes: ModelSizes, inputs: jax.Array) -> jax.Array:
  return jax.jit(lambda params, inputs: parameters.bind(sizes, params)(inputs))(params_of(sizes), inputs)


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, window: int = 0) -> np.ndarray:
  """One head, one query at a time, in float64."""
  out, reach = np.zeros(q.shape), window or k.shape[1]
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(*q.shape[:3]):
    seen = slice(max(t + 1 - reach, 0), t + 1 if causal else t + reach)
    scores = k[b, seen, n // group] @ q[b, t, n] / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max())
    out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
  return out


def normal(*shape: int, seed: int = 1) -> np.ndarray:
  """Random numbers from NumPy, because those of JAX are a program for each shape."""
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def random_tokens(*shape: int) -> np.ndarray:
  return np.random.default_rng(1).integers(0, 256, shape, np.int32)


def heads(length: int) -> tuple[np.ndarray, ...]:
  """Random queries, keys and values."""
  return tuple(normal(2, length, count, 8, seed=i) for i, count in enumerate((4, 2, 2)))


@functools.cache
def with_gradients(core: Callable[..., jax.Array], length: int, causal: bool, window: int = 0) -> tuple[jax.Array, ...]:
  run = functools.partial(core, causal=causal, window=window)
  gradients = jax.grad(lambda *arrays: jnp.sum(jnp.sin(run(*arrays))), argnums=(0, 1, 2))
  return jax.jit(lambda *arrays: (run(*arrays), *gradients(*arrays)))(*heads(length))


@pytest.mark.parametrize("core", CORES)
# 128 is a multiple of what blockwise and splash process at a time.
@pytest.mark.parametrize("causal, length", each_once([True, False], [128, 150], (True, 150)))
def test_attention_equals_the_definition(core: str, length: int, causal: bool):
  output, *gradients = with_gradients(CORES[core], length, causal)
  expected = naive_attention(*(np.asarray(x, np.float64) for x in heads(length)), causal)
  assert relative_difference(output, expected) < 1e-5
  for a, b in zip(gradients, with_gradients(attention.plain, length, causal)[1:], strict=True):
    assert relative_difference(a, b) < 1e-5


@pytest.mark.parametrize(
  "core, causal, window",
  in_full([(core, causal, window) for core in CORES for causal in (True, False) for window in (2, 64, 77)],
          ("blockwise", True, 77)),
)  # fmt: skip
def test_attention_with_a_window_equals_the_definition(core: str, causal: bool, window: int):
  output, *gradients = with_gradients(CORES[core], 150, causal, window)
  expected = naive_attention(*(np.asarray(x, np.float64) for x in heads(150)), causal, window)
  assert relative_difference(output, expected) < 1e-5
  for a, b in zip(gradients, with_gradients(attention.plain, 150, causal, window)[1:], strict=True):
    assert relative_difference(a, b) < 1e-5


def test_rotary_scores_depend_only_on_the_distance():
  q, k = (normal(1, 1, 1, 16, seed=i) for i in range(2))

  @jax.jit
  def score(query_at: int, key_at: int) -> jax.Array:
    angles = [rotary.angles(jnp.array([[p]]), rotary.frequencies(8, 1e4, ())) for p in (query_at, key_at)]
    return jnp.sum(rotary.rotate(q, angles[0]) * rotary.rotate(k, angles[1]))

  assert float(score(3, 1)) == pytest.approx(float(score(12, 10)), rel=1e-4)
  assert float(score(3, 1)) != pytest.approx(float(score(3, 2)), rel=1e-2)


@pytest.mark.parametrize("base, scaling", [(5e5, (8.0, 1.0, 4.0, 8192))])
def test_angles_are_right_at_a_million_positions(base: float, scaling: tuple[float, ...]):
  """Against float64, all 64 angles of the last positions. Products in float32 are off by 0.06."""
  at = 2**20 - 4096 + np.arange(4096)
  exact = np.outer(at, rotary.frequencies(64, base, scaling))
  found = np.asarray(jax.jit(lambda at: rotary.angles(at[:, None], rotary.frequencies(64, base, scaling)))(at))
  off = np.abs(np.exp(1j * found.astype(np.float64)) - np.exp(1j * exact)).max()
  assert off < 1e-6
  float32 = np.outer(at.astype(np.float32), rotary.frequencies(64, base, scaling).astype(np.float32))
  assert np.abs(np.exp(1j * float32.astype(np.float64)) - np.exp(1j * exact)).max() > 1e-2


@pytest.mark.parametrize(
  "kind, expected",
  [
    ("yarn", [1, 0.03162075206, 0.00701571396, 0.00227727205, 2.279478358e-4, 3.830881178e-5, 3.023511397e-7]),
    (
      "yarn_unrounded",
      [1, 0.03170569614, 0.00679495931, 0.00209379266, 1.293186942e-4, 3.830881178e-5, 3.023511397e-7],
    ),
  ],
)
def test_frequencies_of_yarn_equal_those_of_transformers(kind: str, expected: list[float]):
  """Of gpt-oss, as version 5.24 of the library computes them in float32, with and without `truncate`."""
  found = rotary.frequencies(32, 150_000, (32, 1, 32, 4096, 1.35), kind)[[0, 9, 12, 14, 17, 18, 31]]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_frequencies_equal_those_of_llama():
  """Those of Llama 3.1's first, middle and last pairs, computed by hand: kept, slowed in part, slowed 8 times."""
  kept, part, slowed = rotary.frequencies(64, 5e5, (8.0, 1.0, 4.0, 8192))[[0, 32, 63]]
  assert kept == 1
  turns = 8192 * 5e5**-0.5 / (2 * np.pi)  # 1.84 turns over the length: between 1 and 4
  unscaled = (turns - 1) / 3
  assert part == pytest.approx(5e5**-0.5 * (unscaled + (1 - unscaled) / 8), rel=1e-12)
  assert slowed == pytest.approx(5e5 ** (-63 / 64) / 8, rel=1e-12)


def test_a_token_does_not_see_later_tokens():
  sizes = model_sizes()
  tokens = random_tokens(2, 20)
  changed = tokens + (np.arange(20) == 12)
  a, b = np.asarray(apply(sizes, np.concatenate([tokens, changed]))).reshape(2, 2, 20, -1)
  np.testing.assert_array_equal(a[:, :12], b[:, :12])
  assert (a[:, 12:] != b[:, 12:]).any()


def test_a_prediction_sees_the_last_patch_of_its_image_only():
  sizes = program(**IMAGES).sizes
  images = normal(2, 32, 32, 3)
  corner = images.copy()
  corner[0, -1, -1] += 1.0
  a, b = np.asarray(apply(sizes, np.concatenate([images, corner]))).reshape(2, 2, 10)
  assert (a[0] != b[0]).all()
  np.testing.assert_array_equal(a[1], b[1])


GREY = {"inputs": "images", "objective": "class", "image_size": 8, "channels": 1, "classes": 2}


@pytest.mark.parametrize("mean, std", [((0.5,), (0.25,)), ((0.1, 0.2, 0.3), (0.5, 1.0, 2.0)), ((), ())])
def test_images_of_any_number_of_channels_are_normalized(mean: tuple[float, ...], std: tuple[float, ...]):
  channels = len(mean) or 2
  sizes = model_sizes(**GREY | {"channels": channels, "pixel_mean": mean, "pixel_std": std})
  images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, channels), np.uint8)
  params = params_of(sizes)

  @jax.jit
  def run(images: np.ndarray) -> tuple[jax.Array, jax.Array]:
    prepared = sizes.reads.prepare(images, UNSHARDED)
    return prepared, parameters.bind(sizes, params)(prepared)

  prepared, logits = map(np.asarray, run(images))
  for c in range(channels):
    expected = (images[..., c] / 255 - (mean[c] if mean else 0)) / (std[c] if std else 1)
    np.testing.assert_allclose(prepared[..., c], expected, atol=1e-6)
  assert sizes.example_shapes()["image"] == ((8, 8, channels), np.uint8, 256)
  assert params["embedding"].shape == (4 * 4 * channels, sizes.width)
  assert (np.std(logits, axis=0) > 0).all()  # the classes of two images differ


def test_patches_are_squares_row_by_row():
  image = np.arange(4 * 4 * 3).reshape(1, 4, 4, 3)
  found = np.asarray(jax.jit(patches, static_argnums=1)(image, 2))
  np.testing.assert_array_equal(found[0, 1], image[0, :2, 2:].reshape(-1))


@pytest.mark.parametrize("prompt_length", in_full([1, 7], 1))
def test_cached_generation_equals_full_recomputation(prompt_length: int):
  sizes = model_sizes()
  params = params_of(sizes)
  prompt = random_tokens(3, prompt_length)
  writer = TextWriter(parameters.bind(sizes, params), Sampling(temperature=0))
  cached = jax.jit(lambda prompt, key: generate(writer, prompt, length=20, key=key))(prompt, jax.random.key(0))

  predict = jax.jit(lambda text: jnp.argmax(parameters.bind(sizes, params)(text), axis=-1))
  text = np.pad(prompt, ((0, 0), (0, 20)))  # with causal attention, padding changes nothing, and avoids recompiling
  for position in range(prompt_length, prompt_length + 20):
    text[:, position] = np.asarray(predict(text))[:, position - 1]
  np.testing.assert_array_equal(cached, text)


def test_cached_logits_equal_full_recomputation():
  """Tokens can agree by luck, so this compares the logits."""
  sizes = model_sizes()
  model = parameters.bind(sizes, params_of(sizes))
  tokens = random_tokens(2, 24)
  assert relative_difference(logits_in_parts(model, tokens), apply(sizes, tokens)) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_next_logits_are_those_of_one_position(tied: bool):
  sizes = model_sizes(tied_embedding=tied)
  model = parameters.bind(sizes, params_of(sizes))
  both = jax.jit(lambda x: (model.next_logits(x[:, 2]), model.logits(x)[:, 2]))
  assert relative_difference(*both(normal(3, 5, sizes.width))) < 1e-5


@pytest.mark.full
def test_samples_depend_on_the_seed_unless_the_temperature_is_0():
  sizes = model_sizes()
  params = params_of(sizes)
  prompt = jnp.zeros((8, 4), jnp.int32)
  model = parameters.bind(sizes, params)
  draw = [
    generate(TextWriter(model, Sampling(temperature=t)), prompt, length=12, key=jax.random.key(seed))
    for seed, t in ((0, 1.0), (1, 1.0), (0, 0.0), (1, 0.0))
  ]
  assert (draw[0] != draw[1]).any()
  np.testing.assert_array_equal(draw[2], draw[3])


def test_generation_stops_at_the_trained_length():
  sizes = model_sizes()
  writer = TextWriter(parameters.bind(sizes, params_of(sizes)))
  with pytest.raises(ValueError, match=r"model\.seq_len=32"):
    generate(writer, jnp.zeros((1, 30), jnp.int32), length=5, key=jax.random.key(0))


@pytest.mark.full
def test_a_text_does_not_depend_on_the_others_in_its_batch():
  """Prompts of 9, 1 and 4 tokens in one array, and each alone. Token 5 is the padding, and a prompt ends with it."""
  sizes = model_sizes()
  model, sampling = (
    parameters.bind(sizes, params_of(sizes)),
    Sampling(temperature=1.0, top_k=20, repetition_penalty=1.3),
  )
  prompts = [list(range(40, 49)), [7], [1, 2, 3, 5]]
  keys = text_keys(jax.random.key(3), 3)

  def written(rows: list[int]) -> np.ndarray:
    lengths = np.array([len(prompts[row]) for row in rows])
    padded = np.array([prompts[row] + [5] * (max(lengths) - len(prompts[row])) for row in rows])
    writer = TextWriter(model, sampling)
    texts, tokens = jax.jit(writer.begin, static_argnames="size")(padded, lengths, keys[jnp.array(rows)], size=24), []
    for _ in range(12):
      tokens.append(texts.newest)
      texts = jax.jit(writer.extend)(texts)
    return np.stack(tokens, axis=1)

  together = written([0, 1, 2])
  for row in range(3):
    np.testing.assert_array_equal(written([row])[0], together[row])
  assert len(np.unique(together)) > 12


@pytest.mark.parametrize("remat", ["minimal", "full"])
def test_the_program_does_not_grow_with_depth(remat: str):
  def size(depth: int) -> int:
    sizes = model_sizes(depth=depth, remat=remat)
    params = jax.eval_shape(lambda: parameters.init_params(sizes, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    gradient = jax.grad(lambda params, tokens: parameters.bind(sizes, params)(tokens).sum())
    return sum(1 for _ in equations(jax.make_jaxpr(gradient)(params, tokens).jaxpr))

  assert size(32) == size(4)


def test_dropout_is_keyed_by_example():
  order = np.array([2, 0, 3, 1])

  @jax.jit
  def both() -> tuple[jax.Array, jax.Array]:
    x, keys = jnp.ones((4, 16, 32)), jax.random.split(jax.random.key(0), 4)
    return layers.dropout(x, 0.25, keys, UNSHARDED), layers.dropout(x, 0.25, keys[order], UNSHARDED)

  dropped, moved = map(np.asarray, both())
  np.testing.assert_array_equal(moved, dropped[order])
  assert float((dropped == 0).mean()) == pytest.approx(0.25, abs=0.05)
  assert float(dropped.mean()) == pytest.approx(1.0, abs=0.05)
  assert (dropped[0] != dropped[1]).any()


def test_every_layer_draws_its_own_dropout():
  """If the key did not depend on the layer, all layers would drop the same elements."""
  sizes = model_sizes(dropout=0.5, depth=2)
  params = params_of(sizes)
  same = jax.tree.map(lambda w: np.stack([w[0], w[0]]), jax.device_get(params["blocks"]))
  model = parameters.bind(sizes, params | {"blocks": same})
  x, keys = normal(1, 8, sizes.width), jax.random.key(2)[None]
  run = jax.jit(lambda first: model.run_blocks(x, SideInputs.of(model.sizes, 8, keys=keys), first_layer=first)[0])
  both, later = (np.asarray(run(first)) for first in (0, 1))
  assert (both != later).any()


def test_weights_of_all_blocks_are_cast_once_before_the_scan():
  """Cast in its body, a compiler would keep them for the forward pass, and again for the backward pass."""
  sizes = model_sizes(dtype="bfloat16")
  apply = lambda params, ids: parameters.bind(sizes, params)(ids)
  traced = jax.make_jaxpr(apply)(params_of(sizes), jnp.zeros((1, 6), jnp.int32))
  (scan,) = (one for one in equations(traced) if one.primitive.name == "scan")
  used = jax.tree.leaves(parameters.used_dtypes(sizes)["blocks"])
  stacked = [x.aval.dtype.name for x in scan.invars if x.aval.shape[:1] == (sizes.depth,)]
  assert sorted(stacked) == sorted([*used, "int32"])  # and the numbers of the blocks


def test_tied_embedding_has_no_head():
  sizes = model_sizes(tied_embedding=True)
  params = params_of(sizes)
  assert "head" not in params
  assert jax.eval_shape(lambda: parameters.bind(sizes, params)(jnp.zeros((1, 4), jnp.int32))).shape == (1, 4, 256)


def test_flops_count_every_matrix_product():
  """6 for each matrix weight and position, plus 12 · width for each pair of attention in each block."""
  sizes = model_sizes()
  params = jax.eval_shape(lambda: parameters.init_params(sizes, jax.random.key(0)))
  matrices = sum(x.size for path, x in jax.tree.leaves_with_path(params) if path[-1].key not in ("scale", "embedding"))
  t, attention = sizes.seq_len, 12 * sizes.depth * sizes.width
  assert train_flops_per_example(sizes) == t * 6 * matrices + attention * t * (t + 1) / 2  # the causal mask
  assert palm_flops_per_example(sizes) == t * 6 * matrices + attention * t**2


def test_flops_of_a_model_small_enough_for_paper():
  """One block of width 4, two heads of 2, an MLP of 8, three tokens of a vocabulary of 10."""
  small = {"width": 4, "depth": 1, "heads": 2, "kv_heads": 1, "mlp_width": 8, "vocab_size": 10, "seq_len": 3}
  sizes = model_sizes(**small)
  weights = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 8 + 4 * 10  # query, key, value, out; gate, up, down; head
  assert weights == 184
  pairs = 1 + 2 + 3  # the first token sees itself, the last one all three
  # A pair takes a product for its score and one with its value, of 4 multiplications and 4 additions each; thrice.
  assert train_flops_per_example(sizes) == 3 * 6 * 184 + 3 * 2 * 8 * pairs == 3600
  assert palm_flops_per_example(sizes) == 3 * 6 * 184 + 3 * 2 * 8 * 9 == 3744
  # Images of 2 × 2 patches of 2 × 2 pixels see all pairs. Nothing needs the gradient of pixels, which PaLM's 6 counts.
  images = {"inputs": "images", "objective": "class", "image_size": 4, "patch_size": 2, "channels": 1, "classes": 10}
  sizes = model_sizes(**small | images | {"heads": 1, "head_dim": 4})
  weights = 4 * 4 * 4 + 3 * 4 * 8  # of the block; the head sees one position, the mean
  assert train_flops_per_example(sizes) == 4 * 6 * weights + 6 * 4 * 10 + 3 * 2 * 8 * 16 + 4 * 4 * (4 * 4)
  assert palm_flops_per_example(sizes) - train_flops_per_example(sizes) == 4 * 2 * (4 * 4)


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"heads": 7}, ["model.heads=7", "model.width=64"]),
    ({"kv_heads": 3}, ["model.kv_heads=3", "model.heads=16"]),
    ({"dropout": 1.0}, ["model.dropout=1.0"]),
    ({"depth": 0}, ["model.depth=0"]),
    ({"remat": "ful"}, ["model.remat='ful'", "'full'"]),
    ({"saved": "query,mlp_op"}, ["model.saved='mlp_op'", "'mlp_up'"]),
    ({"dtype": "float31"}, ["model.dtype='float31'", "'float32'"]),
    ({"param_dtype": "fp8"}, ["model.param_dtype='fp8'", "float32"]),
    ({"loss_chunk": -1}, ["model.loss_chunk=-1", "use 0"]),
    ({"attention": "flash"}, ["model.attention='flash'", "'splash'"]),
    ({"attention_context": "rings"}, ["model.attention_context='rings'", "did you mean 'ring'"]),
    ({"inputs": "images", "image_size": 32, "channels": 3, "patch_size": 5}, ["model.patch_size=5", "32"]),
    ({"inputs": "images", "heads": 32}, ["model.heads=32", "multiple of 4"]),
    ({"inputs": "images", "channels": 3}, ["model.image_size=0", "data", "set it"]),
    ({"inputs": "images", "image_size": 32}, ["model.channels=0", "data", "set it"]),
    ({"objective": "class"}, ["model.classes=0", "data", "set it"]),
    ({"vocab_size": 0}, ["model.vocab_size=0", "data", "set it"]),
    ({"vocab_size": -1}, ["model.vocab_size=-1", "at least 1"]),
    ({**GREY, "pixel_mean": (0.5, 0.5)}, ["model.pixel_mean=(0.5, 0.5)", "model.channels=1"]),
    ({**GREY, "pixel_std": (0.0,)}, ["model.pixel_std=(0.0,)", "above 0"]),
    ({**GREY, "pixel_mean": (float("nan"),)}, ["model.pixel_mean=(nan,)", "finite"]),
  ],
)
def test_invalid_model_fields_are_refused(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    model_sizes(**fields)
