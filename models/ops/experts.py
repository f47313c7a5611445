"""The MLPs of experts that devices share: each of m devices has all weights of some experts, and tokens of its own.

transports.py says how tokens get to the experts that work on them, and back:

    gather      tokens are all-gathered; each device adds up what its experts contribute to each, and the sums are
                reduce-scattered. It always sends m − 1 times a device's tokens
    exchange    an all-to-all of rows, one for each token and each of its experts. All pairs of devices send equally
                many rows, so they do so in rounds, as many as the fullest pair needs
    ragged      a ragged all-to-all, which sends what there is, into a buffer for the most that can come

Where all of them have the same tokens, as when texts are written, nothing has to get there: results are summed.

No way drops a token by itself, and all give the same result. A model may have a capacity (routing.py): then experts get
fewer rows, and devices need less room for those that may come. In the backward pass tokens are sent again, with the
gradients of results: nothing is kept of other devices' tokens. A row is multiplied by its scale between `up` and
`down`, so that results need not return for the gradients of weights.

Where devices also share the hidden units of experts, each has its part of the sums (`Sharding.sum_pieces`).
"""

import functools
from typing import Any

import jax

from models.dimensions import Dims, Sharding, is_dims
from models.ops.grouped import NAMES, Weights
from models.ops.layers import unsplit, with_gradient
from models.ops.routing import TOKENS
from models.ops.transports import ROOM, TRANSPORTS, ExpertPeers

SIDES = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


def choose(way: str, devices: int, chosen: int) -> str:
  """The way for so many devices that share the experts, if a token has so many: by "auto", what sends less."""
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
    chosen: the numbers of experts, or how many there are where an expert does not take the token.
    limit: how many tokens of an example an expert takes at most; 0: all.
  """
  arrays, tree = jax.tree.flatten(weights)
  all_dims = dims_of(weights)
  trained = jax.tree.leaves(all_dims.trained, is_leaf=is_dims)
  frozen_count = len(arrays) - len(trained)  # they come first
  kernel = functools.partial(_on_own_tokens, tree=tree, sharding=sharding, way=way, limit=limit)
  dims = [TOKENS, TOKENS, TOKENS, *map(_gathered, jax.tree.leaves(all_dims, is_leaf=is_dims))]

  def forward(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out = sharding.local(kernel, *given, dims=dims, results=("mlp", *TOKENS))
    return sharding.sum_pieces(out, "mlp", TOKENS), given

  def backward(given: tuple[jax.Array, ...], of_out: jax.Array) -> tuple[jax.Array | None, ...]:
    results = [("mlp", *TOKENS), ("mlp", *TOKENS), *((*_in_pieces(names), *_gathered(names)) for names in trained)]
    run = lambda *arrays: sharding.local(kernel, *arrays, dims=[*dims, TOKENS], results=results)
    of_x, of_scales, *found = unsplit(run)(*given, of_out)
    # In the order in which gradients are added up and split.
    found = [_turned(g, names) for g, names in zip(found, trained, strict=True)]
    of_trained = [_summed(g, names, sharding) for g, names in zip(found, trained, strict=True)]
    return (
      sharding.sum_pieces(of_x, "mlp", TOKENS),
      None,
      sharding.sum_pieces(of_scales, "mlp", TOKENS),
      *[None] * frozen_count,
      *(_turned(g, names) for g, names in zip(of_trained, trained, strict=True)),
    )

  return with_gradient(forward, backward, x, chosen, scales, *arrays)


def dims_of(weights: Weights) -> Any:
  """The names of the dimensions of each array, in the same tree."""
  halves = lambda name: (("experts", SIDES[name][0], None), ("experts", None, SIDES[name][1]))
  adapters = None if weights.adapters is None else {name: halves(name) for name in weights.adapters}
  return Weights(*(("experts", *SIDES[name]) for name in NAMES), adapters=adapters)  # type: ignore


def _gathered(names: Dims) -> Dims:
  return tuple(None if name == "embed" else name for name in names)


def _in_pieces(names: Dims) -> tuple[str, ...]:
  """The dimensions along which devices have pieces of a gradient: those of what has no hidden units, too."""
  return ("batch",) if "mlp" in names else ("mlp", "batch")


def _turned(g: jax.Array, names: Dims) -> jax.Array:
  """A gradient [..., embed], or its pieces, with the last two dimensions exchanged; all others as they are."""
  return g.swapaxes(-1, -2) if names[-1] == "embed" else g


def _summed(g: jax.Array, names: Dims, sharding: Sharding) -> jax.Array:
  """The gradient of an array with these dimensions, from pieces that were turned."""
  stored = (names[0], *reversed(names[1:])) if names[-1] == "embed" else names
  for dim in _in_pieces(names):
    g = sharding.sum_pieces(g, dim, ("batch", *stored) if dim == "mlp" else stored)
  return g


def _on_own_tokens(
  x: jax.Array,  # [b, T, D]
  chosen: jax.Array,
  scales: jax.Array,
  *arrays: jax.Array,  # those of the own experts and hidden units; in the backward pass then of_out [b, T, D]
  tree: Any,
  sharding: Sharding,
  way: str,
  limit: int,
) -> Any:
  """The results for a device's own tokens or, given their gradient, all gradients; as pieces, of which each is one.

  Args:
    tree: that of `Weights`.
  """
  weights = jax.tree.unflatten(tree, arrays[: tree.num_leaves])
  flat = lambda x: x.reshape(-1, x.shape[-1])
  peers = ExpertPeers(sharding, limit * len(x))
  if peers.count == 1:
    way = "gather"
  elif sharding.shards("batch", among="experts") == 1:
    way = "replicated"
  transport = TRANSPORTS[way]
  # Scales travel in the dtype in which they are used.
  given = flat(x), flat(chosen), flat(scales).astype(x.dtype), weights, peers
  if len(arrays) == tree.num_leaves:
    return transport.forward(*given).reshape(1, *x.shape)
  of_x, of_scales, of_trained = transport.backward(*given, flat(arrays[-1]))
  names = jax.tree.leaves(dims_of(weights).trained, is_leaf=is_dims)
  pairs = zip(*map(jax.tree.leaves, (of_trained, weights.trained)), names, strict=True)
  own = [g.astype(w.dtype)[(None,) * len(_in_pieces(dims))] for g, w, dims in pairs]
  return [of_x.reshape(1, *x.shape), of_scales.reshape(1, *scales.shape), *own]
