"""The Transformer: an embedding, a stack of identical blocks and a head. Llama-style.

The blocks' weights are stacked on a leading `layers` dimension and the blocks run in a scan. So compile time does not
grow with depth, and a pipeline stage is a slice of that dimension. The body of the scan gathers the weights of one
block. That one line is all that fully sharded data parallelism needs from a model. Blocks of other shapes are a stack
of their own, and the scan runs periods of the kinds that a model has (stacks.py).

A training step has three parts, each a method (`embed`, `run_blocks`, `head_loss_sums`), so that a pipeline can run
them on different devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models import stacks
from models.block import Block
from models.dimensions import UNSHARDED, Sharding
from models.ops.float8 import Quantized, quantized
from models.ops.layers import RMSNorm, linear_by_rows, weight
from models.ops.loss import Sums, Targets
from models.ops.positions import own
from models.ops.routing import Counted, of_layers, penalty
from models.remat import Policy, policy_of
from models.side_inputs import SideInputs
from models.sizes import ModelSizes
from models.stacks import Loop, Place, Stack


class Transformer(nnx.Module):
  """An input (models/inputs.py), a stack of blocks, and an objective (models/objectives.py)."""

  def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs):
    self.sizes = sizes
    shape, dims, std = sizes.reads.embedding()
    self.embedding = weight(rngs.weights, shape, dims, std=std, dtype=sizes.param_dtype)

    for stack in sizes.stacks:
      setattr(self, stack.name, stacked(stack, rngs))
    self.norm = RMSNorm(sizes.width, sizes)
    if not sizes.tied_embedding:
      shape, dims = sizes.predicts.head()
      std, used = sizes.width**-0.5, sizes.predicts.head_dtype()
      self.head = weight(rngs.weights, shape, dims, std=std, dtype=sizes.param_dtype, used=used)

  def __call__(
    self,
    inputs: jax.Array,
    *,
    segments: jax.Array | None = None,
    keys: jax.Array | None = None,
    sharding: Sharding = UNSHARDED,
  ) -> jax.Array:
    """The forward pass.

    Args:
      segments: [B, T], the document of each token (`ModelSizes.example_shapes`); without them a row is one document.
      keys: [B], a dropout key for each example; without them nothing is dropped.
    """
    x, table, _ = self._before_head(inputs, segments, keys, sharding)
    return self.logits(x, sharding, segments, table)

  def loss_sums(
    self,
    inputs: jax.Array,
    targets: Targets,
    *,
    segments: jax.Array | None = None,
    keys: jax.Array | None = None,
    sharding: Sharding = UNSHARDED,
  ) -> tuple[jax.Array, Sums]:
    """The forward pass. Returns the loss, with what routers add to it, and the sums, whose `loss` is without that."""
    x, table, routed = self._before_head(inputs, segments, keys, sharding, self.counted(targets, segments, sharding))
    loss, sums = self.head_loss_sums(x, targets, sharding, segments, table)
    return loss + penalty(routed, self.sizes.experts), sums | routed

  def counted(self, targets: Targets, segments: jax.Array | None, sharding: Sharding) -> Counted | None:
    """The tokens and predictions that count in the sums of routers; None without experts."""
    if not self.sizes.experts:
      return None
    predictions = jnp.sum(targets.counted.reshape(len(targets.counted), -1), axis=1)
    predictions = sharding.across(jax.lax.psum, predictions, "positions")  # over devices that share an example
    tokens = jnp.ones((len(predictions), self.sizes.positions), bool) if segments is None else segments != 0
    return Counted(own(tokens, sharding) & (predictions > 0)[:, None], predictions)

  def _before_head(
    self,
    inputs: jax.Array,
    segments: jax.Array | None,
    keys: jax.Array | None,
    sharding: Sharding,
    counted: Counted | None = None,
  ) -> tuple[jax.Array, jax.Array | None, Sums]:
    """The stream that the head reads; the gathered embedding, if it is the head too; and the sums of routers."""
    table = self._cast_and_gathered(self.embedding, sharding)
    x = self.embed(inputs, sharding, table)
    length = x.shape[1] * sharding.shards("positions")
    side = SideInputs.of(self.sizes, length, segments=segments, keys=keys, counted=counted, sharding=sharding)
    x, routed = self.run_blocks(x, side, sharding)
    return x, table if self.sizes.tied_embedding else None, routed

  @jax.named_scope("embed")
  def embed(self, inputs: jax.Array, sharding: Sharding = UNSHARDED, table: jax.Array | None = None) -> jax.Array:
    """Tokens [B, T] or normalized images [B, S, S, C] → [B, T, D] in the compute dtype.

    `table` is the embedding, if it is gathered already.
    """
    table = self._cast_and_gathered(self.embedding, sharding) if table is None else table
    return self.sizes.reads.embed(table, inputs, sharding)

  def run_blocks(
    self,
    x: jax.Array,  # [B, T, D]
    side: SideInputs,
    sharding: Sharding = UNSHARDED,
    *,
    loops: Sequence[Loop] | None = None,
    first_layer: jax.Array | int = 0,
    unroll: int = 1,
    policy: Policy | None = None,
  ) -> tuple[jax.Array, Sums]:
    """Runs the blocks. Also returns the sums of their routers, of which `load` is by layer.

    Args:
      loops: the blocks to run (stacks.py); by default all. Of their stacks the model must hold no others.
      first_layer: the number of the first of them in the model.
      unroll: how many blocks one iteration of a loop runs.
      policy: what the backward pass may reuse; by default the policy of `model.remat` and `model.saved`.
    """
    c = self.sizes
    loops = stacks.loops(c.kinds) if loops is None else loops
    kinds, weights, block_of = stacks.kinds_of(loops), {}, {}
    for name in dict.fromkeys(kind.stack for kind in kinds):
      weights[name], block_of[name] = self.scanned(name, sharding)
      if c.products != "dtype":
        weights[name] = quantized(weights[name], sharding)
    # The last stage of a pipeline may have room for more blocks than are left.
    padded = not isinstance(first_layer, int) and (c.depth - c.first_layers) % len(kinds) != 0

    def body(place: Place, x: jax.Array, layer: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, Sums]:
      x, (weights, first) = checkpoint_name(x, "block_input"), layer
      block, number = block_of[place.kind.stack](place.own(weights)), first_layer + first + place.at
      run = lambda x: block(x, side.of_layer(number, place.kind.sees), sharding)[::2]
      if not padded:
        return run(x)
      nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, x)[1])
      return jax.lax.cond(number < c.depth, run, lambda x: (x, nothing), x)

    policy = policy or policy_of(c.remat, c.saved, c.lora.rank if c.lora else 0)

    def body_at(place: Place) -> Callable:
      period, times = place.loop
      # Without a loop, compilers would merge what is computed again with the forward pass, and save it.
      no_loop = c.unroll == "all" or len(period) > 1 or (times == 1 and len(loops) > 1)
      return jax.checkpoint(functools.partial(body, place), policy=policy, prevent_cse=no_loop)

    x, results = stacks.scan(body_at, x, weights, loops, unroll=len(kinds) if c.unroll == "all" else unroll)
    numbers = jnp.asarray(first_layer + np.flatnonzero([kind.stack == stacks.BLOCKS for kind in kinds]))
    return x, of_layers(stacks.in_order(results), numbers, c)

  def scanned(self, name: str, sharding: Sharding) -> tuple[nnx.State, Callable[[nnx.State], Block]]:
    """A stack's weights, to scan over its layers, and a function for the scan's body: one layer's weights → a block.

    Weights are cast here. If the body cast them, all would exist twice: compilers keep what they cast for each pass.
    """
    graph, weights = nnx.split(getattr(self, name))
    gathered = lambda w: self._gathered(w, sharding)
    block_of = lambda weights: nnx.merge(graph, jax.tree.map(gathered, weights, is_leaf=is_param))
    return jax.tree.map(self._cast, weights, is_leaf=is_param), block_of

  @jax.named_scope("head")
  def logits(
    self,
    x: jax.Array,
    sharding: Sharding = UNSHARDED,
    segments: jax.Array | None = None,
    table: jax.Array | None = None,  # a tied embedding, gathered already
  ) -> jax.Array:
    """[B, T, D] and segments [B, T] → float32 logits: [B, T, V] of the next token, or [B, classes]."""
    return self.sizes.predicts.logits(self.norm(x), self._head_weight(sharding, table), sharding, segments)

  @jax.named_scope("head")
  def next_logits(self, x: jax.Array, sharding: Sharding = UNSHARDED) -> jax.Array:
    """One position of each text [B, D] → float32 logits [B, V] of the next token."""
    if not self.sizes.tied_embedding:
      return self.logits(x[:, None], sharding)[:, 0]
    found = linear_by_rows(self.norm(x), self._cast_and_gathered(self.embedding, sharding))
    return sharding.activation(found.astype(jnp.float32), "batch", "vocab")

  @jax.named_scope("head")
  def head_loss_sums(
    self,
    x: jax.Array,
    targets: Targets,
    sharding: Sharding = UNSHARDED,
    segments: jax.Array | None = None,
    table: jax.Array | None = None,  # a tied embedding, gathered already
  ) -> tuple[jax.Array, Sums]:
    """The loss of x [B, T, D], summed over the predictions that count, and all sums."""
    head = self._head_weight(sharding, table)
    return self.sizes.predicts.loss_sums(self.norm(x), head, targets, sharding, segments)

  def _head_weight(self, sharding: Sharding, table: jax.Array | None) -> jax.Array:
    """The head [D, V], gathered."""
    if self.sizes.tied_embedding:
      return (self._cast_and_gathered(self.embedding, sharding) if table is None else table).T
    return self._cast_and_gathered(self.head, sharding)

  def _cast_and_gathered(self, w: nnx.Variable, sharding: Sharding) -> jax.Array:
    return self._gathered(self._cast(w), sharding)

  @jax.named_scope("weights")
  def _cast(self, w: nnx.Variable) -> nnx.Variable:
    """A weight in the dtype in which products need it. It is cast before it is gathered, which sends fewer bytes."""
    if isinstance(w[...], Quantized):
      return w
    return w.replace(w[...].astype(used_dtype(w, self.sizes)))

  @jax.named_scope("weights")
  def _gathered(self, w: nnx.Variable, sharding: Sharding) -> jax.Array:
    found = sharding.gather(w[...], w.dims)
    return found.wide() if isinstance(found, Quantized) and self.sizes.products == "float8_gathers" else found


def stacked(stack: Stack, rngs: nnx.Rngs) -> Block:
  """The blocks of a stack, as one block with stacked weights."""

  @nnx.split_rngs(splits=stack.layers)
  @nnx.vmap(in_axes=0, out_axes=0)
  def make(rngs: nnx.Rngs) -> Block:
    return Block(stack.sizes, rngs)

  return make(rngs)


def used_dtype(w: nnx.Variable, sizes: ModelSizes) -> str:
  """The dtype in which the model uses a parameter. Norms are computed in float32, so their scales stay as they are."""
  return (getattr(w, "used", None) or sizes.dtype) if any(w.dims) else w.dtype.name


def is_param(x: Any) -> bool:
  return isinstance(x, nnx.Param)
