"""What an optimizer is: a transformation of gradients, and the names of its state's dimensions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

from models.dimensions import STACKED, Dims

Tree = Any  # nested dicts as those of the parameters


class Rule(NamedTuple):
  """An optimizer, without what all optimizers have in common: clipping, weight decay and the learning rate.

  Attributes:
    transform: turns gradients into updates. Its `update` may take two more arguments by name: `key`, a random key of
      this step, and `sharding`, a `models.dimensions.Sharding`. The updates are sharded as the weights or as the state.
    dims: the logical dimensions of each array of the state, in the state's tree. Layouts place them by name, as the
      optimizer's state; `()` is a number, which every device holds.
    by_layer: whether the update of a weight with these dimensions needs whole matrices (`Sharding.by_layer`).
    flops: FLOPs of this update, for one matrix of so many rows and columns.
    sums: the sums over a weight with these dimensions that its update needs, and devices make together if the weight
      is in pieces. For each sum, the numbers of the dimensions that it keeps, and of those that it adds up.
  """

  transform: optax.GradientTransformation
  dims: Tree
  by_layer: Callable[[Dims], bool] = lambda dims: False
  flops: Callable[[int, int], int] = lambda rows, columns: 0
  sums: Callable[[Dims], Sequence[tuple[tuple[int, ...], tuple[int, ...]]]] = lambda dims: ()


class Sides(NamedTuple):
  """A weight as a matrix, or one for each layer and expert: the numbers of the dimensions that make each of its sides.

  One side is the width of the model, `embed`. The other is everything else, such as heads and their size.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]


def sides(dims: Dims) -> Sides | None:
  """The sides of a weight; None for the scale of a norm, which has no `embed`."""
  rest = tuple(at for at, dim in enumerate(dims) if dim not in (*STACKED, "embed"))
  if "embed" not in dims or not rest:
    return None
  embed = (dims.index("embed"),)
  return Sides(embed, rest) if embed < rest else Sides(rest, embed)
