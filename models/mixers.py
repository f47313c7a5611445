"""Mixers: how the positions of a text read each other in a block. `model.mixer` names one; mlps.py has the other half.

To add one, write a subclass of `Mixer` and add it to `MIXERS`. Its weights make a model trainable under every strategy,
its counts give MFU, plans and predictions. ops/ says how the two here are computed.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError
from models.dimensions import Sharding
from models.lora import Adapters
from models.ops.attention import Cache, attend, rotate, with_past
from models.ops.layers import RMSNorm, linear, linears, weight
from models.ops.recurrence import states

if TYPE_CHECKING:
  from models.block import SideInputs
  from models.sizes import ModelSizes


class Mixer(nnx.Module):
  """A block's mixer. Its weights name their dimensions (models/dimensions.py); `heads` is the one that layouts split.

  Attributes:
    splits_positions: whether a device may have only some positions of a text, as in `ops.positions`: the mixer reads no
      others, or asks the other devices. Then `state` or `per_pair` says what for.
    has_cache: whether it can go on with a text, from a cache of what it has read. Otherwise its model writes no text.
    heads: the fields of config.model that give the sizes of the dimension `heads`.
  """

  splits_positions: bool = False
  has_cache: bool = False
  heads: tuple[str, ...] = ("heads",)

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs):
    raise NotImplementedError

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    side: "SideInputs",
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None]:
    """Returns [B, T, D] and, with a cache, what these positions add to it.

    Positions may read only their own document (`side.segments`). With a cache, x begins at position `start` (a number,
    or [B]: one for each row) and has no segments.
    """
    raise NotImplementedError

  @staticmethod
  def check(sizes: "ModelSizes") -> None:
    """Raises ConfigError if the sizes do not fit."""

  @staticmethod
  def products(sizes: "ModelSizes") -> dict[str, int]:
    """How many weights multiply each position in a product, by the name of its result (remat.NAMES, if it has one).

    The product that makes what is added to the residual stream is named "attention_output", whatever the mixer.
    """
    raise NotImplementedError

  @staticmethod
  def per_pair(sizes: "ModelSizes") -> int:
    """Multiplications for each pair of a position and one that it reads; 0 if a mixer reads no pairs."""
    return 0

  @staticmethod
  def state(sizes: "ModelSizes") -> int:
    """How many numbers each chunk of a text hands on, if devices share the positions (ops/recurrence.py)."""
    return 0

  @staticmethod
  def sides(sizes: "ModelSizes") -> dict[str, int]:
    """The weights that may have adapters, each with the size of the side that is not the stream's."""
    return {}

  @staticmethod
  def reading(sizes: "ModelSizes") -> str:
    """How positions on other devices are read, in words."""
    return f"the mixer {sizes.mixer} needs no positions of other devices"


class Attention(Mixer):
  """Self-attention in which `heads` query heads share `kv_heads` key-value heads (arXiv:2305.13245)."""

  splits_positions = True
  has_cache = True
  heads = ("heads", "kv_heads")

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs):
    d, n, k, h, dtype = sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.param_dtype
    self.query = weight(rngs.weights, (d, n, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.key = weight(rngs.weights, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.value = weight(rngs.weights, (d, k, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.out = weight(rngs.weights, (n, h, d), ("heads", None, "embed"), std=(2 * sizes.depth * d) ** -0.5, dtype=dtype)
    if sizes.qkv_bias:
      bias = lambda heads: nnx.Param(jnp.zeros((heads, h), dtype), dims=("heads", None))
      self.query_bias, self.key_bias, self.value_bias = bias(n), bias(k), bias(k)
    if sizes.qk_norm:
      self.query_norm, self.key_norm = RMSNorm(h, sizes), RMSNorm(h, sizes)
    self.has_bias, self.has_norms = sizes.qkv_bias, sizes.qk_norm
    self.lora = Adapters(
      sizes, rngs, query=(self.query, 1), key=(self.key, 1), value=(self.value, 1), out=(self.out, 2)
    )
    self.core = functools.partial(attend, sizes)

  @jax.named_scope("attention")
  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    side: "SideInputs",
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None]:
    """Returns [B, T, D] and, with a cache, the keys and values of these positions, which are not in the cache yet."""
    whole = sharding.whole_sequence(x)
    projected = linears(whole, (self.query[...], self.key[...], self.value[...]), self._join, sharding)
    projected = self.lora.after_stream(dict(zip(("query", "key", "value"), projected, strict=True)), x, sharding)
    if self.has_bias:
      biases = (self.query_bias[...], self.key_bias[...], self.value_bias[...])
      projected = tuple(y + bias for y, bias in zip(projected, biases, strict=True))
    q, k, v = (sharding.activation(y, "batch", None, "heads", None) for y in projected)
    v = checkpoint_name(v, "value")
    if self.has_norms:  # the gradients of norms need the inputs of norms, so these are saved
      q, k = self.query_norm(checkpoint_name(q, "query")), self.key_norm(checkpoint_name(k, "key"))
      q, k = rotate(q, side.angles), rotate(k, side.angles)
    else:
      q, k = checkpoint_name(rotate(q, side.angles), "query"), checkpoint_name(rotate(k, side.angles), "key")
    if cache is None or (isinstance(start, int) and start == 0):  # nothing came before, so the fastest core can read
      attended = self.core(q, k, v, side.segments, sharding)
    else:
      attended = with_past(q, k, v, *cache, start)
    cache = None if cache is None else Cache(k.swapaxes(1, 2), v.swapaxes(1, 2))
    attended = sharding.activation(attended, "batch", None, "heads", None)  # [B, T, N, H]
    out = sharding.split_sequence(linear(attended, self.out[...], inputs=2, flat=False))
    return self.lora.into_stream("out", out, attended, sharding, inputs=2), cache

  def _join(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """[..., N, H], [..., K, H], [..., K, H] → [..., K, (N/K + 2)·H]: for each key head its queries, key and value."""
    groups = arrays[1].shape[-2]
    return jnp.concatenate([a.reshape(*a.shape[:-2], groups, -1) for a in arrays], axis=-1)

  @staticmethod
  def check(sizes: "ModelSizes") -> None:
    if sizes.heads % sizes.kv_heads:
      raise ConfigError(
        f"model.kv_heads={sizes.kv_heads} does not divide model.heads={sizes.heads}; "
        f"use {' or '.join(str(k) for k in range(1, sizes.heads + 1) if sizes.heads % k == 0)}"
      )
    even = 2 * sizes.reads.coordinates  # rotary embedding rotates pairs, an equal number for each coordinate
    if sizes.head_dim % even:
      raise ConfigError(
        f"model.head_dim={sizes.head_dim} (model.width={sizes.width} / model.heads={sizes.heads} if not set) must be a "
        f"multiple of {even}, as rotary embedding of {sizes.inputs} needs; use other sizes"
      )

  @staticmethod
  def products(sizes: "ModelSizes") -> dict[str, int]:
    of = {name: sizes.width * side for name, side in Attention.sides(sizes).items()}
    return {"query": of["query"], "key": of["key"], "value": of["value"], "attention_output": of["out"]}

  @staticmethod
  def per_pair(sizes: "ModelSizes") -> int:
    return 2 * sizes.heads * sizes.head_dim  # the score, and its part of what is read

  @staticmethod
  def sides(sizes: "ModelSizes") -> dict[str, int]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {"query": queries, "key": keys, "value": keys, "out": queries}

  @staticmethod
  def reading(sizes: "ModelSizes") -> str:
    why = f", because {sizes.context_why}" if sizes.context_why else ""
    return f"attention reads other positions by {sizes.attention_context}{why}"


class Recurrence(Mixer):
  """A gated linear recurrence, minGRU of arXiv:2410.01201 with an output gate as in arXiv:2402.19427.

  Each number of a head has a state: (1 − k) · the state before + k · value, with k = sigmoid(key + bias). It reads
  silu(query) · state. The state begins with 0 in each document. The weights have the names of attention's.
  """

  splits_positions = True

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs):
    d, n, h, dtype = sizes.width, sizes.heads, sizes.head_dim, sizes.param_dtype
    into = lambda: weight(rngs.weights, (d, n, h), ("embed", "heads", None), std=d**-0.5, dtype=dtype)
    self.query, self.key, self.value = into(), into(), into()
    self.out = weight(rngs.weights, (n, h, d), ("heads", None, "embed"), std=(2 * sizes.depth * d) ** -0.5, dtype=dtype)
    # At first the states keep from half to 0.995 of themselves, so heads remember from 2 to 200 positions.
    self.key_bias = nnx.Param(-jnp.linspace(0, 5.3, n * h).reshape(n, h).astype(dtype), dims=("heads", None))
    self.lora = Adapters(
      sizes, rngs, query=(self.query, 1), key=(self.key, 1), value=(self.value, 1), out=(self.out, 2)
    )

  @jax.named_scope("recurrence")
  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    side: "SideInputs",
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None]:
    assert cache is None
    weights, join = (self.query[...], self.key[...], self.value[...]), functools.partial(jnp.concatenate, axis=-1)
    projected = linears(sharding.whole_sequence(x), weights, join, sharding)
    projected = self.lora.after_stream(dict(zip(("query", "key", "value"), projected, strict=True)), x, sharding)
    pinned = (sharding.activation(y, "batch", None, "heads", None) for y in projected)
    q, k, v = map(checkpoint_name, pinned, ("query", "key", "value"))
    k = jax.nn.sigmoid(k.astype(jnp.float32) + self.key_bias[...].astype(jnp.float32))
    read = jax.nn.silu(q) * states(1 - k, k * v, side.segments, sharding).astype(x.dtype)
    read = sharding.activation(read, "batch", None, "heads", None)  # [B, T, N, H]
    out = sharding.split_sequence(linear(read, self.out[...], inputs=2, flat=False))
    return self.lora.into_stream("out", out, read, sharding, inputs=2), None

  @staticmethod
  def products(sizes: "ModelSizes") -> dict[str, int]:
    return dict.fromkeys(("query", "key", "value", "attention_output"), sizes.width * sizes.heads * sizes.head_dim)

  @staticmethod
  def state(sizes: "ModelSizes") -> int:
    return sizes.heads * sizes.head_dim

  @staticmethod
  def sides(sizes: "ModelSizes") -> dict[str, int]:
    return dict.fromkeys(("query", "key", "value", "out"), sizes.heads * sizes.head_dim)

  @staticmethod
  def reading(sizes: "ModelSizes") -> str:
    return "the recurrence hands its state on from chunk to chunk"


MIXERS: dict[str, type[Mixer]] = {"attention": Attention, "recurrence": Recurrence}


def check_writes(sizes: "ModelSizes") -> None:
  """Raises ConfigError unless a model of these sizes can write and score texts."""
  if not MIXERS[sizes.mixer].has_cache:
    raise ConfigError(
      f"model.mixer={sizes.mixer!r} has no cache, so its model writes and scores no texts; use a model with "
      "model.mixer='attention'"
    )


def check_splits(sizes: "ModelSizes", fields: str) -> None:
  """Raises ConfigError unless devices may share the positions of a text, as these fields of the mesh ask."""
  if not MIXERS[sizes.mixer].splits_positions:
    able = " or ".join(repr(name) for name, mixer in MIXERS.items() if mixer.splits_positions)
    raise ConfigError(
      f"model.mixer={sizes.mixer!r} does not say that devices may split the positions of a text, as this strategy does "
      f"with {fields}; use a strategy other than context and long_context, or model.mixer={able}"
    )
