"""Stacks: which blocks of a model are alike, and the scan that runs blocks of several kinds.

Blocks whose weights have the same shapes are a stack: one entry of the parameters, with a leading dimension of layers.
A mixture of experts has two, if some of its blocks are dense. Blocks of a stack may still differ in what attention
sees (windows.py). Stack and sight are a block's `Kind`, and a model is a sequence of kinds. What repeats in it is a
`Loop`, which is compiled once.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from models import windows
from models.dimensions import FIRST_LAYERS

if TYPE_CHECKING:
  from models.expert_sizes import ExpertSizes
  from models.sizes import ModelSizes

STACKS = ("dense_blocks", "blocks")  # the entries of the parameters that hold blocks
DENSE, BLOCKS = STACKS


class Kind(NamedTuple):
  """What a block is: its stack, and what its attention sees, one of windows.KINDS."""

  stack: str
  sees: str


class Stack(NamedTuple):
  """The blocks of a stack, or those of one kind.

  Attributes:
    sizes: the sizes of a model that has only such blocks.
    layers: how many they are.
    dim: the name of the dimension that counts them (dimensions.py).
  """

  name: str  # one of STACKS
  sizes: "ModelSizes"
  layers: int
  dim: str


class Loop(NamedTuple):
  """Consecutive blocks: a period of kinds, and how many times it runs."""

  period: tuple[Kind, ...]
  times: int

  @property
  def stacks(self) -> tuple[str, ...]:
    """The names of the stacks that the blocks belong to."""
    return tuple(dict.fromkeys(kind.stack for kind in self.period))

  def layers_of(self, stack: str) -> int:
    """How many of the blocks belong to a stack."""
    return self.times * sum(kind.stack == stack for kind in self.period)


class Place(NamedTuple):
  """Where a block stands: in which loop, after which blocks, and at which number of the period."""

  loop: Loop
  before: tuple[Kind, ...]
  at: int

  @property
  def kind(self) -> Kind:
    return self.loop.period[self.at]

  def own(self, weights: Any) -> Any:
    """The weights of this block, of those that a period has of its stack."""
    of_stack = [at for at, kind in enumerate(self.loop.period) if kind.stack == self.kind.stack]
    number, last = of_stack.index(self.at), len(of_stack) - 1

    def cut(w: jax.Array) -> jax.Array:  # by negative padding, whose result no policy saves (remat.py)
      edges = [(-number, number - last, 0), *((0, 0, 0),) * (w.ndim - 1)]
      return jax.lax.pad(w, jnp.zeros((), w.dtype), edges).reshape(w.shape[1:])

    return jax.tree.map(cut, weights) if last else weights

  def number_among(self, first: jax.Array, alike: Callable[[Kind], bool]) -> jax.Array:
    """The number of this block among those that are `alike`. `first` is the number of its period's first block."""
    count = lambda kinds: sum(map(alike, kinds))
    period, at = self.loop.period, self.at
    if all(map(alike, self.before + period)):
      return first + at
    return count(self.before) + (first - len(self.before)) // len(period) * count(period) + count(period[:at])


class Stacks:
  """The part of `ModelSizes` that says which blocks a model has."""

  experts: "ExpertSizes | None"

  @functools.cached_property
  def kinds(self: Any) -> tuple[Kind, ...]:
    """The kind of each block. It sees "global" if another kind would change nothing."""
    plain, experts = windows.GLOBAL, self.experts
    alike = {plain} if self.shown or self.rope_base_local else {plain, windows.LOCAL}
    seen = windows.kinds_of_layers(self.layers_pattern, self.depth, windows.LOCAL if self.window else plain)
    stack = lambda layer: BLOCKS if experts is None or experts.has(layer) else DENSE
    return tuple(Kind(stack(i), plain if sees in alike else sees) for i, sees in enumerate(seen))

  @property
  def stacks(self: Any) -> tuple[Stack, ...]:
    """The stacks of blocks: one, or two if some blocks of a mixture are dense."""
    count = Counter(kind.stack for kind in self.kinds)
    if not count[DENSE]:
      return (Stack(BLOCKS, self, self.depth, "layers"),)
    dense = dataclasses.replace(self, experts=None)
    others = dataclasses.replace(self, experts=dataclasses.replace(self.experts, dense_layers=0, every=1))
    dim = FIRST_LAYERS if self.first_layers else "layers"
    return Stack(DENSE, dense, count[DENSE], dim), Stack(BLOCKS, others, count[BLOCKS], "layers")

  @functools.cached_property
  def groups(self) -> dict[Kind, Stack]:
    """The blocks of each kind: a stack, or a part of one that has blocks of several kinds."""
    found = dict[Kind, Stack]()
    for stack in self.stacks:
      kinds = sorted({kind for kind in self.kinds if kind.stack == stack.name})
      for kind in kinds:
        sizes = stack.sizes if len(kinds) == 1 else stack.sizes.only(kind.sees)
        found[kind] = stack._replace(sizes=sizes, layers=self.kinds.count(kind))
    return found

  def only(self: Any, sees: str) -> "ModelSizes":
    """The sizes of a model all of whose blocks see this."""
    window, pattern = (self.window, "") if sees == windows.LOCAL else (0, f"{sees}:1")
    return dataclasses.replace(self, layers_pattern=pattern, window=window, rope_base_local=0.0)

  @property
  def shown(self: Any) -> int:
    """How many positions a local layer sees; 0: all, because the model reads no more."""
    return self.window if self.window < self.positions else 0

  def has_window(self, kind: Kind) -> bool:
    """Whether layers of a kind see less than the whole text."""
    return kind.sees == windows.LOCAL and self.shown > 0

  @property
  def windowed(self) -> list[bool]:
    """Of each layer, whether it sees less than the whole text."""
    return [self.has_window(kind) for kind in self.kinds]

  @property
  def first_layers(self) -> int:
    """The number of dense blocks with which a mixture begins, if all others have experts. No pipeline splits them."""
    return self.experts.dense_layers if self.experts and self.experts.every == 1 else 0

  @property
  def mixtures(self) -> int:
    """The number of blocks with experts."""
    return sum(kind.stack == BLOCKS for kind in self.kinds) if self.experts else 0


@functools.cache
def loops(kinds: tuple[Kind, ...]) -> tuple[Loop, ...]:
  """Loops that run these blocks: first the one that runs the most of them, of those the one with the shortest period.

  Blocks that do not repeat are loops of one block.
  """
  if not kinds:
    return ()

  def repeats(size: int) -> int:
    period = kinds[:size]
    return next(n for n in range(1, len(kinds) + 2) if kinds[n * size : (n + 1) * size] != period)

  found = [Loop(kinds[:size], repeats(size)) for size in range(1, len(kinds) // 2 + 1)]
  best = max(
    (loop for loop in found if loop.times > 1),
    key=lambda loop: (len(loop.period) * loop.times, -len(loop.period)),
    default=Loop(kinds[:1], 1),
  )
  return best, *loops(kinds[len(best.period) * best.times :])


def kinds_of(loops: Sequence[Loop]) -> tuple[Kind, ...]:
  """The blocks that these loops run."""
  return tuple(kind for loop in loops for kind in loop.period * loop.times)


def by_period(loop: Loop, weight: jax.Array, at: int = 0) -> jax.Array:
  """A weight of a stack with its layers in dimension `at`: [times, layers in a period] there, or as it is if that is 1.

  `scan` reads it like this. A gradient computed for it has this shape too.
  """
  times, shape = loop.times, weight.shape
  return weight if shape[at] == times else weight.reshape(*shape[:at], times, -1, *shape[at + 1 :])


def scan(
  body_at: Callable[[Place], Callable[[jax.Array, Any], tuple[jax.Array, Any]]],
  x: jax.Array,
  weights: Mapping[str, Any],
  loops: Sequence[Loop],
  unroll: int = 1,
) -> tuple[jax.Array, list[list[Any]]]:
  """`jax.lax.scan` over blocks of several kinds: one loop after the other, and one iteration runs a period.

  So the kind of each block is known when the step is compiled, and kernels skip what a window hides.

  Args:
    body_at: makes the function that runs the block at a place: (x, (the weights of its stack in the period, the number
      of the period's first block)) → (x, its result). `Place.own` picks its weights. A checkpoint (`jax.checkpoint`)
      must do so inside, or the weights of each block would be saved once more.
    weights: of each stack [layers, ...]. For a single loop they may be by period already (`by_period`).
    unroll: how many blocks one iteration runs, if that is more than a period.

  Returns:
    x, and for each loop the results of the blocks of its period, [times, ...] each.
  """
  results, before = list[list[Any]](), tuple[Kind, ...]()
  for number, loop in enumerate(loops):
    parts = dict[str, Any]()
    for name in loop.stacks:
      first, held = (sum(each.layers_of(name) for each in some) for some in (loops[:number], loops))
      last = first + loop.layers_of(name)
      own = weights[name] if last - first == held else jax.tree.map(lambda w, a=first, b=last: w[a:b], weights[name])
      parts[name] = jax.tree.map(functools.partial(by_period, loop), own)
    size, bodies = len(loop.period), [body_at(Place(loop, before, at)) for at in range(len(loop.period))]

    def run(x: jax.Array, one: Any, loop: Loop = loop, bodies: Sequence[Any] = bodies) -> tuple[jax.Array, list[Any]]:
      weights, first = one
      found = []
      for kind, body in zip(loop.period, bodies, strict=True):
        x, result = body(x, (weights[kind.stack], first))
        found.append(result)
      return x, found

    firsts = len(before) + size * jnp.arange(loop.times)
    x, found = jax.lax.scan(run, x, (parts, firsts), unroll=max(1, unroll // size))
    results.append(found)
    before += loop.period * loop.times
  return x, results


def in_order(results: Sequence[Sequence[Any]]) -> Any:
  """The results of `scan` in the order of the blocks, [layers, ...], without those that are empty; {} if all are."""

  def of_loop(found: Sequence[Any]) -> Any:
    flat = lambda *each: jnp.stack(each, axis=1).reshape(-1, *each[0].shape[1:])
    return found[0] if len(found) == 1 else jax.tree.map(flat, *found)

  kept = [[one for one in found if jax.tree.leaves(one)] for found in results]
  parts = [of_loop(found) for found in kept if found]
  return jax.tree.map(lambda *each: jnp.concatenate(each), *parts) if len(parts) > 1 else (parts or [{}])[0]
