"""The Transformer: an embedding of tokens or patches, a stack of equal blocks, a head. Llama-style, no biases.

The blocks are stacked on a leading `layers` axis and scanned, so compile time does not grow with depth and a
pipeline stage is a slice of that axis. The scan's body gathers the weights of one block at a time: that one line is
all that fully sharded data parallelism asks of a model.

The three parts of the forward pass are three methods (`embed`, `run_blocks`, `logits`), so a schedule can run
them in different places.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Attention, Cache, rope_angles
from models.axes import UNSHARDED, Axes, Sharding
from models.config import ModelConfig
from models.layers import RMSNorm, SwiGLU, dropout, fold_in, linear, weight

# A gathered weight must not outlive the block that uses it, and neither may a view of one, such as its reshape.
_VIEWS = {"sharding_constraint", "reshape", "transpose", "convert_element_type"}

# Cheaper to do again, as the backward pass reads what they are made of, than to write down and to read.
_ELEMENTWISE = {"mul", "div", "sub", "logistic"}


def _all_but(names: set[str]) -> Callable[..., bool]:
  return lambda primitive, *_, **__: primitive.name not in names


# What the backward pass of a block may reuse from its forward pass: "none" recomputes only the gathers and what an
# elementwise operation makes, "dots" keeps the matrix products and "full" keeps nothing but the block's input. "all" is
# for measuring (analysis/saved.py): no config can ask for it.
REMAT_POLICIES = {
  "none": _all_but(_VIEWS | _ELEMENTWISE),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
  "all": _all_but(_VIEWS),
}


class Block(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config)
    self.attention = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config)
    self.mlp = SwiGLU(config, rngs)
    self.dropout = config.dropout

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    angles: jax.Array,  # [T, H/2]
    keys: jax.Array | None,  # [B], this block's dropout keys
    sharding: Sharding,
    cache: Cache | None = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Cache | None]:
    attended, cache = self.attention(self.attention_norm(x), angles, sharding, cache, start)
    x = x + dropout(attended, self.dropout, fold_in(keys, 0), sharding)
    x = x + dropout(self.mlp(self.mlp_norm(x), sharding), self.dropout, fold_in(keys, 1), sharding)
    return x, cache


class _Layer(NamedTuple):
  """What the scan over blocks slices: the weights, number and cache of one block (or of all, stacked)."""

  weights: Any
  index: jax.Array
  cache: Cache | None


class Transformer(nnx.Module):
  """Tokens [B, T] → logits [B, T, V], causal; or images [B, S, S, 3] → logits [B, classes], bidirectional."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    d, dtype = config.width, config.param_dtype
    if config.is_image:
      patch = config.patch_size**2 * 3
      self.embedding = weight(rngs, (patch, d), (None, "embed"), std=patch**-0.5, dtype=dtype)
    else:
      self.embedding = weight(rngs, (config.vocab_size, d), ("vocab", "embed"), std=d**-0.5, dtype=dtype)

    @nnx.split_rngs(splits=config.depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs: nnx.Rngs) -> Block:
      return Block(config, rngs)

    self.blocks = stacked(rngs)
    self.norm = RMSNorm(config)
    if config.is_image:
      self.head = weight(rngs, (d, config.classes), ("embed", None), std=d**-0.5, dtype=dtype)
    elif not config.tied_embedding:
      self.head = weight(rngs, (d, config.vocab_size), ("embed", "vocab"), std=d**-0.5, dtype=dtype)

  def __call__(self, inputs: jax.Array, *, keys: jax.Array | None = None, sharding: Sharding = UNSHARDED) -> jax.Array:
    """The whole forward pass. `keys` [B] holds a dropout key for each example; None switches dropout off."""
    x = self.embed(inputs, sharding)
    x, _ = self.run_blocks(x, keys=keys, sharding=sharding)
    return self.logits(x, sharding)

  def embed(self, inputs: jax.Array, sharding: Sharding = UNSHARDED) -> jax.Array:
    """Tokens [B, T], or normalised images [B, S, S, 3] → [B, T, D] in the compute dtype."""
    table = self._ready(self.embedding, sharding)
    if self.config.is_image:
      x = linear(patches(inputs, self.config.patch_size).astype(table.dtype), table)
    else:
      # Pinned, so that its gradient is: a scatter-add sums where the examples are. Left free, the compiler may send
      # the activations' gradients to where the table is stored instead.
      x = sharding.activation(table, "vocab", None)[inputs]
    return sharding.activation(x, "batch", None, None)

  def run_blocks(
    self,
    x: jax.Array,  # [B, T, D]
    *,
    keys: jax.Array | None = None,  # [B]
    sharding: Sharding = UNSHARDED,
    cache: Cache | None = None,  # stacked, [L, B, S, K, H] each
    start: jax.Array | int = 0,
    first_layer: jax.Array | int = 0,
    unroll: int = 1,
  ) -> tuple[jax.Array, Cache | None]:
    """Runs the stacked blocks. With a cache, x stands at positions start .. start + T of the text.

    `first_layer` numbers the first block of this stack, where the stack is a slice of a longer one. `unroll` blocks are
    written out in each round of the scan.
    """
    graph, stacked = nnx.split(self.blocks)
    depth = jax.tree.leaves(stacked)[0].shape[0]
    angles = rope_angles(self._positions(x.shape[1], start), self.config.head_size, self.config.rope_base)

    def body(x: jax.Array, layer: _Layer) -> tuple[jax.Array, Cache | None]:
      block = nnx.merge(graph, jax.tree.map(lambda w: self._ready(w, sharding), layer.weights, is_leaf=_is_param))
      return block(x, angles, fold_in(keys, layer.index), sharding, layer.cache, start)

    body = jax.checkpoint(body, policy=REMAT_POLICIES[self.config.remat], prevent_cse=False)
    return jax.lax.scan(body, x, _Layer(stacked, first_layer + jnp.arange(depth), cache), unroll=unroll)

  def logits(self, x: jax.Array, sharding: Sharding = UNSHARDED) -> jax.Array:
    """[B, T, D] → float32 logits: [B, T, V] for a text, [B, classes] for images (mean over the patches)."""
    x = self.norm(x)
    if self.config.is_image:
      head = sharding.gather(self.head[...], self.head.axes)
      return linear(jnp.mean(x, axis=1, dtype=jnp.float32), head.astype(jnp.float32))  # ten classes: float32 is free
    head = self._ready(self.embedding, sharding).T if self.config.tied_embedding else self._ready(self.head, sharding)
    return sharding.activation(linear(x, head).astype(jnp.float32), "batch", None, "vocab")

  def empty_cache(self, batch: int, length: int) -> Cache:
    """A cache for `length` positions of `batch` texts."""
    c = self.config
    zeros = jnp.zeros((c.depth, batch, length, c.kv_heads, c.head_size), c.dtype)
    return Cache(zeros, zeros)

  def _ready(self, w: nnx.Param, sharding: Sharding) -> jax.Array:
    """A weight as used: in the compute dtype (cast first, so that fewer bytes travel), then gathered.

    The scales of norms keep their precision; they are used in float32.
    """
    is_scale = not any(w.axes)
    return w[...] if is_scale else sharding.gather(w[...].astype(self.config.dtype), w.axes)

  def _positions(self, length: int, start: jax.Array | int) -> jax.Array:
    """Coordinates [T, A] of the positions: place in the text, or (row, column) of the patch."""
    index = start + jnp.arange(length)
    if not self.config.is_image:
      return index[:, None]
    side = self.config.image_size // self.config.patch_size
    return jnp.stack([index // side, index % side], axis=-1)


def patches(images: jax.Array, size: int) -> jax.Array:
  """Images [B, S, S, C] → flattened patches [B, (S/size)², size² · C], row by row."""
  b, s, _, c = images.shape
  n = s // size
  x = images.reshape(b, n, size, n, size, c).swapaxes(2, 3)
  return x.reshape(b, n * n, size * size * c)


def _is_param(x: Any) -> bool:
  return isinstance(x, nnx.Param)


@functools.cache
def definition(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
  """The module's structure, and its parameters as shapes: nothing is allocated."""
  model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
  return nnx.split(model, nnx.Param)


def logical_axes(config: ModelConfig) -> dict[str, Any]:
  """The names of every parameter's dimensions, as a nested dict of tuples in the shape of the parameters."""

  def axes(path: tuple, param: nnx.Param) -> Axes:
    stacked = path[0].key == "blocks"
    return (("layers",) if stacked else ()) + param.axes

  _, params = definition(config)
  return nnx.to_pure_dict(jax.tree.map_with_path(axes, params, is_leaf=_is_param))


def init_params(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Fresh parameters as a nested dict of arrays; the same key gives the same bits under every layout."""
  return nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(params=key)), nnx.Param))


def bind(config: ModelConfig, params: dict[str, Any]) -> Transformer:
  """The model with these parameters: what `init_params` returned, or slices of its stacked blocks."""
  graph, _ = definition(config)
  return nnx.merge(graph, params)
