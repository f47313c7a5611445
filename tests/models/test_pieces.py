"""Attention to a text in two pieces: their results, merged, equal attention to the whole, and so do the gradients."""

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_full, random_segments, relative_difference
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

from lab.analysis import gpus
from models.ops import attention
from models.ops.pieces import BLOCKWISE, CUDNN, SPLASH_INTERPRETED, Kernel, Read, merge, same_segment

EXACT = 1e-5
BEFORE, OWN = 91, 149  # keys of the first piece; keys of the second, which are also the queries. No kernel's block fits


class FakeCudnn:
  """cuDNN's attention, as JAX hands it to the GPU: forward 10 arrays, backward 13. This one runs anywhere."""

  def bind(
    self,
    *arrays: jax.Array,
    scale: float,
    mask_type: Any,
    is_training: bool = False,
    sliding_window_length: int | None = None,
    **_: Any,
  ) -> list:
    (q, k, v, bias), saved = arrays[:4], arrays[10:]
    assert is_training != bool(saved)
    for x in (q, k, v):
      assert not any(np.array(x.shape)[[1, 3]] % (2, 8)), "cuDNN needs even lengths, and heads of a multiple of 8"
    group = lambda x: x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool)) | (mask_type == fused.MaskType.NO_MASK)
    if sliding_window_length:  # a query sees fewer than so many positions back
      causal &= jnp.triu(jnp.ones_like(causal), 1 - sliding_window_length)
    by_heads = lambda x: x.reshape(x.shape[0], k.shape[2], -1, x.shape[-1], 1)  # [B, N, T] → [B, K, G, T, 1]

    def scored(q: jax.Array, k: jax.Array) -> jax.Array:
      scores = jnp.einsum("btkgh,bskh->bkgts", group(q), k) * scale + (bias[:, None] if bias.size else 0)
      return jnp.where(causal, scores, jnp.finfo(scores.dtype).min)

    def read(q: jax.Array, k: jax.Array, v: jax.Array, logsumexp: jax.Array) -> jax.Array:
      return jnp.einsum("bkgts,bskh->btkgh", jnp.exp(scored(q, k) - by_heads(logsumexp)), v).reshape(q.shape)

    if not saved:
      logsumexp = jax.nn.logsumexp(scored(q, k), axis=-1).reshape(len(q), q.shape[2], -1)
      return [read(q, k, v, logsumexp), logsumexp]
    logsumexp, out, of_out = saved
    mean = jnp.moveaxis(jnp.sum(out * of_out, axis=-1), 1, 2)  # the gradient of the log-sum-exp, but for its sign
    total = lambda q, k, v: (
      jnp.sum(read(q, k, v, logsumexp) * of_out)
      - jnp.sum(jax.lax.stop_gradient(jnp.exp(scored(q, k) - by_heads(logsumexp))) * scored(q, k) * by_heads(mean))
    )
    return list(jax.grad(total, argnums=(0, 1, 2))(q, k, v))


KERNELS = {"blockwise": BLOCKWISE, "splash": SPLASH_INTERPRETED, "cudnn": CUDNN}


@functools.cache
def given(documents: bool, kv_heads: int) -> tuple[Any, ...]:
  """Queries, and the keys and values of a text, with their segments. Scores are so large that sums must be safe."""
  lengths, heads = (OWN, BEFORE + OWN, BEFORE + OWN), (4, kv_heads, kv_heads)
  shapes = [(4, length, count, 12) for length, count in zip(lengths, heads, strict=True)]
  random = np.random.default_rng(0)
  q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
  segments = random_segments(random, 4, BEFORE + OWN) if documents else None
  if segments is not None:
    segments[1] = 1 + (np.arange(BEFORE + OWN) >= BEFORE)  # no query of this row sees a key of the first piece
  return 4 * q, k, v, segments


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  return x[:, :BEFORE], x[:, BEFORE:]


def in_pieces(kernel: Kernel, causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> tuple:
  """What is read, its log-sum-exp, and the gradients of q, k and v."""
  before, own = ((k, v, segments and segments(i)) for i, (k, v) in enumerate(zip(parts(k), parts(v), strict=True)))
  read = merge(kernel.forward(q, *before, False), kernel.forward(q, *own, causal))
  of_out = jnp.cos(read.out)
  backward = lambda piece, causal: kernel.backward(q, *piece, causal, Read(*read), of_out)
  (of_q, *of_before), (of_q_own, *of_own) = backward(before, False), backward(own, causal)
  joined = (jnp.concatenate(pair, axis=1) for pair in zip(of_before, of_own, strict=True))
  return *read, of_q + of_q_own, *joined


def as_a_whole(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> tuple:
  run = functools.partial(attention.plain, causal=causal, offset=BEFORE, segments=segments)
  out, backward = jax.vjp(run, q, k, v)
  scores = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)) / math.sqrt(q.shape[-1])
  visible = jnp.ones((1, OWN, BEFORE + OWN), bool)
  if segments is not None:
    visible = same_segment(segments[:, BEFORE:], segments)
  if causal:
    visible &= jnp.arange(BEFORE + OWN) <= BEFORE + jnp.arange(OWN)[:, None]
  logsumexp = jax.nn.logsumexp(jnp.where(visible[:, :, None], scores, -jnp.inf), axis=-1)
  return out, logsumexp, *backward(jnp.cos(out))


CASES = [(name, causal, documents) for name in KERNELS for causal in (True, False) for documents in (True, False)]
SHORT = [("blockwise", True, True), ("cudnn", True, True)]


@pytest.mark.parametrize("name, causal, documents", in_full(CASES, *SHORT))
def test_two_pieces_merged_equal_the_whole_text(
  name: str, causal: bool, documents: bool, monkeypatch: pytest.MonkeyPatch
):
  """In the second row and with documents, no query sees a key of the first piece."""
  for wrapper in ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper"):
    monkeypatch.setattr(fused, wrapper, FakeCudnn())
  q, k, v, segments = given(documents, kv_heads=2 if causal else 1)
  own = segments is not None and (lambda i: (parts(segments)[1], parts(segments)[i]))
  ours = jax.jit(lambda *arrays: in_pieces(KERNELS[name], causal, *arrays, own or None))(q, k, v)
  expected = jax.jit(lambda *arrays: as_a_whole(causal, *arrays, segments))(q, k, v)
  for what, x, y in zip(("out", "log-sum-exp", "of q", "of k", "of v"), ours, expected, strict=True):
    assert relative_difference(x, y) < EXACT, what


RULE = [
  "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
  "attn_logits_soft_cap", "interpret", "res", "do",
]  # fmt: skip
ARRAYS = [
  "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v",
]  # fmt: skip
SAVED = ["activation", "fwd_output", "grad_output"]
OPTIONS = ["scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"]
NEW, NEW_OPTION = ([], []) if jax.__version_info__ < (0, 12) else (["score_mod_args"], ["score_mod"])


@pytest.mark.parametrize(
  "name, documents", in_full((name, documents) for name in KERNELS for documents in (False, True))
)
def test_a_kernel_shows_a_window(name: str, documents: bool, monkeypatch: pytest.MonkeyPatch):
  """The keys that `plain` shows, and their gradients."""
  monkeypatch.setattr(fused, "_dot_product_attention_fwd_p_wrapper", FakeCudnn())
  monkeypatch.setattr(fused, "_dot_product_attention_bwd_p_wrapper", FakeCudnn())
  q, k, v, segments = given(documents, 2)
  k, v, own = k[:, BEFORE:], v[:, BEFORE:], None if segments is None else segments[:, BEFORE:]
  both, window = None if own is None else (own, own), 33

  def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    read = KERNELS[name].forward(q, k, v, both, True, window=window)
    return read.out, *KERNELS[name].backward(q, k, v, both, True, read, jnp.cos(read.out), window=window)

  def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    core = functools.partial(attention.plain, causal=True, segments=own, window=window)
    out, backward = jax.vjp(core, q, k, v)
    return out, *backward(jnp.cos(out))

  for ours, expected in zip(jax.jit(kernel)(q, k, v), jax.jit(plain)(q, k, v), strict=True):
    assert relative_difference(ours, expected) < EXACT


@pytest.mark.parametrize(
  "module, name, parameters",
  [
    (splash, "_splash_attention_bwd", RULE),
    (fused, "_dot_product_attention_fwd_impl", ARRAYS + NEW + OPTIONS + NEW_OPTION + ["is_training"]),
    (fused, "_dot_product_attention_bwd_impl", ARRAYS + SAVED + NEW + OPTIONS + NEW_OPTION),
  ],
)
def test_jax_has_the_private_functions_that_pieces_call(module: Any, name: str, parameters: list[str]):
  """The primitives of cuDNN take what their implementations take."""
  changed = f"jax {jax.__version__} has changed {module.__name__}.{name}: adapt models/ops/pieces.py, the only caller"
  assert list(inspect.signature(getattr(module, name, lambda: None)).parameters) == parameters, changed


def test_splash_saves_what_pieces_restore():
  changed = f"jax {jax.__version__} has changed what splash attention saves: adapt models/ops/pieces.py"
  arrays = [kind is jax.Array for kind in typing.get_args(splash.SplashResidualsType)]
  assert arrays == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 2, changed


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_takes_pieces_as_jax_passes_them(causal: bool, documents: bool):
  """JAX checks shapes and dtypes. A GPU gets one call forward and one backward for each piece."""
  q, k, v, segments = given(documents, kv_heads=2)
  own = segments is not None and (lambda i: (parts(segments)[1], parts(segments)[i]))
  run: Callable[..., tuple] = lambda *arrays: in_pieces(CUDNN, causal, *arrays, own or None)
  with gpus.assumed():
    lowered = jax.jit(run).trace(*(x.astype("bfloat16") for x in (q, k, v))).lower(lowering_platforms=("cuda",))
  found = re.findall(r"@__cudnn\$fmha(?:ScaleBias)?Softmax(Backward)?\(.*?mask_type\\22: \\22(\w+)", lowered.as_text())
  kind = "CAUSAL" if causal else "NO_MASK"
  assert sorted(found) == sorted((direction, of) for direction in ("", "Backward") for of in ("NO_MASK", kind))
