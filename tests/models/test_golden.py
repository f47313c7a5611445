"""Compares the model with an independent implementation: Hugging Face's Llama (tests/golden/make_llama.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, program, relative_difference

from models.parameters import bind
from training.program import Params, Program

GOLDEN = Path(__file__).parents[1] / "golden" / "llama.npz"
DEPTH, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 32
TOLERANCE = 1e-4  # two float32 implementations, which sum in different orders


def in_our_shape(arrays: dict[str, np.ndarray], kind: str) -> Params:
  """Llama's weights or gradients, with this model's names and shapes. `kind`: "weight" or "gradient"."""

  def take(name: str) -> np.ndarray:
    return arrays[f"{kind}/{name}.weight"]

  def stack(name: str, *shape: int) -> np.ndarray:
    return np.stack([take(f"model.layers.{i}.{name}").T.reshape(shape) for i in range(DEPTH)])

  head = WIDTH // HEADS
  return {
    "embedding": take("model.embed_tokens"),
    "head": take("lm_head").T,
    "norm": {"scale": take("model.norm")},
    "blocks": {
      "attention_norm": {"scale": stack("input_layernorm", WIDTH)},
      "mlp_norm": {"scale": stack("post_attention_layernorm", WIDTH)},
      "attention": {
        "query": stack("self_attn.q_proj", WIDTH, HEADS, head),
        "key": stack("self_attn.k_proj", WIDTH, KV_HEADS, head),
        "value": stack("self_attn.v_proj", WIDTH, KV_HEADS, head),
        "out": stack("self_attn.o_proj", HEADS, head, WIDTH),
      },
      "mlp": {
        "gate": stack("mlp.gate_proj", WIDTH, 56),
        "up": stack("mlp.up_proj", WIDTH, 56),
        "down": stack("mlp.down_proj", 56, WIDTH),
      },
    },
  }


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
  return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def ours() -> Program:
  return program(
    model__width=WIDTH, model__depth=DEPTH, model__heads=HEADS, model__kv_heads=KV_HEADS, model__mlp_width=56,
    model__vocab_size=48, model__seq_len=16,
  )  # fmt: skip


def test_logits_equal_llama(ours: Program, golden: dict[str, np.ndarray]):
  compute = jax.jit(lambda weights, tokens: bind(ours.sizes, weights)(tokens))
  logits = compute(in_our_shape(golden, "weight"), golden["tokens"][:, :-1])
  assert relative_difference(logits, golden["logits"]) < TOLERANCE


def test_loss_and_gradients_equal_llama(ours: Program, golden: dict[str, np.ndarray]):
  tokens = jnp.asarray(golden["tokens"], jnp.int32)
  batch = {"tokens": tokens, "id": jnp.arange(3), "mask": jnp.ones(3, bool)}
  sums, gradients = jax.jit(ours.gradient_sums)(in_our_shape(golden, "weight"), batch, jnp.int32(0))
  assert relative_difference(sums["loss"] / sums["count"], golden["loss"]) < TOLERANCE
  mean = jax.tree.map(lambda g: g / sums["count"], gradients)
  assert_trees_close(mean, in_our_shape(golden, "gradient"), TOLERANCE)
