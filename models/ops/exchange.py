"""`exchange`: rows go to the devices of their experts by all-to-all, and results come back (experts.py).

All pairs of devices send equally many rows, so they do so in rounds, as many as the fullest pair needs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.ops import grouped
from models.ops.expert_rows import ExpertPeers, Order
from models.ops.grouped import Weights
from models.ops.workarounds import in_order

ROOM = 1.25  # rows that a pair of devices exchanges in a round, relative to those of an equal load
ROUNDS = "rounds"  # the scope of the loop over rounds in a program


def round_rows(tokens: int, chosen: int, devices: int, most: int = 0) -> int:
  """The rows that a device sends to each other device in a round; `most`: the most in all rounds, 0: no limit."""
  return min(math.ceil(ROOM * tokens * chosen / devices), most or tokens * chosen)


class Exchange(NamedTuple):
  """How the rows of a device's tokens travel in rounds.

  Attributes:
    size: how many rows a device sends to each other device in a round.
    rounds: how many rounds there are.
    first, to: [m], where the rows for each device start among the sorted rows, and how many these are.
    ends: [m, e], where the rows for each of this device's experts end among those that come from each device.
    device: [R], the device to which each row goes.
    number: [R], the index of a row among the rows for the same device. Rows that no expert takes have device m, for
      which indexing takes the last device, so they are counted after its rows. In `back` they read the last place of
      that device. This place is empty, so zero, in a round that has such rows.
  """

  peers: ExpertPeers
  size: int
  rounds: jax.Array
  first: jax.Array
  to: jax.Array
  ends: jax.Array
  device: jax.Array
  number: jax.Array

  @staticmethod
  def of(order: Order, experts: int, peers: ExpertPeers) -> "Exchange":
    """The exchange of sorted rows, if each device has so many experts."""
    counts, rows, (tokens, k) = order.counts.reshape(-1, experts), len(order.token), order.place.shape
    size = round_rows(tokens, k, peers.count, experts * peers.limit)
    to = jnp.sum(counts, axis=1)
    ends = jnp.cumsum(peers.all_to_all(counts)[0], axis=1)
    most = in_order(ends, peers.largest(in_order(ends, jnp.max(to))))  # all devices must run equally many rounds
    first = jnp.cumsum(to) - to
    device = jnp.sum(jnp.arange(rows)[:, None] >= jnp.cumsum(to), axis=1)
    number = jnp.arange(rows) - first[device]
    return Exchange(peers, size, -(-most // size), first, to, ends, device, number)

  def run(self, one: Callable[["Round", Any], Any], carry: Any) -> Any:
    """Calls one(round, carry) for each round."""
    with jax.named_scope(ROUNDS):
      return jax.lax.fori_loop(0, self.rounds, lambda i, carry: one(Round.of(self, i), carry), carry)


class Round(NamedTuple):
  """One round of an exchange.

  Attributes:
    row: [m · size], the row that goes to each place; R, the number of all rows, where none goes.
    returned: [R], the place from which each row's result comes back.
    goes: [R], whether a row travels in this round.
    experts: [m · size], which of this device's experts each arrived row is for; their number if there is no row.
  """

  exchange: Exchange
  row: jax.Array
  returned: jax.Array
  goes: jax.Array
  experts: jax.Array

  @staticmethod
  def of(exchange: Exchange, i: jax.Array) -> "Round":
    at = i * exchange.size + jnp.arange(exchange.size)
    row = jnp.where(at < exchange.to[:, None], exchange.first[:, None] + at, len(exchange.number)).reshape(-1)
    returned, goes = (
      exchange.device * exchange.size + exchange.number - i * exchange.size,
      exchange.number // exchange.size == i,
    )
    return Round(
      exchange, row, returned, goes, jnp.sum(at[None, :, None] >= exchange.ends[:, None], axis=-1).reshape(-1)
    )

  def there(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Sends the rows of arrays [R, ...]. Returns the rows that arrive, for each array [S, ...]."""
    return self.exchange.peers.all_to_all(*(x.at[self.row].get(mode="fill", fill_value=0) for x in arrays))

  def back(self, out: tuple[jax.Array, ...], found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Sends results [S, ...] back. Returns `out` [R, ...] with the values that return, in the rows that were sent."""
    live = lambda x: self.goes.reshape(-1, *(1,) * (x.ndim - 1))
    came = zip(out, self.exchange.peers.all_to_all(*found), strict=True)
    return tuple(jnp.where(live(x), new.at[self.returned].get(mode="clip"), x) for x, new in came)


def forward(
  travel: Any, x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, peers: ExpertPeers
) -> jax.Array:
  """The results of tokens (transports.py). `travel` is how rows travel: `Exchange`, or `ragged.Ragged`."""
  e = len(weights.gate)
  order = Order.of(chosen, scales, peers.count * e)

  def one(trip: Any, out: jax.Array) -> jax.Array:
    x_here, scales_here = trip.there(rows, order.scales)
    here = Order.of(trip.experts[:, None], scales_here[:, None], e)
    done = here.added_up(grouped.forward(here.rows(x_here), weights, scales.size))
    return trip.back((out,), (done,))[0]

  rows = x[order.token]
  return order.added_up(travel.of(order, e, peers).run(one, jnp.zeros_like(rows)))


def backward(
  travel: Any,
  x: jax.Array,
  chosen: jax.Array,
  scales: jax.Array,
  weights: Weights,
  peers: ExpertPeers,
  of_out: jax.Array,
) -> tuple[jax.Array, jax.Array, Any]:
  """The gradients of tokens, scales and `Weights.trained`."""
  e = len(weights.gate)
  order = Order.of(chosen, scales, peers.count * e)

  def one(trip: Any, carry: Any) -> Any:
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
  of_rows, of_scales, of_weights = travel.of(order, e, peers).run(one, start)
  return order.added_up(of_rows), order.unsorted(of_scales), of_weights
