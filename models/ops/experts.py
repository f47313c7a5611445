"""The MLPs of experts that devices share: each of m devices has all weights of some experts, and tokens of its own.

transports.py says how tokens get to the experts that work on them, and back:

    gather      tokens are all-gathered; each device adds up what its experts contribute to each, and the sums are
                reduce-scattered. It always sends m − 1 times a device's tokens
    exchange    an all-to-all of rows, one for each token and each of its experts. All pairs of devices send equally
                many rows, so they do so in rounds, as many as the fullest pair needs
    ragged      a ragged all-to-all, which sends what there is, into a buffer for the most that can come

No token is dropped in any way, and all give the same result. In the backward pass tokens are sent again, with the
gradients of results: nothing is kept of other devices' tokens. A row is multiplied by its weight between `up` and
`down`, so that results need not return for the gradients of weights.

Where devices also share the hidden units of experts, each has its part of the sums (`Sharding.sum_pieces`).
"""

import functools
from typing import Any

import jax

from models.dimensions import Dims, Sharding
from models.ops.grouped import Weights
from models.ops.layers import with_gradient
from models.ops.routing import TOKENS
from models.ops.transports import ROOM, TRANSPORTS, ExpertPeers

WAYS = ("auto", "gather", "exchange", "ragged")

WEIGHTS: tuple[Dims, ...] = (("experts", None, "mlp"), ("experts", None, "mlp"), ("experts", "mlp", None))
STORED: Dims = ("experts", "embed", "mlp")


def choose(way: str, devices: int, chosen: int) -> str:
  """The way for so many devices that share the experts, if a token has so many: by "auto", what sends less."""
  if way != "auto":
    return way
  return "exchange" if ROOM * chosen < devices else "gather"


def mix(
  x: jax.Array,  # [B, T, D]
  chosen: jax.Array,  # [B, T, k]
  scales: jax.Array,  # [B, T, k], float32
  weights: Weights,  # [E, D, F], [E, D, F], [E, F, D]
  sharding: Sharding,
  way: str,
) -> jax.Array:
  """The sum of what the chosen experts make of each token, each times its scale [B, T, D]."""
  kernel = functools.partial(_on_own_tokens, sharding=sharding, way=way)
  dims = [TOKENS, TOKENS, TOKENS, *WEIGHTS]

  def forward(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out = sharding.local(kernel, *given, dims=dims, results=("mlp", *TOKENS))
    return sharding.sum_pieces(out, "mlp", TOKENS), given

  def backward(given: tuple[jax.Array, ...], of_out: jax.Array) -> tuple[jax.Array | None, ...]:
    results = [("mlp", *TOKENS), ("mlp", *TOKENS), *(("batch", *names) for names in WEIGHTS)]
    of_x, of_scales, *of_weights = sharding.local(kernel, *given, of_out, dims=[*dims, TOKENS], results=results)
    # In the order in which gradients are added up and split.
    of_gate, of_up, of_down = (
      sharding.sum_pieces(g, "batch", STORED) for g in (*of_weights[:2], of_weights[2].swapaxes(-1, -2))
    )
    return (
      sharding.sum_pieces(of_x, "mlp", TOKENS),
      None,
      sharding.sum_pieces(of_scales, "mlp", TOKENS),
      of_gate,
      of_up,
      of_down.swapaxes(-1, -2),
    )

  return with_gradient(forward, backward, x, chosen, scales, *weights)


def _on_own_tokens(
  x: jax.Array,  # [b, T, D]
  chosen: jax.Array,
  scales: jax.Array,
  gate: jax.Array,  # [e, D, f]
  up: jax.Array,
  down: jax.Array,  # [e, f, D]
  of_out: jax.Array | None = None,  # [b, T, D]
  *,
  sharding: Sharding,
  way: str,
) -> Any:
  """The results for a device's own tokens or, given their gradient, all gradients; with a leading dimension of 1."""
  flat = lambda x: x.reshape(-1, x.shape[-1])
  peers = ExpertPeers(sharding)
  transport = TRANSPORTS["gather" if peers.count == 1 else way]
  # Scales travel in the dtype in which they are used.
  given = flat(x), flat(chosen), flat(scales).astype(x.dtype), (gate, up, down), peers
  if of_out is None:
    return transport.forward(*given).reshape(1, *x.shape)
  of_x, of_scales, of_weights = transport.backward(*given, flat(of_out))
  own = [g.astype(w.dtype)[None] for g, w in zip(of_weights, (gate, up, down), strict=True)]
  return [of_x.reshape(1, *x.shape), of_scales.reshape(1, *scales.shape), *own]
