"""Activations that the forward pass saves for the backward pass: exact, because they are read from JAX's own trace.

A device with a part of the heads, the MLP and the batch computes a smaller model of the same width. If it has a part of
the positions, too, then its residual stream is shorter between products. So this file traces the blocks in these
smaller sizes, for one example. Every strategy's share follows from that. Nothing is run.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lab.analysis import gpus
from models.dimensions import Sharding
from models.parameters import bind, definition
from models.remat import VIEWS, policy_of, save_all_but
from models.side_inputs import SideInputs
from models.sizes import ModelSizes

GATHER = "pad"  # the primitive of `OwnPositions.whole_sequence`; no block uses it otherwise
SAVE_ALL = save_all_but(VIEWS)  # every value of a block
SHARERS = "positions"  # the axis of devices that share the positions of an example, in a trace


class OwnPositions(Sharding):
  """The shapes that one of `parts` devices sees: its own positions of the stream, and all of them in products.

  If `sharers` devices share the positions, these are all of its share, and attention sends the others.
  """

  def __init__(self, parts: int, sharers: int = 1):
    self.parts, self.sharers = parts, sharers

  def shards(self, dim: str, among: str | None = None) -> int:
    return self.sharers if dim == "positions" else 1

  def index(self, dim: str) -> jax.Array:
    return jax.lax.axis_index(SHARERS)

  def across(self, collective: Callable[..., jax.Array], x: jax.Array, dim: str) -> jax.Array:
    return collective(x, SHARERS) if self.shards(dim) > 1 else x

  def whole_sequence(self, x: jax.Array) -> jax.Array:
    others = (self.parts - 1) * x.shape[1]
    return x if self.parts == 1 else jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, others, 0), (0, 0, 0)])

  def split_sequence(self, x: jax.Array) -> jax.Array:
    return x[:, : x.shape[1] // self.parts]


class Saved(NamedTuple):
  """Bytes of one example: of the values that exist once, and of those that the traced blocks have."""

  once: int
  blocks: int

  def of(self, layers: int) -> int:
    """The bytes of so many blocks, if one was traced."""
    return self.once + layers * self.blocks


@functools.cache
def bytes_per_example(
  sizes: ModelSizes,
  heads: int,
  mlp: int,
  sequence: int,
  layers: int,
  remat: str | None = None,
  host: bool = False,
  sharers: int = 1,
) -> int:
  """Bytes that `layers` blocks save for one example on a device; with `host`, in the memory of its host.

  If a model has blocks of several kinds, these are the last of its blocks.

  It has 1/heads of the heads, 1/mlp of the MLP, and 1/sequence of the residual stream's positions. Each saved value is
  proportional to one of these or to none, and exists once or in each block. At most four traces of one block are
  therefore enough.

  Args:
    remat: the remat policy; the model's if None. "all" counts all values of a block.
    sharers: how many devices share the positions of an example. The bytes are those of all of them.
  """
  if len(sizes.groups) > 1:
    found = 0
    for kind, group in reversed(sizes.groups.items()):
      count, of = sizes.kinds[-layers:].count(kind), group.sizes
      each = functools.partial(bytes_per_example, of, heads, mlp, sequence, remat=remat, host=host, sharers=sharers)
      if count:
        found += each(count + 1) - each(1) if found else each(count)  # what exists once is the same for all
    return found
  if sizes.layers_pattern:  # of one kind, in whatever period
    ((_, kind),) = sizes.groups
    sizes = sizes.only(kind)
  if _saves_inputs_only(sizes, remat or sizes.remat):  # so one trace serves all ways to split and compute a block
    sizes, heads, mlp, sharers = dataclasses.replace(sizes, attention="plain", attention_context="auto"), 1, 1, 1
  traced_here = lambda **shards: traced(sizes, remat or sizes.remat, **shards, sharers=sharers)[host]
  own = sizes.positions // sharers
  own_heads = min(getattr(sizes, name) for name in sizes.mixes.heads)
  splits = {"heads": (own_heads, heads), "mlp": (sizes.hidden_width, mlp), "sequence": (own, sequence)}
  whole = found = traced_here().of(layers)
  for shards in {heads, mlp, sequence} - {1}:  # parts that are split alike share a trace
    parts = [part for part in splits if splits[part][1] == shards]
    size = math.gcd(*(splits[part][0] for part in parts))
    few = next(n for n in range(2, size + 1) if size % n == 0)
    in_parts = (whole - traced_here(**dict.fromkeys(parts, few)).of(layers)) * few // (few - 1)
    found -= in_parts - in_parts // shards
  return found


def _saves_inputs_only(sizes: ModelSizes, remat: str) -> bool:
  """Whether a block's input is all that is of the examples: no named value, scale, key of dropout or document."""
  others = sizes.saved or sizes.products != "dtype" or sizes.dropout or sizes.segments
  return remat in ("full", "offload") and not others


def block_values(sizes: ModelSizes, heads: int, mlp: int, sequence: int, sharers: int = 1) -> tuple[int, int]:
  """Bytes of all values that a block computes for one example on a device, and of the scores of `plain` attention."""
  of = functools.partial(
    bytes_per_example, heads=heads, mlp=mlp, sequence=sequence, layers=1, remat="all", sharers=sharers
  )
  values = of(sizes)
  if sizes.attention != "plain" or sharers > 1:
    return values, 0
  others = of(dataclasses.replace(sizes, attention="splash"))  # a kernel, whose scores never leave it
  return min(values, others), max(values - others, 0)


def traced(
  sizes: ModelSizes, remat: str, heads: int = 1, mlp: int = 1, sequence: int = 1, layers: int = 1, sharers: int = 1
) -> tuple[Saved, Saved]:
  """What a single trace of the model in exactly these sizes saves: on the device, and in the memory of its host."""
  part = dataclasses.replace(
    sizes,
    heads=sizes.heads // heads,
    kv_heads=max(1, sizes.kv_heads // heads),
    mlp_width=sizes.mlp_width // mlp,
    experts=sizes.experts and dataclasses.replace(sizes.experts, width=sizes.experts.width // mlp),
    depth=layers,
    # The blocks do not see these. So models that differ in nothing else share a trace.
    vocab_size=1,
    remat="minimal",
    loss_chunk=0,
  )
  return _traced(part, remat, sequence, sharers)


@functools.cache
def _traced(sizes: ModelSizes, remat: str, sequence: int, sharers: int) -> tuple[Saved, Saved]:
  chosen = SAVE_ALL if remat == "all" else policy_of(remat, sizes.saved, sizes.lora.rank if sizes.lora else 0)
  policy = lambda primitive, *given, **named: primitive.name != GATHER and chosen(primitive, *given, **named)
  sharding = OwnPositions(sequence, sharers)
  examples = _prime_above(
    2
    * max(
      sizes.positions,
      sizes.width,
      sizes.mlp_width,
      sizes.experts.count if sizes.experts else 0,
      sizes.heads * sizes.head_dim,
    )
  )

  def blocks(params: Any, x: jax.Array, given: dict[str, Any]) -> jax.Array:
    model = bind(sizes, params)
    side = SideInputs.of(model.sizes, sizes.positions, **given, sharding=sharding)
    return model.run_blocks(x, side, sharding, policy=policy)[0]

  x = jax.ShapeDtypeStruct((examples, sizes.positions // sharers // sequence, sizes.width), sizes.dtype)
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), examples)) if sizes.dropout else None
  segments = jax.ShapeDtypeStruct((examples, sizes.positions), "int32") if sizes.segments else None
  vjp = lambda params, x, given: jax.vjp(functools.partial(blocks, given=given), params, x)[1]
  with gpus.assumed():
    # Not eval_shape, which forgets the memory space of a value.
    leaves = jax.make_jaxpr(lambda *given: jax.tree.leaves(vjp(*given)), axis_env=[(SHARERS, sharers)])(
      nnx.to_pure_dict(definition(sizes)[1]), x, {"keys": keys, "segments": segments}
    ).out_avals
  found = {(place, stacked): 0 for place in (False, True) for stacked in (False, True)}
  for leaf in leaves:
    if leaf.size % examples == 0:  # so it is of the examples: weights and angles of positions have smaller dimensions
      # The scan stacks what each block saves. What exists once begins with the examples, alone or times others.
      stacked = leaf.shape[0] % examples != 0
      found[leaf.memory_space == jax.memory.Space.Host, stacked] += leaf.size // examples * leaf.dtype.itemsize
  device, host = (Saved(sharers * found[place, False], sharers * found[place, True]) for place in (False, True))
  return device, host


def _prime_above(number: int) -> int:
  """The smallest prime number above a number. Trial division takes no time at the sizes of models."""
  return next(p for p in itertools.count(number + 1) if all(p % d for d in range(2, math.isqrt(p) + 1)))
