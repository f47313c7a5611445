"""How tokens get to experts on other devices, and back: `gather`, `exchange` and `ragged` (experts.py).

The code here runs on each device, for its own tokens and its own experts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.ops import grouped
from models.ops.grouped import Rows, Weights
from models.ops.peers import Peers
from models.ops.workarounds import in_order, sum_in_dtype

ROOM = 1.25  # rows that a pair of devices exchanges in a round, relative to those of an equal load
ROUNDS = "rounds"  # the scope of the loop over rounds in a program


def round_rows(tokens: int, chosen: int, devices: int, most: int = 0) -> int:
  """The rows that a device sends to each other one in a round of `exchange`; `most`: in all rounds, or 0 for all."""
  return min(math.ceil(ROOM * tokens * chosen / devices), most or tokens * chosen)


def most_rows(tokens: int, chosen: int, experts: int, limit: int) -> int:
  """The rows of a device for so many experts, at most. An expert takes at most `limit` of its tokens; 0: all."""
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
    return self._each(functools.partial(jax.lax.all_gather, tiled=True), *arrays)

  def reduce_scatter(self, x: jax.Array) -> jax.Array:
    """[m · n, D], what a device has for every other → [n, D], the sum of what all have for this one."""
    return self._scatter_rows(x)

  def summed(self, x: jax.Array) -> jax.Array:
    """`reduce_scatter` of few columns, which the TPU compiler would all-reduce: each device adds up what it is sent."""
    return jnp.sum(self.all_to_all(x)[0].reshape(self.count, -1, *x.shape[1:]), axis=0)

  def all_to_all(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[m · c, ...] each, c rows for every device → c rows from every device."""
    return self._each(functools.partial(jax.lax.all_to_all, split_axis=0, concat_axis=0, tiled=True), *arrays)

  def ragged_all_to_all(
    self, arrays: Sequence[jax.Array], empty: Sequence[jax.Array], *moves: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Writes rows of arrays to other devices' `empty` ones.

    `moves` are the input offsets, send sizes, output offsets and receive sizes of `lax.ragged_all_to_all`. They say for
    each device: where its rows start here, how many they are, where they start there, and how many come from it.
    """

    def send(x: jax.Array, axes: Any, out: jax.Array) -> jax.Array:
      ragged = functools.partial(jax.lax.ragged_all_to_all, axis_name=axes)
      return jax.lax.platform_dependent(x, out, *moves, cpu=functools.partial(_emulated, self), default=ragged)

    return self._each(send, *arrays, more=[(x,) for x in empty])

  def sum(self, x: jax.Array) -> jax.Array:
    """The sum over the devices, which all of them get."""
    return self._send(lambda x, axes: sum_in_dtype(lambda x: jax.lax.psum(x, axes), x), x)

  def largest(self, x: jax.Array) -> jax.Array:
    """The largest value that a device has, by element."""
    return self._send(jax.lax.pmax, x)

  def _each(
    self, collective: Callable[..., jax.Array], *arrays: jax.Array, more: Sequence[tuple] | None = None
  ) -> tuple[jax.Array, ...]:
    """The collective of each array. `more` are further arguments for each."""
    done: list[jax.Array] = []
    for x, given in zip(arrays, more or [()] * len(arrays), strict=True):
      x = in_order(done[-1], x) if done and self.count > 1 else x
      done.append(self._send(lambda x, axes, given=given: collective(x, axes, *given), x))
    return tuple(done)


def _emulated(peers: ExpertPeers, rows: jax.Array, out: jax.Array, *moves: jax.Array) -> jax.Array:
  """`lax.ragged_all_to_all`, which XLA's CPU backend lacks, by an all-gather of everything."""
  rows, *everyone = peers.all_gather(rows[None], *(x[None] for x in moves))  # moves [from, to]
  at = jnp.arange(rows.shape[1])
  for sender in range(peers.count):
    input_offset, size, output_offset = (x[sender, peers.index] for x in everyone[:3])
    place = jnp.where(at < size, output_offset + at, len(out))
    out = out.at[place].set(rows[sender].at[input_offset + at].get(mode="clip"), mode="drop")
  return out


class Transport(NamedTuple):
  """A way, called with tokens [n, D], their experts and scales [n, k], the weights of own experts, and the peers.

  Attributes:
    forward: → [n, D].
    backward: with the gradient of that → the gradients of tokens, scales and what is trained (`Weights.trained`).
  """

  forward: Callable[..., jax.Array]
  backward: Callable[..., tuple[jax.Array, jax.Array, Any]]


class Order(NamedTuple):
  """The rows of some tokens, one for each of a token's experts, sorted by expert.

  Attributes:
    token: [R], that of each row. There may be fewer rows than tokens × k.
    scales: [R].
    counts: how many rows each expert has.
    place: [N, k], where the rows of each token are.
  """

  token: jax.Array
  scales: jax.Array
  counts: jax.Array
  place: jax.Array

  @staticmethod
  def of(chosen: jax.Array, scales: jax.Array, experts: int, most: int | None = None) -> "Order":
    """Sorts the rows of tokens. Those of the expert number `experts` come last: they belong to none.

    Args:
      most: how many rows belong to one, at most.
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
    """A value of each row [R] → [N, k]."""
    return values.at[self.place].get(mode="fill", fill_value=0)


# gather: all devices see all tokens, and each works for its own experts.


def _own_rows(chosen: jax.Array, scales: jax.Array, experts: int, peers: ExpertPeers, devices: int) -> Order:
  """The rows of the tokens of so many devices that are for the own experts.

  A token's experts differ, so no more than `experts` are.
  """
  own = chosen - experts * peers.index
  most = devices * most_rows(len(chosen) // devices, chosen.shape[1], experts, peers.limit)
  return Order.of(jnp.where((own >= 0) & (own < experts), own, experts), scales, experts, most)


def _gather(x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, peers: ExpertPeers) -> jax.Array:
  likely = scales.size
  x, chosen, scales = peers.all_gather(x, chosen, scales)
  order = _own_rows(chosen, scales, len(weights.gate), peers, peers.count)
  return peers.reduce_scatter(order.added_up(grouped.forward(order.rows(x), weights, likely)))


def _gather_backward(
  x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, peers: ExpertPeers, of_out: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
  likely = scales.size
  x, chosen, scales, of_out = peers.all_gather(x, chosen, scales, of_out)
  order = _own_rows(chosen, scales, len(weights.gate), peers, peers.count)
  of_rows, of_scales, of_weights = grouped.backward(order.rows(x), weights, of_out[order.token], likely)
  of_x = peers.reduce_scatter(order.added_up(of_rows))
  return of_x, peers.summed(in_order(of_x, order.unsorted(of_scales))), of_weights


# replicated: all devices have the same tokens, and each works for its own experts. Their results are summed.


def _replicated(x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, peers: ExpertPeers) -> jax.Array:
  order = _own_rows(chosen, scales, len(weights.gate), peers, 1)
  return peers.sum(order.added_up(grouped.forward(order.rows(x), weights, scales.size // peers.count)))


def _replicated_backward(
  x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, peers: ExpertPeers, of_out: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
  order, likely = _own_rows(chosen, scales, len(weights.gate), peers, 1), scales.size // peers.count
  of_rows, of_scales, of_weights = grouped.backward(order.rows(x), weights, of_out[order.token], likely)
  of_x = peers.sum(order.added_up(of_rows))
  return of_x, peers.sum(in_order(of_x, order.unsorted(of_scales))), of_weights


# exchange and ragged: rows go to the devices of their experts, and come back.


class Trip(NamedTuple):
  """How some rows go to the devices of their experts and back.

  Attributes:
    there: arrays [R, ...], of which row i goes where row i of the sorted rows goes → what arrives [S, ...] of each.
    back: arrays [R, ...], and as many arrays [S, ...] → the first, with the values that return in the rows that went.
    experts: [S], the own expert that each arrived row is for; their number if there is no row.
  """

  there: Callable[..., tuple[jax.Array, ...]]
  back: Callable[..., tuple[jax.Array, ...]]
  experts: jax.Array


# How rows travel: (the sorted rows, how many each expert has [m, e], the peers, one, carry) → the carry, after calls of
# `one` with a trip and the carry for each round.
Travel = Callable[["Order", jax.Array, ExpertPeers, Callable[[Trip, Any], Any], Any], Any]


def _by_rows(
  travel: Travel, x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, peers: ExpertPeers
) -> jax.Array:
  e = len(weights.gate)
  order = Order.of(chosen, scales, peers.count * e)

  def one(trip: Trip, out: jax.Array) -> jax.Array:
    x_here, scales_here = trip.there(rows, order.scales)
    here = Order.of(trip.experts[:, None], scales_here[:, None], e)
    done = here.added_up(grouped.forward(here.rows(x_here), weights, scales.size))
    return trip.back((out,), (done,))[0]

  rows = x[order.token]
  return order.added_up(travel(order, order.counts.reshape(-1, e), peers, one, jnp.zeros_like(rows)))


def _by_rows_backward(
  travel: Travel,
  x: jax.Array,
  chosen: jax.Array,
  scales: jax.Array,
  weights: Weights,
  peers: ExpertPeers,
  of_out: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
  e = len(weights.gate)
  order = Order.of(chosen, scales, peers.count * e)

  def one(trip: Trip, carry: Any) -> Any:
    of_rows, of_scales, of_weights = carry
    x_here, scales_here, of_out_here = trip.there(rows, order.scales, of_out[order.token])
    here = Order.of(trip.experts[:, None], scales_here[:, None], e)
    of_out_here = of_out_here[here.token]
    new_rows, new_scales, new_weights = grouped.backward(here.rows(x_here), weights, of_out_here, scales.size)
    found = here.added_up(new_rows), here.unsorted(new_scales)[:, 0]
    of_rows, of_scales = trip.back((of_rows, of_scales), found)
    return of_rows, of_scales, jax.tree.map(jnp.add, of_weights, new_weights)

  rows = x[order.token]
  zeros = grouped.zeros_of(weights)
  start = jnp.zeros_like(rows), jnp.zeros(len(rows), jnp.float32), zeros
  of_rows, of_scales, of_weights = travel(order, order.counts.reshape(-1, e), peers, one, start)
  return order.added_up(of_rows), order.unsorted(of_scales), of_weights


def _in_rounds(order: Order, counts: jax.Array, peers: ExpertPeers, one: Callable[[Trip, Any], Any], carry: Any) -> Any:
  """In rounds of an all-to-all, until all rows have been sent."""
  (m, e), rows, (tokens, k) = counts.shape, len(order.token), order.place.shape
  size = round_rows(tokens, k, m, e * peers.limit)
  to = jnp.sum(counts, axis=1)
  ends = jnp.cumsum(peers.all_to_all(counts)[0], axis=1)  # [from, e]
  most = in_order(ends, peers.largest(in_order(ends, jnp.max(to))))  # all devices must run equally many rounds
  first = jnp.cumsum(to) - to
  device = jnp.sum(jnp.arange(rows)[:, None] >= jnp.cumsum(to), axis=1)  # [R], where each row goes
  # The index of a row among the rows for the same device. Rows that no expert takes have device m, for which indexing
  # takes the last device, so they are counted after its rows. In `back` they read the last place of that device. It is
  # empty, so zero, in a round that has such rows.
  number = jnp.arange(rows) - first[device]

  def step(i: jax.Array, carry: Any) -> Any:
    at = i * size + jnp.arange(size)
    index = jnp.where(at < to[:, None], first[:, None] + at, rows).reshape(-1)  # [m · size]
    returned, goes = device * size + number - i * size, number // size == i

    def there(*arrays: jax.Array) -> tuple[jax.Array, ...]:
      return peers.all_to_all(*(x.at[index].get(mode="fill", fill_value=0) for x in arrays))

    def back(out: tuple[jax.Array, ...], found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
      live = lambda x: goes.reshape(-1, *(1,) * (x.ndim - 1))
      came = zip(out, peers.all_to_all(*found), strict=True)
      return tuple(jnp.where(live(x), new.at[returned].get(mode="clip"), x) for x, new in came)

    experts = jnp.sum(at[None, :, None] >= ends[:, None], axis=-1).reshape(-1)
    return one(Trip(there, back, experts), carry)

  with jax.named_scope(ROUNDS):
    return jax.lax.fori_loop(0, -(-most // size), step, carry)


def _at_once(order: Order, counts: jax.Array, peers: ExpertPeers, one: Callable[[Trip, Any], Any], carry: Any) -> Any:
  """All rows at once, by a ragged all-to-all."""
  (m, e), me, (tokens, k) = counts.shape, peers.index, order.place.shape
  everyone = peers.all_gather(counts[None])[0]  # [from, to, e]
  to = jnp.sum(everyone, axis=-1)
  at_sender, at_receiver = jnp.cumsum(to, axis=1) - to, jnp.cumsum(to, axis=0) - to  # where rows start there
  room = m * most_rows(tokens, k, e, peers.limit)
  piece = jnp.sum(jnp.arange(room)[:, None] >= jnp.cumsum(everyone[:, me].reshape(-1)), axis=1)

  def there(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    empty = [jnp.zeros((room, *x.shape[1:]), x.dtype) for x in arrays]
    return peers.ragged_all_to_all(arrays, empty, at_sender[me], to[me], at_receiver[me], to[:, me])

  def back(out: tuple[jax.Array, ...], found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    empty = [jnp.zeros_like(x) for x in out]
    return peers.ragged_all_to_all(found, empty, at_receiver[:, me], to[:, me], at_sender[:, me], to[me])

  return one(Trip(there, back, jnp.where(piece < m * e, piece % e, e)), carry)


TRANSPORTS = {
  "replicated": Transport(_replicated, _replicated_backward),
  "gather": Transport(_gather, _gather_backward),
  "exchange": Transport(functools.partial(_by_rows, _in_rounds), functools.partial(_by_rows_backward, _in_rounds)),
  "ragged": Transport(functools.partial(_by_rows, _at_once), functools.partial(_by_rows_backward, _at_once)),
}
