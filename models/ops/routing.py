"""Routing: which experts a token is given to, how much each counts, and what keeps their loads equal.

A router scores all experts. The best of them work on the token, and its result is the sum of theirs, each with a weight
(`ModelSizes.router`):

    softmax_topk    probabilities of the chosen ones among the chosen (Mixtral, arXiv:2401.04088)
    topk_softmax    probabilities of the chosen ones among all, so their sum is below 1 (OLMoE, arXiv:2409.02060)
    sigmoid_bias    sigmoids of the chosen ones, divided by their sum. A bias is added only to choose. After each
                    step it grows for experts with a low load, without a gradient (arXiv:2408.15664)

Two losses can be added, each with a weight: one is least if the loads are equal, one keeps scores small. Both are sums
over sequences, each of which counts as often as its predictions. So they are the same number on any devices and in any
parts of a batch. The usual loss for a whole batch is not such a sum: before the first gradient it needs the loads of
all parts, that is, one more forward pass.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from models.dimensions import Dims, Sharding
from models.ops.loss import Sums

if TYPE_CHECKING:
  from models.sizes import ModelSizes

TOKENS: Dims = ("batch", None, None)
ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid_bias")


class Counted(NamedTuple):
  """What counts in the losses and loads of routers: tokens [B, T], and the number of predictions of each text [B]."""

  tokens: jax.Array
  predictions: jax.Array


class Routes(NamedTuple):
  """The experts of each token [B, T, k] and their weights in float32; then what the router's losses need."""

  experts: jax.Array
  weights: jax.Array
  probabilities: jax.Array  # [B, T, E], of all experts
  normalizer: jax.Array  # [B, T], the logarithm of the sum of the exponentials of the scores


def route(scores: jax.Array, bias: jax.Array | None, sizes: "ModelSizes", sharding: Sharding) -> Routes:
  """Chooses experts by scores [B, T, E] in float32. Of equal ones, the first is chosen, so that all devices agree.

  Args:
    bias: [E], for the router "sigmoid_bias".
  """
  sigmoids = jax.nn.sigmoid(scores)
  by = scores if bias is None else sigmoids + bias
  best = lambda x: jax.lax.top_k(x, sizes.experts_per_token)[1]
  # Each device for its own tokens: compilers do not split it, and gather all scores.
  chosen = sharding.local(best, jax.lax.stop_gradient(by), dims=[TOKENS], results=TOKENS)
  of_chosen = lambda x: jnp.sum(jnp.where(one_hot(chosen, sizes.experts), x[..., None, :], 0), axis=-1)
  share = lambda x: x / jnp.sum(x, axis=-1, keepdims=True)
  probabilities = jax.nn.softmax(scores)
  if sizes.router == "softmax_topk":
    weights = jax.nn.softmax(of_chosen(scores))
  elif sizes.router == "topk_softmax":
    weights = of_chosen(probabilities)
  else:
    weights, probabilities = share(of_chosen(sigmoids)), share(sigmoids)
  return Routes(chosen, sizes.router_scale * weights, probabilities, jax.nn.logsumexp(scores, axis=-1))


def one_hot(chosen: jax.Array, experts: int) -> jax.Array:
  """[..., k] → [..., k, E], true for the chosen expert. A comparison, which compilers fuse with what reads it."""
  return chosen[..., None] == jnp.arange(experts)


@jax.named_scope("router_sums")
def sums(routes: Routes, counted: Counted, sizes: "ModelSizes", sharding: Sharding) -> Sums:
  """The router's losses, summed over sequences; the tokens of each expert [E]; and the sum of the scores' entropies."""
  tokens, k = counted.tokens[..., None], sizes.experts_per_token
  load = jnp.sum(tokens & jnp.any(one_hot(routes.experts, sizes.experts), axis=-2), axis=1)  # [B, E], own positions
  of_text = sharding.across(jax.lax.psum, load, "positions")  # [B, E]
  each = counted.predictions / jnp.maximum(jnp.sum(of_text, axis=1) / k, 1)  # [B], how often a token counts
  share = of_text / jnp.maximum(jnp.sum(of_text, axis=1, keepdims=True), 1)
  among = lambda x: jnp.where(tokens, x, 0)
  likely = jnp.sum(among(routes.probabilities), axis=1)  # [B, E]
  entropy = -jnp.sum(among(routes.probabilities * jnp.log(routes.probabilities + 1e-30)))
  return {
    "balance": sizes.experts * jnp.sum(each[:, None] * share * likely),
    "router_z": jnp.sum(each * jnp.sum(jnp.where(counted.tokens, routes.normalizer**2, 0), axis=1)),
    "entropy": jax.lax.stop_gradient(entropy),
    "load": jnp.sum(load, axis=0),
  }


def of_layers(found: Sums, numbers: jax.Array, sizes: "ModelSizes") -> Sums:
  """The sums of several blocks from those of each [L', ...]: added up, but loads [L, E] by the blocks' numbers.

  L counts the blocks that have experts.
  """
  if not found:
    return {}
  empty = jnp.zeros((sizes.mixtures, sizes.experts), jnp.int32)
  numbers = numbers - sizes.dense_layers if sizes.dense_layers else numbers
  return {name: jnp.sum(x) for name, x in found.items()} | {"load": empty.at[numbers].add(found["load"])}


def penalty(found: Sums, sizes: "ModelSizes") -> jax.Array | float:
  """What the sums of routers add to the loss."""
  return sizes.router_aux * found["balance"] + sizes.router_z * found["router_z"] if found else 0.0


def no_sums(sizes: "ModelSizes") -> Sums:
  """The sums of all routers over an empty batch; {} without experts."""
  if not sizes.experts:
    return {}
  zero = jnp.zeros(())
  return {
    "balance": zero, "router_z": zero, "entropy": zero, "load": jnp.zeros((sizes.mixtures, sizes.experts), jnp.int32)
  }  # fmt: skip


def metrics(found: Sums, sizes: "ModelSizes") -> dict[str, jax.Array]:
  """What a step reports of its routers, from the sums over its batch: means over blocks with experts, and the worst.

  `load_max` is the load of the busiest expert of all blocks, relative to the mean load; `idle_experts` is the share of
  experts without a token; `router_entropy` is the mean entropy of a router's probabilities, at most log(experts).
  `load` is how many tokens each expert had [depth, experts].
  """
  load = found["load"]
  mean = jnp.maximum(jnp.mean(load, axis=1, keepdims=True), 1e-9)
  routed = jnp.maximum(jnp.sum(load) / sizes.experts_per_token, 1)
  return {
    "balance_loss": found["balance"] / (sizes.mixtures * found["count"]),
    "router_z_loss": found["router_z"] / (sizes.mixtures * found["count"]),
    "router_entropy": found["entropy"] / routed,
    "load_max": jnp.max(load / mean),
    "idle_experts": jnp.mean(load == 0),
    "load": load,
  }


def balanced(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
  """The biases [L, E] of the router "sigmoid_bias" after a step with these loads [L, E]: up where they are too low."""
  total, experts = jnp.sum(load, axis=1, keepdims=True), load.shape[1]
  is_low, is_high = load < -(-total // experts), load > total // experts  # than the mean, which need not be whole
  return bias + rate * (is_low.astype(bias.dtype) - is_high.astype(bias.dtype))
