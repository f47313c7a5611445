"""The MLPs of experts that devices share: each of m devices has all weights of some experts, and tokens of its own.

transports.py says how tokens get to the experts that work on them, and back:

    gather      tokens are all-gathered; each device adds up what its experts contribute to each, and the sums are
                reduce-scattered. It always sends m − 1 times a device's tokens
    exchange    an all-to-all of rows, one for each token and each of its experts. All pairs of devices send equally
                many rows, so they do so in rounds, as many as the fullest pair needs
    ragged      a ragged all-to-all, which sends only existing rows, into a buffer for the most that can come

Where all devices have the same tokens, as when texts are written, no token has to be sent: results are summed.

No way drops a token by itself, and all give the same result. A model may have a capacity (routing.py): then experts get
fewer rows, and devices need less room for those that may come. In the backward pass tokens are sent again, with the
gradients of results: nothing is kept of other devices' tokens. A row is multiplied by its scale between `up` and
`down`, so that results need not return for the gradients of weights.

Where devices also share the hidden units of experts, each has its part of the sums (`Sharding.sum_pieces`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from models.dimensions import Dims, Sharding, is_dims, map_dims
from models.ops.exchange import ROOM
from models.ops.expert_rows import ExpertPeers
from models.ops.gradients import unsplit, with_gradient
from models.ops.grouped import NAMES, Weights
from models.ops.routing import TOKENS
from models.ops.transports import TRANSPORTS, Transport

SIDES = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


def choose(way: str, devices: int, chosen: int) -> str:
  """The way for so many devices that share the experts, if a token chooses so many. "auto" takes what sends less."""
  if way != "auto":
    return way
  return "exchange" if ROOM * chosen < devices else "gather"


def mix(
  x: jax.Array,  # [B, T, D]
  chosen: jax.Array,  # [B, T, k]
  scales: jax.Array,  # [B, T, k], float32
  weights: Weights,
  sharding: Sharding,
  way: str,
  limit: int = 0,
) -> jax.Array:
  """The sum of what the chosen experts make of each token, each times its scale [B, T, D].

  Args:
    chosen: the numbers of the chosen experts; the number of all experts where an expert does not take the token.
    limit: how many tokens of an example an expert takes at most; 0: all.
  """
  own = _OwnTokens(sharding, way, limit)
  names = dims_of(weights)
  given_dims = (TOKENS, TOKENS, TOKENS, map_dims(_gathered, names))
  piece = ("mlp", *TOKENS)  # a piece of a sum over hidden units

  def forward(*given: Any) -> tuple[jax.Array, Any]:
    out = _local(sharding, own.forward, given, given_dims, piece)
    return sharding.sum_pieces(out, "mlp", TOKENS), given

  def backward(given: Any, of_out: jax.Array) -> tuple[Any, ...]:
    pieces = map_dims(lambda dims: (*_in_pieces(dims), *_gathered(dims)), names.trained)
    run = lambda *given: _local(sharding, own.backward, given, (*given_dims, TOKENS), (piece, piece, pieces))
    of_x, of_scales, of_trained = unsplit(run)(*given, of_out)
    summed = lambda dims, g: _summed(g, dims, sharding)
    of_weights = weights.with_trained(jax.tree.map(summed, names.trained, of_trained, is_leaf=is_dims))
    return sharding.sum_pieces(of_x, "mlp", TOKENS), None, sharding.sum_pieces(of_scales, "mlp", TOKENS), of_weights

  return with_gradient(forward, backward, x, chosen, scales, weights)


def _local(sharding: Sharding, kernel: Callable[..., Any], given: Any, dims: Any, results: Any) -> Any:
  """`Sharding.local` of a kernel whose arguments are trees of arrays; `dims` and `results` have the same trees."""
  arrays, tree = jax.tree.flatten(given)
  flat = lambda *arrays: kernel(*jax.tree.unflatten(tree, arrays))
  return sharding.local(flat, *arrays, dims=jax.tree.leaves(dims, is_leaf=is_dims), results=results)


def dims_of(weights: Weights) -> Any:
  """The names of the dimensions of each array, in the tree of `weights`."""
  halves = lambda name: (("experts", SIDES[name][0], None), ("experts", None, SIDES[name][1]))
  adapters = None if weights.adapters is None else {name: halves(name) for name in weights.adapters}
  biases = None if weights.biases is None else (("experts", "mlp"),) * len(weights.biases)
  gate, up, down = (("experts", *SIDES[name]) for name in NAMES)
  return Weights(gate, up, down, weights.gated, biases, adapters)


def _gathered(names: Dims) -> Dims:
  return tuple(None if name == "embed" else name for name in names)


def _in_pieces(names: Dims) -> tuple[str, ...]:
  """The dimensions along which devices have pieces of a gradient; "mlp" is one if the array has no hidden units."""
  return ("batch",) if "mlp" in names else ("mlp", "batch")


def _summed(g: jax.Array, names: Dims, sharding: Sharding) -> jax.Array:
  """The gradient of an array with these dimensions, from its pieces [..., *names]."""
  # Gradients are added up and split in an order of dimensions in which `embed` is not the last.
  is_last = names[-1] == "embed"
  turned = lambda x: x.swapaxes(-1, -2) if is_last else x
  stored = (names[0], *reversed(names[1:])) if is_last else names
  g = turned(g)
  for dim in _in_pieces(names):
    g = sharding.sum_pieces(g, dim, ("batch", *stored) if dim == "mlp" else stored)
  return turned(g)


class _OwnTokens(NamedTuple):
  """What a device computes for its own tokens [b, T, D], with the weights of its own experts and hidden units.

  Results are pieces of sums. They begin with a dimension of 1 for each dimension along which devices have pieces.
  """

  sharding: Sharding
  way: str
  limit: int

  def forward(self, x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights) -> jax.Array:
    """The results for the tokens [1, b, T, D]."""
    return self._transport.forward(*self._flat(x, chosen, scales), weights, self._peers(x)).reshape(1, *x.shape)

  def backward(
    self, x: jax.Array, chosen: jax.Array, scales: jax.Array, weights: Weights, of_out: jax.Array
  ) -> tuple[jax.Array, jax.Array, Any]:
    """The gradients of the tokens, of their scales, and of `Weights.trained`."""
    given = *self._flat(x, chosen, scales), weights, self._peers(x), _rows(of_out)
    of_x, of_scales, of_trained = self._transport.backward(*given)
    piece = lambda dims, w, g: g.astype(w.dtype)[(None,) * len(_in_pieces(dims))]
    pieces = jax.tree.map(piece, dims_of(weights).trained, weights.trained, of_trained, is_leaf=is_dims)
    return of_x.reshape(1, *x.shape), of_scales.reshape(1, *scales.shape), pieces

  @property
  def _transport(self) -> Transport:
    if self.sharding.shards("experts") == 1:
      return TRANSPORTS["gather"]
    return TRANSPORTS["replicated" if self.sharding.shards("batch", among="experts") == 1 else self.way]

  def _peers(self, x: jax.Array) -> ExpertPeers:
    return ExpertPeers(self.sharding, self.limit * len(x))

  def _flat(self, x: jax.Array, chosen: jax.Array, scales: jax.Array) -> tuple[jax.Array, ...]:
    return _rows(x), _rows(chosen), _rows(scales).astype(x.dtype)  # scales travel in the dtype in which they are used


def _rows(x: jax.Array) -> jax.Array:
  return x.reshape(-1, x.shape[-1])
