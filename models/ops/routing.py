"""Routing: which experts a token is given to, how much each counts, and what keeps their loads equal.

A router scores all experts. The best of them work on the token, and its result is the sum of theirs, each times its
scale (`model.router`):

    softmax_topk    probabilities of the chosen experts among the chosen (Mixtral, arXiv:2401.04088)
    topk_softmax    probabilities of the chosen experts among all, so their sum is below 1 (OLMoE, arXiv:2409.02060)
    sigmoid_bias    sigmoids of the chosen scores, divided by their sum. A bias is added only to choose. After each
                    step it grows for experts with a low load, without a gradient (arXiv:2408.15664)

Two losses can be added. The balance loss (`router_aux`) is smallest at equal loads, and the z-loss (`router_z`) keeps
scores small. Both are sums over sequences, each of which counts as often as its predictions. So they are the same
number on any devices and in any parts of a batch. The usual loss for a whole batch is not such a sum: before the first
gradient it needs the loads of all parts, that is, one more forward pass.

With a capacity (`ModelSizes.expert_limit`), an expert takes only the first so many tokens of a sequence that chose it.
It adds nothing to the other tokens: it drops them, and the scales of their other experts stay as they are. So which
tokens are dropped depends on their sequence alone, and a token does not depend on later ones. The losses and the loads
count what routers choose, dropped or not.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from models.dimensions import Dims, Sharding
from models.expert_sizes import ExpertSizes
from models.ops.loss import Sums
from models.ops.positions import chunks, halves, join
from models.ops.workarounds import in_order

if TYPE_CHECKING:
  from models.sizes import ModelSizes

TOKENS: Dims = ("batch", None, None)


class Counted(NamedTuple):
  """What counts in the losses and loads of routers: tokens [B, T], and the number of predictions of each text [B]."""

  tokens: jax.Array
  predictions: jax.Array


class Routes(NamedTuple):
  """The chosen experts of each token [B, T, k] and their scales in float32; then what the router's losses need.

  `taken` [B, T, k] is false where the expert drops the token; None: experts take all tokens.
  """

  chosen: jax.Array
  scales: jax.Array
  probabilities: jax.Array  # [B, T, E], of all experts
  normalizer: jax.Array  # [B, T], the logarithm of the sum of the exponentials of the scores
  taken: jax.Array | None = None


def route(
  scores: jax.Array, bias: jax.Array | None, experts: ExpertSizes, sharding: Sharding, limit: int = 0
) -> Routes:
  """Chooses experts by scores [B, T, E] in float32. Of equal scores, the first is chosen, so that all devices agree.

  Args:
    bias: [E], for the router "sigmoid_bias".
    limit: how many tokens of an example an expert takes at most; 0: all.
  """
  sigmoids = jax.nn.sigmoid(scores)
  by = scores if bias is None else sigmoids + bias
  best = lambda x: jax.lax.top_k(x, experts.per_token)[1]
  # Each device chooses for its own tokens: compilers do not split `top_k`, but gather all scores.
  chosen = sharding.local(best, jax.lax.stop_gradient(by), dims=[TOKENS], results=TOKENS)
  of_chosen = lambda x: jnp.sum(jnp.where(one_hot(chosen, experts.count), x[..., None, :], 0), axis=-1)
  share = lambda x: x / jnp.sum(x, axis=-1, keepdims=True)
  probabilities = jax.nn.softmax(scores)
  if experts.router == "softmax_topk":
    scales = jax.nn.softmax(of_chosen(scores))
  elif experts.router == "topk_softmax":
    scales = of_chosen(probabilities)
  else:
    scales, probabilities = share(of_chosen(sigmoids)), share(sigmoids)
  taken = None
  if limit:
    first = lambda chosen: _first(chosen, experts.count, limit, sharding)
    taken = sharding.local(first, chosen, dims=[TOKENS], results=TOKENS)
  return Routes(chosen, experts.router_scale * scales, probabilities, jax.nn.logsumexp(scores, axis=-1), taken)


def _first(chosen: jax.Array, experts: int, limit: int, sharding: Sharding) -> jax.Array:
  """Whether a token [b, t] is one of the first `limit` of its text that chose its expert [b, t, k].

  Devices that share a text tell each other how often each expert was chosen in their chunks.
  """
  ones = jnp.any(one_hot(chosen, experts), axis=-2).astype(jnp.int32)  # [b, t, E]
  before = lambda x: jnp.cumsum(x, axis=1) - x  # counts before each token, among positions in order
  count = sharding.shards("positions")
  if count == 1:
    number = before(ones)
  else:
    parts = halves(ones)
    own = jnp.stack([jnp.sum(part, axis=1) for part in parts])  # [2, b, E]
    gather = lambda x, axes: jax.lax.all_gather(x, axes)
    early, late = jnp.moveaxis(sharding.across(gather, own, "positions"), 1, 0)  # [n, b, E] each
    start = before(jnp.concatenate([early, late[::-1]]).swapaxes(0, 1)).swapaxes(0, 1)  # of each chunk, in order
    index = sharding.index("positions")
    at = index, chunks(count) - 1 - index
    number = join(*(before(part) + start[i][:, None] for part, i in zip(parts, at, strict=True)))
  return jnp.sum(jnp.where(one_hot(chosen, experts), number[..., None, :], 0), axis=-1) < limit


def one_hot(chosen: jax.Array, experts: int) -> jax.Array:
  """[..., k] → [..., k, E], true for the chosen expert. A comparison, which compilers fuse with what reads it."""
  return chosen[..., None] == jnp.arange(experts)


@jax.named_scope("router_sums")
def sums(routes: Routes, counted: Counted, experts: ExpertSizes, sharding: Sharding) -> Sums:
  """The router's losses, summed over sequences; the sum of the scores' entropies; and counts.

  The counts are `load` [E], the tokens that chose each expert, and with a capacity `dropped`, the dropped choices.
  """
  tokens, k = counted.tokens[..., None], experts.per_token
  load = jnp.sum(tokens & jnp.any(one_hot(routes.chosen, experts.count), axis=-2), axis=1)  # [B, E], own positions
  dropped = {}
  if routes.taken is not None:
    dropped = {"dropped": jnp.sum(tokens & ~routes.taken)}
    if sharding.shards("positions") > 1:  # devices that share a text have counted together before
      load = in_order(dropped["dropped"], load)
  of_text = sharding.across(jax.lax.psum, load, "positions")  # [B, E]
  each = counted.predictions / jnp.maximum(jnp.sum(of_text, axis=1) / k, 1)  # [B], how often a token counts
  share = of_text / jnp.maximum(jnp.sum(of_text, axis=1, keepdims=True), 1)
  among = lambda x: jnp.where(tokens, x, 0)
  likely = jnp.sum(among(routes.probabilities), axis=1)  # [B, E]
  entropy = -jnp.sum(among(routes.probabilities * jnp.log(routes.probabilities + 1e-30)))
  return {
    "balance": experts.count * jnp.sum(each[:, None] * share * likely),
    "router_z": jnp.sum(each * jnp.sum(jnp.where(counted.tokens, routes.normalizer**2, 0), axis=1)),
    "entropy": jax.lax.stop_gradient(entropy),
    "load": jnp.sum(load, axis=0),
  } | dropped


def of_layers(found: Sums, numbers: jax.Array, sizes: "ModelSizes") -> Sums:
  """The sums of several blocks, from each block's [L', ...]: added up, but `load` stays by block [L, E].

  L is the number of all blocks that have experts, and `numbers` are the blocks' numbers in the model.
  """
  if not found or not sizes.experts:
    return {}
  empty = jnp.zeros((sizes.mixtures, sizes.experts.count), jnp.int32)
  numbers = sizes.experts.number_of(numbers)
  return {name: jnp.sum(x) for name, x in found.items()} | {"load": empty.at[numbers].add(found["load"])}


def penalty(found: Sums, experts: ExpertSizes | None) -> jax.Array | float:
  """What the sums of routers add to the loss."""
  return experts.router_aux * found["balance"] + experts.router_z * found["router_z"] if experts and found else 0.0


def no_sums(sizes: "ModelSizes") -> Sums:
  """The sums of all routers over an empty batch; {} without experts."""
  if not sizes.experts:
    return {}
  zero, none = jnp.zeros(()), jnp.zeros((sizes.mixtures, sizes.experts.count), jnp.int32)
  dropped = {"dropped": jnp.zeros((), jnp.int32)} if sizes.expert_limit else {}
  return {"balance": zero, "router_z": zero, "entropy": zero, "load": none} | dropped


def metrics(found: Sums, sizes: "ModelSizes") -> dict[str, jax.Array]:
  """What a step reports of its routers, from its batch's sums: means over blocks with experts, and the largest load.

  `load_max` is the load of the busiest expert of all blocks, relative to the mean load; `idle_experts` is the share of
  experts without a token; `router_entropy` is the mean entropy of a router's probabilities, at most log(experts).
  `load` is how many tokens chose each expert [depth, experts]. `dropped`, with a capacity, is the share of these
  choices that experts did not take.
  """
  assert sizes.experts is not None
  load, per_token = found["load"], sizes.experts.per_token
  mean = jnp.maximum(jnp.mean(load, axis=1, keepdims=True), 1e-9)
  routed = jnp.maximum(jnp.sum(load) / per_token, 1)
  dropped = {"dropped": found["dropped"] / (routed * per_token)} if sizes.expert_limit else {}
  return {
    "balance_loss": found["balance"] / (sizes.mixtures * found["count"]),
    "router_z_loss": found["router_z"] / (sizes.mixtures * found["count"]),
    "router_entropy": found["entropy"] / routed,
    "load_max": jnp.max(load / mean),
    "idle_experts": jnp.mean(load == 0),
    "load": load,
  } | dropped


def balanced(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
  """The biases [L, E] of the router "sigmoid_bias" after a step with these loads [L, E]: up where loads are too low."""
  total, experts = jnp.sum(load, axis=1, keepdims=True), load.shape[1]
  is_low, is_high = load < -(-total // experts), load > total // experts  # the mean need not be a whole number
  return bias + rate * (is_low.astype(bias.dtype) - is_high.astype(bias.dtype))
