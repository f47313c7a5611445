"""The devices that share experts, and the rows that their experts work on.

A row is a token that goes to one of its experts. The code here runs on each device, for its own tokens and experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.ops.grouped import Rows
from models.ops.peers import Peers
from models.ops.workarounds import in_order, sum_in_dtype


def most_rows(tokens: int, chosen: int, experts: int, limit: int) -> int:
  """The most rows that a device's tokens make for so many experts. An expert takes at most `limit` tokens; 0: all."""
  return min(tokens * min(chosen, experts), experts * (limit or tokens))


@dataclasses.dataclass(frozen=True)
class ExpertPeers(Peers):
  """The devices that share the experts. On CPUs their collectives run in the order of the calls.

  Attributes:
    limit: how many tokens of one device an expert takes at most; 0: all.
  """

  limit: int = 0
  DIM = "experts"

  def all_gather(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[n, ...] each → [m · n, ...] each."""
    return self.each(functools.partial(jax.lax.all_gather, tiled=True), *arrays)

  def reduce_scatter(self, x: jax.Array) -> jax.Array:
    """[m · n, D], what a device has for every other → [n, D], the sum of what all have for this one."""
    return self._scatter_rows(x)

  def summed(self, x: jax.Array) -> jax.Array:
    """`reduce_scatter` of few columns, which the TPU compiler would all-reduce: each device adds up what it is sent."""
    return jnp.sum(self.all_to_all(x)[0].reshape(self.count, -1, *x.shape[1:]), axis=0)

  def all_to_all(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[m · c, ...] each, c rows for every device → c rows from every device."""
    return self.each(functools.partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True), *arrays)

  def sum(self, x: jax.Array) -> jax.Array:
    """The sum over the devices, which all of them get."""
    return self._send(lambda x, axes: sum_in_dtype(lambda x: jax.lax.psum(x, axes), x), x)

  def largest(self, x: jax.Array) -> jax.Array:
    """For each element, the largest value that any device has."""
    return self._send(jax.lax.pmax, x)

  def each(
    self, collective: Callable[..., jax.Array], *arrays: jax.Array, more: Sequence[tuple] | None = None
  ) -> tuple[jax.Array, ...]:
    """Runs a collective on each array. `more` holds further arguments for each array."""
    done: list[jax.Array] = []
    for x, given in zip(arrays, more or [()] * len(arrays), strict=True):
      x = in_order(done[-1], x) if done and self.count > 1 else x
      done.append(self._send(lambda x, axes, given=given: collective(x, axes, *given), x))
    return tuple(done)


class Order(NamedTuple):
  """The rows of some tokens, one for each of a token's experts, sorted by expert.

  Attributes:
    token: [R], the token of each row. There may be fewer rows than tokens × k.
    scales: [R], the scale of each row.
    counts: how many rows each expert has.
    place: [N, k], where the rows of each token are.
  """

  token: jax.Array
  scales: jax.Array
  counts: jax.Array
  place: jax.Array

  @staticmethod
  def of(chosen: jax.Array, scales: jax.Array, experts: int, most: int | None = None) -> "Order":
    """Sorts the rows of tokens. Rows of the expert number `experts` come last: they belong to no expert.

    Args:
      most: how many rows belong to an expert, at most.
    """
    keys, k = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(keys)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order))).reshape(chosen.shape)
    counts = jnp.sum(keys[:, None] == jnp.arange(experts), axis=0)
    order = order[:most]
    return Order(order // k, scales.reshape(-1)[order], counts, place)

  def rows(self, x: jax.Array) -> Rows:
    """The rows of tokens [N, D]: [R, D]."""
    return Rows(x[self.token], self.scales, self.counts)

  def added_up(self, rows: jax.Array) -> jax.Array:
    """The sum of each token's rows [R, ...] → [N, ...]. Rows that do not exist count as zeros."""
    take = lambda at: rows.at[at].get(mode="fill", fill_value=0)
    return functools.reduce(jnp.add, (take(self.place[:, i]) for i in range(self.place.shape[1])))

  def unsorted(self, values: jax.Array) -> jax.Array:
    """A value of each row [R] → the values by token [N, k]."""
    return values.at[self.place].get(mode="fill", fill_value=0)
