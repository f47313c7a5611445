"""How tokens get to experts on other devices, and back (experts.py): all ways by name, and `gather` and `replicated`.

The code here runs on each device, for its own tokens and its own experts.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.ops import exchange, grouped
from models.ops.exchange import Exchange
from models.ops.expert_rows import ExpertPeers, Order, most_rows
from models.ops.grouped import Weights
from models.ops.ragged import Ragged
from models.ops.workarounds import in_order


class Transport(NamedTuple):
  """A way, called with tokens [n, D], their experts and scales [n, k], the weights of the device's experts, its peers.

  Attributes:
    forward: returns the results [n, D].
    backward: also gets the gradient of the results; returns the gradients of tokens, scales and `Weights.trained`.
  """

  forward: Callable[..., jax.Array]
  backward: Callable[..., tuple[jax.Array, jax.Array, Any]]


# gather: all devices see all tokens, and each works for its own experts.


def _own_rows(chosen: jax.Array, scales: jax.Array, experts: int, peers: ExpertPeers, devices: int) -> Order:
  """The rows of so many devices' tokens that are for this device's experts.

  A token's experts differ, so a token has at most `experts` of these rows.
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


BY_ROWS = {"exchange": Exchange, "ragged": Ragged}
TRANSPORTS = {
  "replicated": Transport(_replicated, _replicated_backward),
  "gather": Transport(_gather, _gather_backward),
  **{
    name: Transport(functools.partial(exchange.forward, travel), functools.partial(exchange.backward, travel))
    for name, travel in BY_ROWS.items()
  },
}
