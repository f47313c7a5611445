"""A mixture of experts equals the dense computation, in which every expert works on every token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
  PARITY,
  assert_trees_close,
  in_full,
  logits_in_parts,
  model_sizes,
  one_sentence,
  params_of,
  program,
  random_batch,
)

from models.dimensions import UNSHARDED
from models.expert_sizes import ROUTERS, ExpertSizes
from models.mlps import ClampedSwiGLU, SwiGLU
from models.ops import experts, grouped, routing
from models.ops.grouped import Rows, Weights
from models.ops.routing import Counted
from models.parameters import bind
from models.sizes import ModelSizes
from models.transformer import Transformer

E, D, F, K, RANK = 5, 16, 24, 2, 3


@functools.cache
def weights() -> tuple[np.ndarray, ...]:
  random = np.random.default_rng(0)
  return tuple(random.standard_normal(shape).astype(np.float32) * 0.3 for shape in ((E, D, F), (E, D, F), (E, F, D)))


def mlp(x: jax.Array, w: Any) -> jax.Array:
  return (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]


def clamped(x: jax.Array, w: Any, biases: Any) -> jax.Array:
  """With biases, as gpt-oss defines it (arXiv:2508.10925)."""
  gate, up = jnp.minimum(x @ w[0] + biases[0], 7), jnp.minimum(jnp.maximum(x @ w[1] + biases[1], -7), 7)
  return (gate / (1 + jnp.exp(-1.702 * gate)) * (1 + up)) @ w[2]


def counts_of(case: str, rows: int) -> np.ndarray:
  """How many rows each expert has; some are left that belong to none."""
  found = {"equal": np.full(E, rows // E - 1), "one": np.eye(E)[3] * (rows - 2), "none": np.zeros(E)}
  return found.get(case, np.array([rows // 2, 0, 7, 1, rows // 4])).astype(np.int32)


def test_products_of_sorted_rows_are_those_of_their_experts():
  """In the forward pass and all gradients, also with no row at all, and with all for one expert.

  With adapters they are those of weights to which these are added, and the gradients are those of the adapters.
  """
  random, size = np.random.default_rng(1), 45
  x, g = (random.standard_normal((size, D)).astype(np.float32) for _ in range(2))
  scales = random.uniform(0.5, 2, size).astype(np.float32)
  draw = lambda *shape: random.standard_normal((E, *shape)).astype(np.float32)
  adapters = {"gate": (draw(D, RANK), draw(RANK, F)), "down": (draw(F, RANK), draw(RANK, D))}
  biases, large = (
    (2 * draw(F), 2 * draw(F)),
    tuple(k * w for k, w in zip((2, 2, 1), weights(), strict=True)),
  )  # some are clamped

  def plain(x: jax.Array, scales: jax.Array, w: Any, counts: jax.Array) -> jax.Array:
    of = jnp.sum(jnp.arange(size)[:, None] >= jnp.cumsum(counts), axis=1)  # E for rows of none
    if len(w) == 2:
      one = lambda e: clamped(x, [part[e] for part in w[0]], [part[e] for part in w[1]])
    else:
      one = lambda e: mlp(x, [part[e] for part in w])
    done = [scales[:, None] * one(e) for e in range(E)]
    return sum(jnp.where((of == e)[:, None], one, 0) for e, one in enumerate(done))

  def summed(adapters: Any) -> list[jax.Array]:
    of = lambda name: adapters[name][0] @ adapters[name][1] if name in adapters else 0
    return [w + of(name) for w, name in zip(weights(), grouped.NAMES, strict=True)]

  @jax.jit
  def both(counts: jax.Array) -> Any:
    rows, found = Rows(x, scales, counts), []
    for ours, whole, trained in (
      (Weights(*weights(), SwiGLU.gated), lambda w: w, weights()),
      (Weights(*weights(), SwiGLU.gated, adapters=adapters), summed, adapters),
      (Weights(*large, ClampedSwiGLU.gated, biases), lambda w: w, (large, biases)),
    ):
      out, pull = jax.vjp(lambda x, scales, w, whole=whole: plain(x, scales, whole(w), counts), x, scales, trained)
      found.append((grouped.forward(rows, ours, size), grouped.backward(rows, ours, g, size), out, pull(g)))
    return [one[:2] for one in found], [one[2:] for one in found]

  for case in ("equal", "one", "none", "mixed"):
    ours, expected = jax.device_get(both(counts_of(case, size)))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(one, other, rtol=PARITY, atol=PARITY * 10)


def sizes_of(**fields: Any) -> ModelSizes:
  small = {"width": D, "heads": 2, "kv_heads": 2, "mlp_width": F, "seq_len": 8, "vocab_size": 32, "depth": 2}
  return model_sizes(**(small | {"experts": E, "experts_per_token": K, "router_z": 0.01} | fields))


def dense(x: jax.Array, chosen: jax.Array, scales: jax.Array, w: Weights) -> jax.Array:
  """Every expert on every token."""
  share = jnp.sum(jnp.where(chosen[..., None] == jnp.arange(E), scales[..., None], 0), axis=-2)
  return sum(share[..., e, None] * mlp(x, [w.gate[e], w.up[e], w.down[e]]) for e in range(E))


def plainly_routed(scores: jax.Array, bias: Any, experts: ExpertSizes, sharding: Any, limit: int) -> routing.Routes:
  """The routes by another way: the chosen are found by sorting, and their weights are read by their numbers.

  With a limit, each choice is compared with all choices of earlier tokens.
  """
  of_all = {
    "softmax_topk": jnp.exp(scores),
    "topk_softmax": jax.nn.softmax(scores),
    "sigmoid_bias": 1 / (1 + jnp.exp(-scores)),
  }
  values = of_all[experts.router]
  best = jnp.argsort(-(values + (0 if bias is None else bias)), axis=-1, stable=True)[..., : experts.per_token]
  weights = jnp.take_along_axis(values, best, axis=-1)
  if experts.router != "topk_softmax":
    weights = weights / weights.sum(-1, keepdims=True)
  probabilities = values / values.sum(-1, keepdims=True)
  same = jnp.any(best[:, :, :, None, None] == best[:, None, None], axis=-1)  # [B, T, k, T]
  is_earlier = jnp.tri(scores.shape[1], k=-1, dtype=bool)[:, None]
  taken = jnp.sum(same & is_earlier, axis=-1) < limit if limit else None
  normalizer = jnp.log(jnp.exp(scores).sum(-1))
  return routing.Routes(best, experts.router_scale * weights, probabilities, normalizer, taken)


run_blocks = Transformer.run_blocks


def one_after_another(model: Transformer, x: jax.Array, *given: Any) -> tuple[jax.Array, Any]:
  """Runs the blocks of a mixture whose first blocks are dense as two models: a dense one, then a mixture."""
  sizes, params = model.sizes, nnx.to_pure_dict(nnx.state(model, nnx.Param))
  experts = dataclasses.replace(sizes.experts, dense_layers=0)
  mixture = dataclasses.replace(sizes, experts=experts, depth=sizes.mixtures)
  dense = dataclasses.replace(sizes, experts=None, depth=sizes.first_layers)
  first = {name: params[{"blocks": "dense_blocks"}.get(name, name)] for name in params if name != "dense_blocks"}
  rest = {name: params[name] for name in params if name != "dense_blocks"}
  x, _ = run_blocks(bind(dense, first), x, *given)
  return run_blocks(bind(mixture, rest), x, *given, first_layer=sizes.first_layers)


FIRST_ARE_DENSE = {"dense_layers": 2, "depth": 4, "mlp_width": 40, "expert_width": F, "dropout": 0.2}


@pytest.mark.parametrize(
  "router, capacity", in_full([*((router, 0.0) for router in ROUTERS), ("softmax_topk", 0.6)], ("sigmoid_bias", 0.0))
)
def test_a_model_with_experts_equals_the_dense_computation(
  router: str, capacity: float, monkeypatch: pytest.MonkeyPatch
):
  """The loss and every gradient, that of the router included. In one case the first blocks are dense.

  With a capacity, what experts drop is masked.
  """
  more = FIRST_ARE_DENSE if (router, capacity) == ("softmax_topk", 0.0) else {}
  sizes = sizes_of(router=router, shared_experts=1, expert_capacity=capacity, **more)
  params, whole = params_of(sizes), dataclasses.replace(program(), sizes=sizes)
  batch = random_batch(whole, 4)

  def loss(params: Any) -> jax.Array:
    return whole.loss_sums(params, batch, np.int32(0))[0]

  ours = jax.jit(jax.value_and_grad(loss))(params)
  if sizes.first_layers:
    monkeypatch.setattr(Transformer, "run_blocks", one_after_another)
  monkeypatch.setattr("models.experts.mix", lambda x, chosen, scales, w, *_: dense(x, chosen, scales, w))
  monkeypatch.setattr("models.experts.route", plainly_routed)
  expected = jax.jit(jax.value_and_grad(lambda params: loss(params)))(params)
  assert_trees_close(ours, expected, PARITY)
  assert np.abs(ours[1]["blocks"]["mlp"]["router"]).max() > 0
  if router == "sigmoid_bias":  # it only chooses
    assert not ours[1]["blocks"]["mlp"]["bias"].any()


@functools.cache
def routed() -> dict[str, routing.Routes]:
  """By each router; scaled; with a bias; and of equal scores. All in one program."""
  scores, equal = np.log(np.float32([[[1, 2, 4, 8, 1]]])), np.zeros((1, 3, E), np.float32)
  asked = {
    "softmax_topk": (scores, None, {}),
    "topk_softmax": (scores, None, {"router": "topk_softmax"}),
    "scaled": (scores, None, {"router_scale": 2.5}),
    "sigmoid_bias": (scores, np.float32([0, 0, -9, 0, 9]), {"router": "sigmoid_bias"}),
    "equal": (equal, None, {}),
  }
  route = lambda scores, bias, fields: routing.route(
    jnp.asarray(scores), bias, sizes_of(**fields).experts, UNSHARDED, limit=2
  )
  return jax.device_get(jax.jit(lambda: {name: route(*given) for name, given in asked.items()})())


def test_of_equal_scores_the_first_experts_are_chosen():
  """So every device chooses the same."""
  found = routed()["equal"]
  np.testing.assert_array_equal(found.chosen, np.broadcast_to([0, 1], (1, 3, 2)))
  np.testing.assert_allclose(found.scales, 0.5)


def test_experts_take_the_first_tokens_that_chose_them():
  np.testing.assert_array_equal(routed()["equal"].taken, [[[True, True], [True, True], [False, False]]])
  assert sizes_of(experts=4, expert_capacity=1.1).expert_limit == 5  # of 8 tokens, with two experts each
  assert sizes_of(experts=4, expert_capacity=9.0).expert_limit == 8


def test_scales_of_chosen_experts():
  found = routed()
  np.testing.assert_allclose(found["softmax_topk"].scales, [[[8 / 12, 4 / 12]]], rtol=1e-6)
  np.testing.assert_allclose(found["topk_softmax"].scales, [[[8 / 16, 4 / 16]]], rtol=1e-6)
  np.testing.assert_allclose(found["scaled"].scales, [[[20 / 12, 10 / 12]]], rtol=1e-6)
  np.testing.assert_array_equal(found["sigmoid_bias"].chosen, [[[4, 3]]])
  one, other = 1 / 2, 8 / 9
  np.testing.assert_allclose(found["sigmoid_bias"].scales, [[[one / (one + other), other / (one + other)]]], rtol=1e-6)


def test_the_balance_loss_is_1_for_equal_loads_and_padding_does_not_count():
  """Each text counts as often as its predictions."""
  sizes, scores = sizes_of(experts=4), np.zeros((2, 4, 4))
  for t in range(4):
    scores[:, t, [t, (t + 1) % 4]] = 5.0
  scores[1, :, :] = [9.0, 8.0, 0.0, 0.0]
  tokens = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)

  @jax.jit
  def run(tokens: jax.Array, predictions: jax.Array) -> dict[str, jax.Array]:
    routes = routing.route(jnp.asarray(scores, jnp.float32), None, sizes.experts, UNSHARDED)
    return routing.sums(routes, Counted(tokens, predictions), sizes.experts, UNSHARDED)

  sums = lambda tokens, predictions: jax.device_get(run(tokens, np.array(predictions)))

  found = sums(tokens & [[True], [False]], [3, 0])
  np.testing.assert_allclose(found["balance"], 3.0, rtol=1e-5)
  np.testing.assert_array_equal(found["load"], [2, 2, 2, 2])
  skewed = sums(tokens & [[False], [True]], [0, 1])
  probabilities = np.exp([9.0, 8.0, 0.0, 0.0]) / np.exp([9.0, 8.0, 0.0, 0.0]).sum()
  np.testing.assert_allclose(skewed["balance"], 4 * 0.5 * (probabilities[0] + probabilities[1]), rtol=1e-5)
  np.testing.assert_array_equal(skewed["load"], [2, 2, 0, 0])
  both = sums(tokens, [3, 1])
  for name in found:
    np.testing.assert_allclose(both[name], found[name] + skewed[name], rtol=1e-5)


@pytest.mark.full
def test_dense_blocks_are_no_idle_experts():
  """Loads and means are those of the blocks that have experts."""
  sizes, load = sizes_of(dense_layers=3, depth=5), np.int32([[2] * E, [1] * E])

  @jax.jit
  def run(load: jax.Array) -> tuple[dict, dict]:
    of_two = {"balance": jnp.full(2, 6.0), "router_z": jnp.full(2, 3.0), "entropy": jnp.ones(2), "load": load}
    found = routing.of_layers(of_two, jnp.arange(3, 5), sizes)
    return found, routing.metrics(found | {"count": 3}, sizes)

  found, metrics = jax.device_get(run(load))
  np.testing.assert_array_equal(found["load"], load)
  assert (metrics["balance_loss"], metrics["router_z_loss"]) == (2, 1)  # 12 and 6, of 2 blocks and 3 predictions
  assert (metrics["load_max"], metrics["idle_experts"]) == (1, 0)


@pytest.mark.full
def test_texts_are_continued_with_a_cache_for_both_kinds_of_blocks():
  sizes = sizes_of(**FIRST_ARE_DENSE, seq_len=24)
  model, tokens = bind(sizes, params_of(sizes)), np.random.default_rng(0).integers(0, 32, (2, 24), np.int32)
  assert_trees_close(logits_in_parts(model, tokens), jax.jit(model)(tokens), PARITY)


def test_the_bias_of_a_router_moves_towards_equal_loads():
  bias = jax.jit(routing.balanced)(np.zeros((2, 3)), np.array([[5, 1, 3], [2, 2, 2]]), 0.1)
  np.testing.assert_allclose(bias, [[-0.1, 0.1, 0.0], [0.0, 0.0, 0.0]], atol=1e-7)


def test_auto_chooses_what_sends_less():
  assert experts.choose("auto", 8, 2) == "exchange"
  assert experts.choose("auto", 2, 2) == "gather"
  assert experts.choose("ragged", 2, 2) == "ragged"


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"experts_per_token": 6}, ["model.experts_per_token=6", "model.experts=5", "use 2"]),
    ({"router": "softmax"}, ["model.router='softmax'", "topk_softmax"]),
    ({"expert_transport": "gathers"}, ["model.expert_transport='gathers'", "'gather'"]),
    ({"experts": 0, "shared_experts": 1}, ["model.shared_experts=1", "model.experts=0"]),
    ({"experts": 0, "expert_capacity": 1.5}, ["model.expert_capacity=1.5", "model.experts=0"]),
    ({"expert_capacity": -1.0}, ["model.expert_capacity=-1.0"]),
    ({"router_aux": -1.0}, ["model.router_aux=-1.0"]),
    ({"dense_layers": -1}, ["model.dense_layers=-1"]),
    ({"dense_layers": 2}, ["model.dense_layers=2", "model.depth=2", "at most 1"]),
    ({"dense_layers": 1, "experts": 0}, ["model.dense_layers=1", "model.experts=0"]),
    ({"experts_every": 0}, ["model.experts_every=0"]),
    ({"experts_every": 3}, ["model.experts_every=3", "model.depth=2", "no block for the experts"]),
    ({"experts_every": 2, "experts": 0}, ["model.experts_every=2", "needs model.experts"]),
  ],
)
def test_mistakes_get_one_sentence(fields: dict[str, Any], parts: list[str]):
  with one_sentence(*parts):
    sizes_of(**fields)
