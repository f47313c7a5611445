"""`ragged`: rows go to the devices of their experts by one ragged all-to-all, which sends what there is (experts.py).

"auto" does not choose it until it has been measured on GPUs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.ops.expert_rows import ExpertPeers, Order, most_rows


class Ragged(NamedTuple):
  """How the rows of a device's tokens travel all at once. Has the methods of `exchange.Exchange` and its `Round`.

  Attributes:
    to: [m, m], how many rows each device sends to each other one.
    experts: [room], which of this device's experts each arrived row is for; their number if there is no row.
  """

  peers: ExpertPeers
  to: jax.Array
  experts: jax.Array

  @staticmethod
  def of(order: Order, experts: int, peers: ExpertPeers) -> "Ragged":
    """The exchange of sorted rows, if each device has so many experts."""
    (tokens, k), m, me = order.place.shape, peers.count, peers.index
    everyone = peers.all_gather(order.counts.reshape(1, m, experts))[0]  # [from, to, e]
    room = m * most_rows(tokens, k, experts, peers.limit)
    piece = jnp.sum(jnp.arange(room)[:, None] >= jnp.cumsum(everyone[:, me].reshape(-1)), axis=1)
    return Ragged(peers, jnp.sum(everyone, axis=-1), jnp.where(piece < m * experts, piece % experts, experts))

  def run(self, one: Callable[["Ragged", Any], Any], carry: Any) -> Any:
    return one(self, carry)

  def there(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Sends the rows of arrays [R, ...]. Returns the rows that arrive, for each array [room, ...]."""
    me, (at_sender, at_receiver) = self.peers.index, self._starts()
    empty = [jnp.zeros((len(self.experts), *x.shape[1:]), x.dtype) for x in arrays]
    return self._send(arrays, empty, at_sender[me], self.to[me], at_receiver[me], self.to[:, me])

  def back(self, out: tuple[jax.Array, ...], found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Sends results [room, ...] back. Returns arrays with the shapes of `out` [R, ...]."""
    me, (at_sender, at_receiver) = self.peers.index, self._starts()
    empty = [jnp.zeros_like(x) for x in out]
    return self._send(found, empty, at_receiver[:, me], self.to[:, me], at_sender[:, me], self.to[me])

  def _starts(self) -> tuple[jax.Array, jax.Array]:
    """[m, m] each: where the rows from each device to each other one start at the sender, and at the receiver."""
    return jnp.cumsum(self.to, axis=1) - self.to, jnp.cumsum(self.to, axis=0) - self.to

  def _send(self, arrays: Sequence[jax.Array], empty: Sequence[jax.Array], *moves: jax.Array) -> tuple[jax.Array, ...]:
    """Writes rows of arrays into the `empty` arrays of other devices.

    `moves` are the input offsets, send sizes, output offsets and receive sizes of `lax.ragged_all_to_all`. They say for
    each device: where its rows start here, how many they are, where they start there, and how many come from it.
    """

    def send(x: jax.Array, axes: Any, out: jax.Array) -> jax.Array:
      ragged = functools.partial(jax.lax.ragged_all_to_all, axis_name=axes)
      return jax.lax.platform_dependent(x, out, *moves, cpu=functools.partial(emulated, self.peers), default=ragged)

    return self.peers.each(send, *arrays, more=[(x,) for x in empty])


def emulated(peers: ExpertPeers, rows: jax.Array, out: jax.Array, *moves: jax.Array) -> jax.Array:
  """`lax.ragged_all_to_all`, which XLA's CPU backend lacks, by an all-gather of everything."""
  rows, *everyone = peers.all_gather(rows[None], *(x[None] for x in moves))  # moves [from, to]
  at = jnp.arange(rows.shape[1])
  for sender in range(peers.count):
    input_offset, size, output_offset = (x[sender, peers.index] for x in everyone[:3])
    place = jnp.where(at < size, output_offset + at, len(out))
    out = out.at[place].set(rows[sender].at[input_offset + at].get(mode="clip"), mode="drop")
  return out
