"""Attention over positions that several devices share: every way equals attention on one device, and all work alike."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CORES, in_full, model_sizes, one_sentence, random_segments, relative_difference
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models.ops import attention, context, positions
from models.ops.pieces import BLOCKWISE, SPLASH_INTERPRETED, Kernel, Read
from models.sizes import ModelSizes
from strategies.execution.constraints import NOTHING, Constraints
from strategies.layout import Layout

EXACT = 1e-5
WAYS = ("gather", "exchange", "ring")
LENGTH, HEADS = 96, 8
# Whether it is causal, has several documents in a row, and how many key heads.
VARIANTS = {
  "plain": (True, False, HEADS), "packed": (True, True, HEADS), "grouped": (True, False, 2),
  "bidirectional": (False, False, HEADS), "bidirectional, packed, grouped": (False, True, 2),
}  # fmt: skip


def sizes_of(way: str, variant: str) -> ModelSizes:
  causal, _, kv_heads = VARIANTS[variant]
  objective = {} if causal else {"objective": "class", "classes": 2}
  heads = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": 8}
  return model_sizes(attention="blockwise", attention_context=way, seq_len=LENGTH, **heads, **objective)


def given(variant: str) -> tuple[Any, ...]:
  random, (_, documents, kv_heads) = np.random.default_rng(0), VARIANTS[variant]
  draw = lambda heads: random.standard_normal((3, LENGTH, heads, 8)).astype(np.float32)
  return draw(HEADS), draw(kv_heads), draw(kv_heads), random_segments(random, 3, LENGTH) if documents else None


def with_gradients(core: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
  out, backward = jax.vjp(core, *arrays)
  return out, *backward(jnp.cos(out))


def sharding_of(devices: int) -> Constraints:
  return Constraints(NOTHING, own=Layout({"context": devices}, positions="context"))


def on_devices(devices: int, work: Callable[..., Any]) -> Callable[..., Any]:
  """Runs `work` on each device with whole arrays. Its results, of own positions, are joined in the devices' order."""
  mesh = Mesh(jax.devices()[:devices], ("context",))
  return jax.jit(jax.shard_map(work, mesh=mesh, in_specs=P(), out_specs=P(None, "context"), check_vma=False))


def shared(way: str, devices: int, variant: str) -> list[np.ndarray]:
  """What is read, and the gradients of q, k and v; in the order of the text."""
  sharding = sharding_of(devices)

  def work(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, ...]:
    core = lambda *own: attention.attend(sizes_of(way, variant), *own, segments, sharding)
    return with_gradients(core, *(positions.own(x, sharding) for x in (q, k, v)))

  held = [chunk for device in range(devices) for chunk in (device, 2 * devices - 1 - device)]
  in_order = lambda x: np.concatenate([np.split(x, 2 * devices, axis=1)[held.index(i)] for i in range(2 * devices)], 1)
  return [in_order(np.asarray(x)) for x in on_devices(devices, work)(*given(variant))]


@functools.cache
def alone(variant: str) -> tuple[jax.Array, ...]:
  *arrays, segments = given(variant)
  core = functools.partial(attention.plain, causal=VARIANTS[variant][0], segments=segments)
  return jax.jit(functools.partial(with_gradients, core))(*arrays)


CASES = [(way, devices, variant) for way in WAYS for devices in (2, 4, 8) for variant in VARIANTS]
SHORT = [("gather", 2, "bidirectional, packed, grouped"), ("exchange", 8, "grouped"), ("ring", 8, "packed"),
         ("ring", 4, "bidirectional, packed, grouped")]  # fmt: skip


@pytest.mark.parametrize("way, devices, variant", in_full(CASES, *SHORT))
def test_every_way_equals_attention_on_one_device(way: str, devices: int, variant: str):
  results = zip(("out", "of q", "of k", "of v"), shared(way, devices, variant), alone(variant), strict=True)
  for what, ours, expected in results:
    assert relative_difference(ours, expected) < EXACT, what


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_ways_read_pieces_with_the_kernel_of_tpus(way: str, monkeypatch: pytest.MonkeyPatch):
  """Splash attention, step by step. `exchange` needs no pieces: it runs the whole kernel on own heads."""
  monkeypatch.setitem(attention.PIECES, "blockwise", SPLASH_INTERPRETED)
  monkeypatch.setitem(attention.IMPLEMENTATIONS, "blockwise", CORES["splash"])
  for ours, expected in zip(shared(way, 4, "packed"), alone("packed"), strict=True):
    assert relative_difference(ours, expected) < EXACT


@pytest.mark.parametrize("devices", [2, 8, 64])
def test_devices_see_equally_many_pairs(devices: int):
  """Counts the keys that a causal mask shows to each device's queries.

  In order, the last of 8 devices would have 15 times as many as the first.
  """
  text = np.arange(16 * devices)[None]
  seen = [int((1 + np.asarray(positions.of_device(text, device, devices))).sum()) for device in range(devices)]
  assert max(seen) / min(seen) <= 1.05
  assert sum(seen) == text.size * (text.size + 1) // 2, "each position is on one device"


@pytest.mark.parametrize("way", in_full(WAYS, "ring"))
def test_devices_score_equally_many_pairs_and_none_in_vain(way: str, monkeypatch: pytest.MonkeyPatch):
  """Counts pairs when the program runs, by device. A causal piece is half of its square."""
  scored: collections.Counter[int] = collections.Counter()

  def forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, causal: bool) -> Read:
    pairs = len(q) * q.shape[1] * k.shape[1] * q.shape[2] / HEADS / (2 if causal else 1)
    jax.debug.callback(lambda device: scored.update({int(device): pairs}), jax.lax.axis_index("context"))
    return BLOCKWISE.forward(q, k, v, segments, causal)

  kernel = Kernel(forward, BLOCKWISE.backward)
  monkeypatch.setitem(attention.PIECES, "blockwise", kernel)
  whole = lambda q, k, v, segments, causal, window: forward(q, k, v, segments, causal).out
  monkeypatch.setitem(attention.IMPLEMENTATIONS, "blockwise", whole)
  shared(way, 8, "plain")
  jax.effects_barrier()
  assert len(scored) == 8
  assert max(scored.values()) / min(scored.values()) <= 1.05
  assert sum(scored.values()) == pytest.approx(3 * LENGTH**2 / 2)


@pytest.mark.parametrize(
  "devices, length, heads, kv_heads, permutes, name, why",
  [
    (8, 2048, 8, 8, True, "exchange", "0.25 times"),
    (8, 2048, 8, 1, True, "gather", "2 times as much"),  # each device would get a copy of the one key head
    (8, 2048, 12, 12, True, "gather", "heads do not split"),
    (8, 1 << 16, 12, 12, True, "ring", "8192 positions"),
    (8, 1 << 16, 12, 12, False, "gather", "heads do not split"),  # a pipeline's devices run different units
    (8, 1 << 14, 32, 8, True, "ring", "2048 positions"),  # four query heads use each key that arrives
  ],
)
def test_auto_chooses_by_length_and_heads(
  devices: int, length: int, heads: int, kv_heads: int, permutes: bool, name: str, why: str
):
  found = context.choose("auto", devices, length, heads, kv_heads, permutes)
  assert found.name == name
  assert why in found.why


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_a_way_that_is_named_is_used(way: str):
  assert context.choose(way, 8, 64, 3, 3) == (way, "")


@pytest.mark.parametrize("heads, kv_heads", [(12, 12), (12, 6), (24, 12)])
def test_exchange_refuses_heads_that_do_not_split(heads: int, kv_heads: int):
  with one_sentence("model.attention_context='exchange'", "mesh.context=8", str(heads), "'gather' or 'ring'"):
    context.choose("exchange", 8, 64, heads, kv_heads)
