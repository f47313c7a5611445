"""Mixers: how the positions of a text read each other in a block. `model.mixer` names one; mlps.py has the other half.

To add one, write a subclass of `Mixer` and add it to `MIXERS`. Every strategy trains its weights by the names of their
dimensions. MFU, plans and predictions follow from what it says of itself.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError
from models.dimensions import Sharding
from models.lora import Adapters
from models.ops import cache as caches
from models.ops.attention import attend
from models.ops.cache import Cache, with_past
from models.ops.layers import RMSNorm, linear, linears, weight
from models.ops.recurrence import State, states
from models.ops.rotary import rotate

if TYPE_CHECKING:
  from models.side_inputs import SideInputs
  from models.sizes import ModelSizes

Arrays = tuple[jax.Array, ...]


class Mixer(nnx.Module):
  """A block's mixer. It names the dimensions of its weights (models/dimensions.py): layouts split `heads`.

  Attributes:
    splits_positions: whether a device may have only its own positions of a text (ops/positions.py), because the mixer
      asks the other devices for what it reads there, or reads no other positions.
    has_cache: whether it can go on with a text from what it has read. If not, its model writes and scores no texts.
    heads: the fields of config.model with the sizes of the dimension `heads`.
    adapted: the weights that may have adapters.
  """

  splits_positions: bool = False
  has_cache: bool = False
  heads: tuple[str, ...] = ("heads",)
  adapted: tuple[str, ...] = ()

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs): ...  # makes the weights of one block

  def __call__(
    self, x: jax.Array, side: "SideInputs", sharding: Sharding, cache: Any = None, start: jax.Array | int = 0
  ) -> tuple[jax.Array, Any]:
    """What is added to the residual stream: [B, T, D] → [B, T, D]. Positions read only their own `side.segments`.

    With the cache of one block, also what these positions add to it. Then x begins at position `start` (a number, or
    [B]: one for each row) and has no segments.
    """
    raise NotImplementedError

  @staticmethod
  def check(sizes: "ModelSizes") -> None:
    """Raises ConfigError if the sizes do not fit this mixer."""

  @staticmethod
  def products(sizes: "ModelSizes") -> dict[str, int]:
    """The weights that multiply each position, with their sizes. The one that writes to the residual stream is "out".

    A result that remat can save by name (remat.NAMES) has the name of its weight.
    """
    raise NotImplementedError

  @staticmethod
  def per_pair(sizes: "ModelSizes") -> int:
    """Multiplications for each pair of a position and one that it reads; 0 if the mixer has no products of pairs."""
    return 0

  @staticmethod
  def state(sizes: "ModelSizes") -> int:
    """The size of a state that is handed on from chunk to chunk (ops/recurrence.py); 0 without one."""
    return 0

  @staticmethod
  def empty_cache(sizes: "ModelSizes", lengths: jax.Array, room: int) -> Any:
    """A cache for texts of which the first `lengths` [B] positions will be read together, with room for `room`."""
    raise ConfigError(
      f"model.mixer={sizes.mixer!r} has no cache, so its model writes and scores no texts; use a model with a mixer "
      f"that has one: {' or '.join(repr(name) for name, mixer in MIXERS.items() if mixer.has_cache)}"
    )


class Heads(Mixer):
  """A mixer of `heads` queries, which share `kv_heads` keys and values (arXiv:2305.13245), and an output."""

  splits_positions = True
  has_cache = True
  heads = ("heads", "kv_heads")
  adapted = ("query", "key", "value", "out")

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs):
    d, n, k, h, dtype = sizes.width, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.param_dtype
    drawn = functools.partial(weight, rngs.weights, dtype=dtype, product=True)
    self.query = drawn((d, n, h), ("embed", "heads", None), std=d**-0.5)
    self.key = drawn((d, k, h), ("embed", "heads", None), std=d**-0.5)
    self.value = drawn((d, k, h), ("embed", "heads", None), std=d**-0.5)
    self.out = drawn((n, h, d), ("heads", None, "embed"), std=(2 * sizes.depth * d) ** -0.5)
    if sizes.qkv_bias:
      bias = lambda heads: nnx.Param(jnp.zeros((heads, h), dtype), dims=("heads", None))
      self.query_bias, self.key_bias, self.value_bias = bias(n), bias(k), bias(k)
    if sizes.out_bias:
      self.out_bias = nnx.Param(jnp.zeros(d, dtype), dims=(None,))
    self.has_bias, self.has_out_bias = sizes.qkv_bias, sizes.out_bias
    self.lora = Adapters(
      sizes, rngs, query=(self.query, 1), key=(self.key, 1), value=(self.value, 1), out=(self.out, 2)
    )

  def read(self, x: jax.Array, sharding: Sharding) -> Arrays:
    """The stream [B, T, D] → queries [B, T, N, H], and keys and values [B, T, K, H]."""
    whole = sharding.whole_sequence(x)
    projected = linears(whole, (self.query[...], self.key[...], self.value[...]), self._join, sharding)
    projected = self.lora.after_stream(dict(zip(("query", "key", "value"), projected, strict=True)), x, sharding)
    if self.has_bias:
      biases = (self.query_bias[...], self.key_bias[...], self.value_bias[...])
      projected = tuple(y + bias for y, bias in zip(projected, biases, strict=True))
    return tuple(sharding.activation(y, "batch", None, "heads", None) for y in projected)

  def write(self, mixed: jax.Array, sharding: Sharding) -> jax.Array:
    """What the heads have [B, T, N, H] → what is added to the stream [B, T, D]."""
    mixed = sharding.activation(mixed, "batch", None, "heads", None)
    out = sharding.split_sequence(linear(mixed, self.out[...], sharding, inputs=2, flat=False))
    out = out + self.out_bias[...].astype(out.dtype) if self.has_out_bias else out
    return self.lora.into_stream("out", out, mixed, sharding, inputs=2)

  def _join(self, arrays: Arrays) -> jax.Array:
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

  @staticmethod
  def products(sizes: "ModelSizes") -> dict[str, int]:
    heads = {"query": sizes.heads, "key": sizes.kv_heads, "value": sizes.kv_heads, "out": sizes.heads}
    return {name: sizes.width * count * sizes.head_dim for name, count in heads.items()}


class Attention(Heads):
  """Self-attention with rotary positions: a head reads the values of all positions that it sees, by their scores."""

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs):
    super().__init__(sizes, rngs)
    if sizes.qk_norm and sizes.qk_norm_over == "head":
      self.query_norm, self.key_norm = RMSNorm(sizes.head_dim, sizes), RMSNorm(sizes.head_dim, sizes)
    elif sizes.qk_norm:
      norm = lambda heads: RMSNorm((heads, sizes.head_dim), sizes, ("heads", None))
      self.query_norm, self.key_norm = norm(sizes.heads), norm(sizes.kv_heads)
    if sizes.attention_sinks:
      self.sinks = nnx.Param(jnp.zeros(sizes.heads, sizes.param_dtype), dims=("heads",))
    self.has_norms, self.has_sinks = sizes.qk_norm, sizes.attention_sinks
    self.core = functools.partial(attend, sizes)
    self.query_scale = sizes.attention_scale * math.sqrt(sizes.head_dim) or 1.0  # cores divide by the root

  @jax.named_scope("attention")
  def __call__(
    self, x: jax.Array, side: "SideInputs", sharding: Sharding, cache: Any = None, start: jax.Array | int = 0
  ) -> tuple[jax.Array, Any]:
    q, k, v = self.read(x, sharding)
    v, turned = checkpoint_name(v, "value"), lambda x, scale=1.0: _turned(x, side, scale)
    if self.has_norms:  # the gradients of norms need the inputs of norms, so these are saved
      q, k = self.query_norm(checkpoint_name(q, "query")), self.key_norm(checkpoint_name(k, "key"))
      q, k = turned(q, self.query_scale), turned(k)
    else:
      q, k = checkpoint_name(turned(q, self.query_scale), "query"), checkpoint_name(turned(k), "key")
    sinks = self.sinks[...].astype(jnp.float32) if self.has_sinks else None
    if cache is None or (isinstance(start, int) and start == 0):  # nothing came before, so the fastest core can read
      attended = self.core(q, k, v, side.segments, sharding, side.window, sinks)
    else:
      attended = with_past(q, k, v, cache, start, side.window, sinks)
    new = None if cache is None else Cache(k.swapaxes(1, 2), v.swapaxes(1, 2))
    return self.write(attended, sharding), new

  @staticmethod
  def check(sizes: "ModelSizes") -> None:
    Heads.check(sizes)
    even = 2 * sizes.reads.coordinates  # rotary embedding rotates pairs, an equal number for each coordinate
    if sizes.head_dim % even:
      raise ConfigError(
        f"model.head_dim={sizes.head_dim} (model.width={sizes.width} / model.heads={sizes.heads} if not set) must be a "
        f"multiple of {even}, as rotary embedding of {sizes.inputs} needs; use other sizes"
      )

  @staticmethod
  def per_pair(sizes: "ModelSizes") -> int:
    return 2 * sizes.heads * sizes.head_dim  # for the score, and for what is read

  @staticmethod
  def empty_cache(sizes: "ModelSizes", lengths: jax.Array, room: int) -> Any:
    shape = len(lengths), sizes.kv_heads, room, sizes.head_dim
    return caches.empty(sizes.windowed, shape, sizes.shown, lengths, sizes.dtype)


def _turned(x: jax.Array, side: "SideInputs", scale: float) -> jax.Array:
  """Heads [B, T, N, H], rotated by the angles of their positions if the layer has any, times `scale`."""
  if side.angles is not None:
    return rotate(x, side.angles, side.scale * scale)
  return x if scale == 1 else (x * scale).astype(x.dtype)


class Recurrence(Heads):
  """A gated linear recurrence: minGRU (arXiv:2410.01201) with an output gate, as in Griffin (arXiv:2402.19427).

  Each key head has a state, (1 − k) · the state before + k · value, with k = sigmoid(key + bias). It begins with 0 in
  each document. Query heads read silu(query) · state. A causal mask, rotary positions and kernels have no part in it.
  """

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs):
    super().__init__(sizes, rngs)
    shape = sizes.kv_heads, sizes.head_dim
    bias = -jnp.linspace(0, 5.3, math.prod(shape)).reshape(shape)  # so at first, a state keeps 0.5 to 0.995 of itself
    self.decay_bias = nnx.Param(bias.astype(sizes.param_dtype), dims=("heads", None))

  @jax.named_scope("recurrence")
  def __call__(
    self, x: jax.Array, side: "SideInputs", sharding: Sharding, cache: Any = None, start: jax.Array | int = 0
  ) -> tuple[jax.Array, Any]:
    q, k, v = map(checkpoint_name, self.read(x, sharding), ("query", "key", "value"))
    k = jax.nn.sigmoid(k.astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32))
    if cache is not None and x.shape[1] > 1:  # what pads a prompt leaves the state as it is
      is_text = jnp.reshape(start, (-1, 1)) + jnp.arange(x.shape[1]) < cache.lengths[:, None]
      k = jnp.where(is_text[..., None, None], k, 0)
    decay, new = 1 - k, k * v
    if cache is not None:
      new = new.at[:, 0].add(decay[:, 0] * cache.state)
    found = states(decay, new, side.segments, sharding)  # [B, T, K, H]
    mixed = jax.nn.silu(q).reshape(*found.shape[:3], -1, found.shape[3]) * found[..., None, :].astype(x.dtype)
    return self.write(mixed.reshape(q.shape), sharding), None if cache is None else State(found[:, -1], cache.lengths)

  @staticmethod
  def check(sizes: "ModelSizes") -> None:
    Heads.check(sizes)
    for name in ("qk_norm", "attention_sinks"):
      if getattr(sizes, name):
        raise ConfigError(f"model.{name}=True is for model.mixer='attention', not 'recurrence'; set it to False")

  @staticmethod
  def state(sizes: "ModelSizes") -> int:
    return sizes.kv_heads * sizes.head_dim

  @staticmethod
  def empty_cache(sizes: "ModelSizes", lengths: jax.Array, room: int) -> State:
    state = jnp.zeros((sizes.depth, len(lengths), sizes.kv_heads, sizes.head_dim), jnp.float32)
    return State(state, jnp.broadcast_to(lengths, (sizes.depth, len(lengths))))


MIXERS: dict[str, type[Mixer]] = {"attention": Attention, "recurrence": Recurrence}
