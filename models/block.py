"""A block of the Transformer: attention, then a gated MLP or experts, each added to the residual stream.

How products and attention's core are computed is in ops/.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.experts import Experts
from models.lora import Adapters
from models.ops.attention import Cache, attend, rotate, with_past
from models.ops.layers import RMSNorm, dropout, fold_in, linear, linears, weight
from models.ops.loss import Sums
from models.ops.routing import Counted
from models.sizes import ModelSizes


class SideInputs(NamedTuple):
  """What every block reads beside the residual stream. `Transformer.side_inputs` makes it.

  Attributes:
    angles: [T, H/2] or [B, T, H/2], the angles of rotary embedding.
    segments: [B, T], the document of each token, for all positions, even if a device has only some of them; or None.
    keys: [B], the dropout keys of the examples, or None.
    counted: the tokens and predictions that count in the sums of routers; None: there are no sums.
  """

  angles: jax.Array
  segments: jax.Array | None = None
  keys: jax.Array | None = None
  counted: Counted | None = None

  def of_layer(self, number: jax.Array) -> "SideInputs":
    """The same inputs, with the dropout keys of one block."""
    return self._replace(keys=fold_in(self.keys, number))


class Block(nnx.Module):
  """Adds attention(norm(x)) to x, then mlp(norm(x))."""

  def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(sizes.width, sizes)
    self.attention = Attention(sizes, rngs)
    self.mlp_norm = RMSNorm(sizes.width, sizes)
    self.mlp = Experts(sizes, rngs, SwiGLU) if sizes.experts else SwiGLU(sizes, rngs)
    self.dropout, self.limit = sizes.dropout, sizes.expert_limit

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    side: SideInputs,  # with the keys of this block
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None, Sums]:
    """Returns the residual stream [B, T, D], the second result of `Attention`, and the sums of the block's router."""
    attended, new = self.attention(self.attention_norm(x), side, sharding, cache, start)
    # Pinned, so that a gradient that goes both to a sum and into a product is gathered for the product alone. XLA's GPU
    # compiler turns a gather that is sliced again into a permute without pairs, which returns zeros (jax 0.10.2).
    stream = lambda x: sharding.activation(x, "batch", "sequence", None)
    x = stream(x + dropout(attended, self.dropout, fold_in(side.keys, 0), sharding))
    normed = self.mlp_norm(x)
    routed: Sums = {}
    if isinstance(self.mlp, Experts):
      # When a text is written or scored, no token is dropped: the tokens before it may not be at hand.
      out, routed = self.mlp(normed, side.counted, sharding, self.limit if cache is None else 0)
    else:
      out = self.mlp(normed, sharding)
    return stream(x + dropout(out, self.dropout, fold_in(side.keys, 1), sharding)), new, routed


class Attention(nnx.Module):
  """Self-attention in which `heads` query heads share `kv_heads` key-value heads (arXiv:2305.13245)."""

  def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs):
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
    side: SideInputs,
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None]:
    """Returns [B, T, D] and, with a cache, the keys and values of these positions, which are not in the cache yet.

    With a cache, x begins at position `start` (a number, or [B]: one for each row) and has no segments.
    """
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
    out = self.lora.into_stream("out", out, attended, sharding, inputs=2)
    return checkpoint_name(out, "attention_output"), cache

  def _join(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """[..., N, H], [..., K, H], [..., K, H] → [..., K, (N/K + 2)·H]: for each key head its queries, key and value."""
    groups = arrays[1].shape[-2]
    return jnp.concatenate([a.reshape(*a.shape[:-2], groups, -1) for a in arrays], axis=-1)


class SwiGLU(nnx.Module):
  """The gated MLP: down(silu(gate(x)) · up(x)) (arXiv:2002.05202)."""

  def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs, hidden: int = 0):
    """`hidden` is the number of hidden units; 0: `sizes.mlp_width`."""
    d, f, dtype = sizes.width, hidden or sizes.mlp_width, sizes.param_dtype
    self.gate = weight(rngs.weights, (d, f), ("embed", "mlp"), std=d**-0.5, dtype=dtype)
    self.up = weight(rngs.weights, (d, f), ("embed", "mlp"), std=d**-0.5, dtype=dtype)
    self.down = weight(rngs.weights, (f, d), ("mlp", "embed"), std=(2 * sizes.depth * f) ** -0.5, dtype=dtype)
    self.lora = Adapters(sizes, rngs, gate=(self.gate, 1), up=(self.up, 1), down=(self.down, 1))

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array, sharding: Sharding) -> jax.Array:  # [B, T, D] → [B, T, D]
    whole = sharding.whole_sequence(x)
    gate, up = linears(whole, (self.gate[...], self.up[...]), functools.partial(jnp.stack, axis=-2), sharding)
    gate, up = self.lora.after_stream({"gate": gate, "up": up}, x, sharding)
    gate, up = checkpoint_name(gate, "mlp_gate"), checkpoint_name(up, "mlp_up")
    h = jax.nn.silu(gate) * up
    h = checkpoint_name(sharding.activation(h, "batch", None, "mlp"), "mlp_hidden")  # [B, T, F]
    out = sharding.split_sequence(linear(h, self.down[...], flat=False))
    return self.lora.into_stream("down", out, h, sharding)
