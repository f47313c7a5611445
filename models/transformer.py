"""The Transformer: an embedding, a stack of identical blocks and a head. Llama-style.

The blocks' weights are stacked on a leading `layers` dimension and the blocks run in a scan. So compile time does not
grow with depth, and a pipeline stage is a slice of that dimension. The body of the scan gathers the weights of one
block. That one line is all that fully sharded data parallelism needs from a model. If the first blocks of a mixture are
dense, these are a stack of their own, with a scan that runs before the scan of the rest.

A training step has three parts, each a method (`embed`, `run_blocks`, `head_loss_sums`), so that a pipeline can run
them on different devices.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models import windows
from models.block import Block, SideInputs
from models.dimensions import UNSHARDED, Sharding
from models.ops import rotary
from models.ops.float8 import Quantized, quantized
from models.ops.layers import RMSNorm, linear_by_rows, weight
from models.ops.loss import Sums, Targets
from models.ops.positions import own
from models.ops.routing import Counted, of_layers, penalty
from models.remat import Policy, policy_of
from models.sizes import ModelSizes, Stack


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
    side = self.side_inputs(length, segments=segments, keys=keys, counted=counted, sharding=sharding)
    x, routed = self.run_blocks(x, side, sharding)
    return x, table if self.sizes.tied_embedding else None, routed

  @jax.named_scope("embed")
  def embed(self, inputs: jax.Array, sharding: Sharding = UNSHARDED, table: jax.Array | None = None) -> jax.Array:
    """Tokens [B, T] or normalized images [B, S, S, C] → [B, T, D] in the compute dtype.

    `table` is the embedding, if it is gathered already.
    """
    table = self._cast_and_gathered(self.embedding, sharding) if table is None else table
    return self.sizes.reads.embed(table, inputs, sharding)

  def side_inputs(
    self,
    length: int,
    *,
    start: jax.Array | int = 0,
    segments: jax.Array | None = None,  # [B, T]
    keys: jax.Array | None = None,  # [B]
    counted: Counted | None = None,
    sharding: Sharding = UNSHARDED,
  ) -> SideInputs:
    """What every block reads beside the stream of `length` positions, which begin at `start`: a number, or [B].

    With segments, the positions in each segment begin at 0. If devices share positions, `length` counts all positions.
    """
    if segments is None:
      positions = jnp.expand_dims(start, -1) + own(jnp.arange(length)[None], sharding)[0]  # [T] or [B, T]
    else:
      # Whole: the compiler would split them in attention, and permutes inside a pipeline's units hang.
      segments = sharding.activation(segments, "batch", None)
      positions = own(sharding.activation(positions_in(segments), "batch", None), sharding)  # [B, T]
    c, located = self.sizes, self.sizes.reads.locate(positions)
    pairs, scaling = c.head_dim // 2 // located.shape[-1], (c.rope_scaling, c.rope_scaling_kind)
    angles = rotary.angles(located, rotary.frequencies(pairs, c.rope_base, *scaling))
    local = rotary.angles(located, rotary.frequencies(pairs, c.rope_base_local, ())) if c.rope_base_local else None
    return SideInputs(angles, segments, keys, counted, local, rotary.scale_of(*scaling), c.shown)

  def run_blocks(
    self, x: jax.Array, side: SideInputs, sharding: Sharding = UNSHARDED, policy: Policy | None = None
  ) -> tuple[jax.Array, Sums]:
    """Runs all blocks on x [B, T, D]. Also returns the sums of their routers, of which `load` is by layer."""
    routed = dict[str, jax.Array]()
    for stack in self.sizes.stacks:
      x, found = self.run_stack(stack.name, x, side, sharding, policy=policy)
      routed |= found
    return x, routed

  def run_stack(
    self,
    name: str,
    x: jax.Array,  # [B, T, D]
    side: SideInputs,
    sharding: Sharding = UNSHARDED,
    *,
    first_layer: jax.Array | int | None = None,
    unroll: int = 1,
    policy: Policy | None = None,
  ) -> tuple[jax.Array, Sums]:
    """Runs the blocks of one stack, or a slice of it (`run_blocks`).

    Args:
      name: one of STACKS.
      first_layer: the first block's number in the model; by default the number of the stack's first block.
      unroll: how many blocks one iteration of the scan runs.
      policy: what the backward pass may reuse; by default the policy of `model.remat` and `model.saved`.
    """
    c = self.sizes
    weights, block_of = self.scanned(name, sharding)
    if c.products != "dtype":
      weights = quantized(weights, sharding)
    if first_layer is None:
      first_layer = c.dense_layers if name == "blocks" else 0
    held = jax.tree.leaves(weights)[0].shape[0]
    # The last stage of a pipeline may have room for more blocks than are left.
    padded = not isinstance(first_layer, int) and c.stacks[-1].layers % held != 0

    def body(kind: str, x: jax.Array, layer: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, Sums]:
      x, (weights, number) = checkpoint_name(x, "block_input"), layer
      block = block_of(weights)
      run = lambda x: block(x, side.of_layer(number, kind), sharding)[::2]
      if not padded:
        return run(x)
      nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, x)[1])
      return jax.lax.cond(number < c.depth, run, lambda x: (x, nothing), x)

    numbers, kinds = first_layer + jnp.arange(held), self.kinds(name)
    # Without a loop, compilers would merge what is computed again with the forward pass, and save it.
    no_loop = c.unroll == "all" or (len(c.stacks) > 1 and held == 1) or len(kinds) > 1
    policy = policy or policy_of(c.remat, c.saved, c.lora.rank if c.lora else 0)
    bodies = [jax.checkpoint(functools.partial(body, kind), policy=policy, prevent_cse=no_loop) for kind in kinds]
    x, routed = windows.scan(bodies, x, (weights, numbers), unroll=held if c.unroll == "all" else unroll)
    return x, of_layers(routed, numbers, c)

  def kinds(self, name: str) -> tuple[str, ...]:
    """The period of a stack's layers (windows.py), or of a slice that is whole periods."""
    return windows.period_of([kind for stack, kind in self.sizes.kinds if stack == name])

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


def positions_in(segments: jax.Array) -> jax.Array:
  """The position of each token in its segment: [1, 1, 1, 2, 2, 0] → [0, 1, 2, 0, 1, 0], for each row of [B, T]."""
  index = jnp.arange(segments.shape[1])
  is_first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
  return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def is_param(x: Any) -> bool:
  return isinstance(x, nnx.Param)
