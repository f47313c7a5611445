"""The gated MLPs of several experts, for rows that are sorted by expert.

Each row belongs to one expert, and experts have different numbers of rows. A loop over blocks of rows computes only the
needed products. All rows of a block belong to one expert. So an expert's last block has fewer rows than the others, and
computes with zeros in place of the missing rows.

`lax.ragged_dot` has the same purpose. But XLA multiplies every row with every expert on CPUs and GPUs, and for the
gradients of weights also on TPUs (libtpu 0.0.42).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCKS = "blocks"  # the scope of the loop over blocks in a program
OF_EXPERT = 8  # blocks of an expert at equal loads; so about a sixteenth of the products are with zeros
LEAST, MOST = 8, 2048  # rows of a block; each block reads all weights of its expert, and adds to their gradients

NAMES = ("gate", "up", "down")
BIASED = ("gate", "up")  # a bias of `down` would be added once for each device that has some of the hidden units


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
  """The weights of experts.

  Attributes:
    gate, up: [e, D, F].
    down: [e, F, D].
    gated: hidden units, from the results of gate and up (mlps.py).
    biases: [e, F] each, what is added to the results of gate and up; None: nothing.
    adapters: for some of these weights by name, the halves of an adapter (models/lora.py), [e, I, R] and [e, R, O].
      Then only adapters are trained. None: the weights and biases are trained.
  """

  gate: Any
  up: Any
  down: Any
  gated: Callable[[jax.Array, jax.Array], jax.Array] = dataclasses.field(metadata={"static": True})
  biases: Any = None
  adapters: Any = None

  @property
  def trained(self) -> Any:
    """The arrays that have gradients: the weights and biases, or the adapters by name."""
    return ((self.gate, self.up, self.down), self.biases) if self.adapters is None else self.adapters

  def with_trained(self, values: Any) -> "Weights":
    """The same tree with these values for the trained arrays, and None for the others."""
    if self.adapters is not None:
      return Weights(None, None, None, self.gated, adapters=values)
    (gate, up, down), biases = values
    return Weights(gate, up, down, self.gated, biases)

  def product(self, name: str, x: jax.Array) -> jax.Array:
    """Rows x [b, I] times a weight of one expert and both halves of its adapter, plus its bias, if any → [b, O]."""
    product = x @ getattr(self, name)
    if self.biases and name in BIASED:
      product += self.biases[BIASED.index(name)]
    if self.adapters and name in self.adapters:
      a, b = self.adapters[name]
      product += (x @ a) @ b
    return product

  def transposed(self, name: str, g: jax.Array) -> jax.Array:
    """The gradient of the rows x of a `product`, from the gradient of its result: [b, O] → [b, I]."""
    product = g @ getattr(self, name).T
    if self.adapters and name in self.adapters:
      a, b = self.adapters[name]
      product += (g @ b.T) @ a.T
    return product


class Rows(NamedTuple):
  """Rows sorted by expert: first all of expert 0. Rows after the last expert's belong to no expert."""

  x: jax.Array  # [R, D]
  scales: jax.Array  # [R], what a row's hidden units are multiplied by, in the dtype of x
  counts: jax.Array  # [e], how many rows each expert has


def forward(rows: Rows, weights: Weights, likely: int) -> jax.Array:
  """down(scale · gated(gate(x), up(x))) of each row [R, D]; 0 for rows that belong to no expert.

  Args:
    likely: how many rows belong to experts, if all devices and experts have equal loads.
  """

  def one(block: RowBlock, out: jax.Array) -> jax.Array:
    x, scales, own = block.of(rows.x), block.of(rows.scales), block.weights_of(weights)
    hidden = scales[:, None] * weights.gated(own.product("gate", x), own.product("up", x))
    return block.put(out, own.product("down", hidden))

  return _each_block(rows, likely, one, jnp.zeros_like(rows.x))


def backward(rows: Rows, weights: Weights, of_out: jax.Array, likely: int) -> tuple[jax.Array, jax.Array, Any]:
  """The gradients of rows [R, D] and, in float32, scales [R] and `Weights.trained`. Computes hidden units again.

  With adapters, no gradient of a large weight is made, which would be a third of the backward pass.
  """
  product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)

  def one(block: RowBlock, carry: Any) -> Any:
    of_x, of_scales, of_weights = carry
    x, g, scales = block.of(rows.x), block.of(of_out), block.of(rows.scales)[:, None]
    own = block.weights_of(weights)
    hidden, pull = jax.vjp(weights.gated, own.product("gate", x), own.product("up", x))
    of_hidden = own.transposed("down", g)
    of_gate, of_up = pull(scales * of_hidden)
    inputs, gradients = (x, x, scales * hidden), (of_gate, of_up, g)
    add = lambda total, x, g: total.at[block.expert].add(product(x.T, g))
    if own.adapters is None:
      of_matrices, of_biases = of_weights
      if of_biases is not None:
        added = lambda total, g: total.at[block.expert].add(jnp.sum(g.astype(jnp.float32), axis=0))
        of_biases = tuple(map(added, of_biases, gradients[: len(BIASED)]))
      of_weights = tuple(map(add, of_matrices, inputs, gradients)), of_biases
    else:
      pairs = {name: pair for name, *pair in zip(NAMES, inputs, gradients, strict=True) if name in own.adapters}
      halves = {name: (*own.adapters[name], *of_weights[name]) for name in pairs}
      of_weights = {
        name: (add(of_a, x, g @ b.T), add(of_b, x @ a, g))
        for (name, (x, g)), (a, b, of_a, of_b) in zip(pairs.items(), halves.values(), strict=True)
      }
    of_scales = block.put(of_scales, jnp.sum((hidden * of_hidden).astype(jnp.float32), axis=1))
    return block.put(of_x, own.transposed("gate", of_gate) + own.transposed("up", of_up)), of_scales, of_weights

  zeros = zeros_of(weights)
  return _each_block(rows, likely, one, (jnp.zeros_like(rows.x), jnp.zeros(len(rows.x), jnp.float32), zeros))


def zeros_of(weights: Weights) -> Any:
  """Zeros in float32, in the tree of `Weights.trained`: gradients are added to them."""
  return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights.trained)


def block_size(likely: int, experts: int, most: int) -> int:
  """The rows of a block, if so many rows are likely to belong to so many experts, and there are `most` rows."""
  size = LEAST
  while size < MOST and 2 * size * OF_EXPERT * experts <= likely:
    size *= 2
  return min(size, most)


class RowBlock(NamedTuple):
  """Some rows of one expert. At the end of its rows, the block also has other rows, which are not `live`."""

  expert: jax.Array
  start: jax.Array
  live: jax.Array  # [b], which of the rows from `start` on are in the block

  def of(self, x: jax.Array) -> jax.Array:
    """The block's rows of x [R, ...]: [b, ...], with zeros in place of rows that are not `live`."""
    return self._choose(self._slice(x), jnp.zeros((), x.dtype))

  def put(self, out: jax.Array, new: jax.Array) -> jax.Array:
    """`out` [R, ...] with these values in the block's rows."""
    new = self._choose(new.astype(out.dtype), self._slice(out))
    return jax.lax.dynamic_update_slice_in_dim(out, new, self.start, axis=0)

  def weights_of(self, weights: Weights) -> Weights:
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, self.expert, keepdims=False), weights)

  def _slice(self, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, self.start, len(self.live))

  def _choose(self, live: jax.Array, others: jax.Array) -> jax.Array:
    return jnp.where(self.live.reshape(-1, *(1,) * (live.ndim - 1)), live, others)


def _each_block(rows: Rows, likely: int, one: Callable[[RowBlock, Any], Any], carry: Any) -> Any:
  """Calls `one` for each block, in the order of rows."""
  size = block_size(likely, len(rows.counts), len(rows.x))
  ends, blocks = jnp.cumsum(rows.counts), -(-rows.counts // size)
  last = jnp.cumsum(blocks)

  def step(i: jax.Array, carry: Any) -> Any:
    expert = jnp.sum(last <= i)
    first = ends[expert] - rows.counts[expert] + size * (i - last[expert] + blocks[expert])
    start = jnp.minimum(first, len(rows.x) - size)
    at = start + jnp.arange(size)
    return one(RowBlock(expert, start, (at >= first) & (at < ends[expert])), carry)

  with jax.named_scope(BLOCKS):
    return jax.lax.fori_loop(0, last[-1], step, carry)
