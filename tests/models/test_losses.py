"""The loss of the next token, in chunks, compared with the cross-entropy of all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, relative_difference

from models.dimensions import UNSHARDED
from models.ops import loss as losses

B, T, D, V = 4, 12, 16, 40


def arrays(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, losses.Targets]:
  """Activations, head and targets. All values fit into bfloat16."""
  random = np.random.default_rng(0)
  x, head = (random.standard_normal(shape).astype(jnp.bfloat16).astype(dtype) for shape in ((B, T, D), (D, V)))
  return x, head, losses.Targets(random.integers(0, V, (B, T), np.int32), random.random((B, T)) < 0.7)


def whole(x: jax.Array, head: jax.Array, targets: losses.Targets) -> tuple[jax.Array, losses.Sums]:
  """With functions of JAX alone."""
  logits = (x @ head).astype(jnp.float32)
  of_targets = jnp.take_along_axis(jax.nn.log_softmax(logits), targets.values[..., None], axis=-1)[..., 0]
  loss = -jnp.sum(of_targets, where=targets.counted)
  correct = jnp.sum((jnp.argmax(logits, axis=-1) == targets.values) & targets.counted)
  return loss, {"loss": loss, "correct": correct, "count": jnp.sum(targets.counted)}


@functools.cache
def found(chunk: int | None, dtype: str) -> tuple:
  """((sums), (gradient of x, gradient of the head)), of all logits if `chunk` is None."""
  loss = whole if chunk is None else functools.partial(losses.next_token, sharding=UNSHARDED, chunk=chunk)
  scaled = lambda *given: (3.0 * loss(*given)[0], loss(*given)[1])
  gradients, sums = jax.jit(jax.grad(scaled, argnums=(0, 1), has_aux=True))(*arrays(dtype))
  return sums, gradients


@pytest.mark.parametrize("chunk", [0, 1, 7, 16, 48, 100])
def test_chunks_change_nothing(chunk: int):
  assert_trees_close(found(chunk, "float32"), found(None, "float32"), PARITY)


def test_in_bfloat16_gradients_are_as_close_to_exact_ones_as_those_of_all_logits():
  exact = found(None, "float32")
  distance = lambda chunk: [
    relative_difference(g, e) for g, e in zip(found(chunk, "bfloat16")[1], exact[1], strict=True)
  ]
  assert max(distance(16)) < 0.02  # bfloat16 has 8 significant bits
  assert all(ours < 1.5 * theirs for ours, theirs in zip(distance(16), distance(None), strict=True))


in_chunks = jax.jit(functools.partial(losses.next_token, sharding=UNSHARDED, chunk=16))


def test_evaluation_gives_the_same_sums():
  x, head, targets = arrays()
  loss, sums = in_chunks(x, head, targets)
  assert_trees_close((loss, sums), jax.jit(whole)(x, head, targets), PARITY)


def test_a_tie_is_not_correct():
  x, head, targets = arrays()
  _, sums = in_chunks(np.zeros_like(x), head, targets)
  assert int(sums["correct"]) == 0


def test_large_logits_give_a_finite_loss():
  x, head, targets = arrays()
  loss, _ = in_chunks(np.float32(1e4) * x, head, targets)
  assert np.isfinite(loss)


@pytest.mark.parametrize(
  "tokens, width, vocab, chunk, count",
  [
    (4096, 64, 256, 0, 1),  # as small as this, all at once
    (4096, 2048, 32_000, 0, 4),  # 1,024 tokens, though their logits are more than 64 MiB
    (4096, 2048, 4_000, 0, 1),
    (8192, 2048, 4_096, 0, 2),
    (4099, 2048, 32_000, 0, 5),  # a prime number of tokens: the last chunk is padded
    (4096, 4097, 32_000, 0, 1),  # the head's gradient would take more memory than all logits
    (96, 64, 10, 40, 3),
    (96, 128, 10, 40, 3),
  ],
)
def test_chunks_are_as_large_as_pays(tokens: int, width: int, vocab: int, chunk: int, count: int):
  assert losses.chunk_count(tokens, width, vocab, chunk) == count
