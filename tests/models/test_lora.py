"""Adapters: what they add, that it is what merged weights compute, and what they cost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
  assert_trees_close,
  initial_state,
  model_sizes,
  one_sentence,
  program,
  random_batch,
  strategy,
)

from lab.analysis.saved import bytes_per_example
from models import lora
from models.flops import palm_flops_per_example, train_flops_per_example
from models.parameters import bind, frozen, init_params, joined, trained
from training.program import Params, Program

RANK = 4
MODEL = {"init_from": "a model", "model__lora_rank": RANK, "model__depth": 2, "model__seq_len": 16}
MIXTURE = {
  "model__experts": 4,
  "model__expert_width": 24,
  "model__shared_experts": 2,
}  # adapters of both kinds of experts


def made(**fields: Any) -> tuple[Program, Params]:
  """A program with adapters, none of which is zero."""
  found = program(**MODEL | fields)
  return found, initial_state(strategy("single", found)).params


def weight(params: Params, name: str) -> Any:
  return functools.reduce(lambda tree, key: tree[key], name.split("/"), params)


def merged(found: Program, params: Params) -> Params:
  """The weights of the model without adapters that computes the same."""
  without = frozen(found.sizes, params)

  def change(path: tuple, w: jax.Array) -> jax.Array:
    names = lora.names_of(jax.tree_util.keystr(path, simple=True, separator="/"))
    try:
      a, b = (weight(params, name) for name in names)
    except KeyError:
      return w
    return lora.merged(w, a, b, found.sizes.lora.scale)

  return jax.tree.map_with_path(change, without)


@pytest.mark.full
@pytest.mark.parametrize(
  "targets, more",
  [(",".join(lora.TARGETS), {}), ("value, out", {}), (",".join(lora.TARGETS), MIXTURE), ("value, down", MIXTURE)],
)
def test_loss_and_gradients_are_those_of_merged_weights(targets: str, more: dict[str, Any]):
  found, params = made(model__lora_targets=targets, model__qkv_bias=True, **more)
  plain = program(**MODEL | {"model__lora_rank": 0, "model__qkv_bias": True} | more)
  batch = random_batch(found, 4)

  def loss(adapters: Params) -> tuple[jax.Array, Any]:
    whole = merged(found, joined(adapters, frozen(found.sizes, params)))
    return plain.loss_sums(whole, batch, None)

  ours = jax.jit(lambda p: found.gradient_sums(p, batch, jnp.zeros((), jnp.int32)))(params)
  expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained(found.sizes, params))
  assert float(ours[0]["loss"]) == pytest.approx(float(expected[0][1]["loss"]), rel=1e-6)
  assert_trees_close(ours[1], expected[1], 1e-5)
  of_mlp = len({"gate", "up", "down"} & set(lora.targets_of(targets)))
  assert len(jax.tree.leaves(ours[1])) == 2 * (len(lora.targets_of(targets)) + (of_mlp if more else 0))

  inputs = batch["tokens"][:, :-1]
  logits = bind(plain.sizes, merged(found, params))(inputs)
  np.testing.assert_allclose(bind(found.sizes, params)(inputs), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_at_first_adapters_change_nothing():
  found = program(**MODEL | MIXTURE)
  params, batch = jax.jit(functools.partial(init_params, found.sizes))(jax.random.key(0)), random_batch(found, 4)
  plain, without = program(**MODEL | MIXTURE | {"model__lora_rank": 0}).sizes, frozen(found.sizes, params)
  run = jax.jit(lambda tokens: (bind(found.sizes, params)(tokens), bind(plain, without)(tokens)))
  np.testing.assert_array_equal(*run(batch["tokens"]))


@pytest.mark.full
def test_only_adapters_have_an_optimizer_state_and_change():
  found, _ = made(**MIXTURE, model__router="sigmoid_bias")  # its biases stay, too
  runner = strategy("fsdp", found)
  before = initial_state(runner)
  assert jax.tree.structure(before.opt_state[0].mu) == jax.tree.structure(trained(found.sizes, before.params))
  host = jax.device_get(before.params)
  after, _ = runner.train_step(before, runner.shard(random_batch(found, 8), 8))
  jax.tree.map(np.testing.assert_array_equal, *(frozen(found.sizes, p) for p in (host, jax.device_get(after.params))))
  changed = [(x != y).any() for x, y in zip(*map(jax.tree.leaves, (host, jax.device_get(after.params))), strict=True)]
  assert sum(changed) == len(jax.tree.leaves(trained(found.sizes, host)))


def test_weights_that_are_not_trained_are_stored_as_they_are_used():
  """In bfloat16 half the memory, with the same numbers. Norms and adapters are float32."""
  found = program(**MODEL, model__dtype="bfloat16")
  dtypes = jax.tree.map(lambda x: str(x.dtype), jax.eval_shape(found.init, jax.random.key(0)).params)
  assert set(jax.tree.leaves(trained(found.sizes, dtypes))) == {"float32"}
  assert dtypes["blocks"]["mlp"]["up"] == dtypes["embedding"] == "bfloat16"
  assert dtypes["norm"]["scale"] == "float32"


@pytest.mark.parametrize("remat, arrays", [("minimal", 7), ("dots", 7), ("full", 0)])
def test_an_adapter_saves_few_numbers_for_the_backward_pass(remat: str, arrays: int):
  """R for each position, and not the width of what it adds to. The input of `minimal` is saved anyway."""
  saved = lambda rank: bytes_per_example(
    program(**MODEL | {"model__lora_rank": rank, "model__remat": remat}).sizes, 1, 1, 1, layers=2
  )
  assert saved(RANK) - saved(0) <= 2 * 16 * RANK * 4 * (arrays + (remat == "minimal"))


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"init_from": ""}, ("model.lora_rank=4", "init_from")),
    ({"model__lora_targets": "query,head"}, ("model.lora_targets='head'", "query")),
    ({"model__lora_targets": " "}, ("model.lora_targets is empty", "query")),
    ({"model__lora_alpha": 0.0}, ("model.lora_alpha=0.0", "16")),
    ({"model__lora_rank": -1}, ("model.lora_rank=-1", "use 0")),
    ({"optimizer__name": "muon"}, ("optimizer.name='muon'", "model.lora_rank=4", "adamw")),
  ],
)
def test_bad_fields_get_one_sentence(fields: dict[str, Any], parts: tuple[str, ...]):
  with one_sentence(*parts):
    program(**MODEL | fields)


def test_flops_count_no_gradients_of_other_weights():
  sizes = model_sizes(depth=3, seq_len=16)
  found = program(**MODEL | {"model__depth": 3}).sizes
  d, f, n = found.width, found.mlp_width, found.heads * found.head_dim
  k = found.kv_heads * found.head_dim
  adapters = 3 * RANK * ((d + n) * 2 + (d + k) * 2 + 3 * (d + f))
  products = 3 * (2 * d * (n + k) + 3 * d * f) + d * found.vocab_size
  for count in (train_flops_per_example, palm_flops_per_example):
    assert count(sizes) - count(found) == 16 * (2 * products - 6 * adapters)


def test_of_experts_adapters_the_flops_of_those_count_that_work_on_a_token():
  sizes = model_sizes(depth=3, seq_len=16, experts=4, expert_width=24, shared_experts=2, experts_per_token=2)
  found = program(**MODEL | MIXTURE | {"model__depth": 3, "model__lora_targets": "gate,down"}).sizes
  d, f, n, k = found.width, 24, found.heads * found.head_dim, found.kv_heads * found.head_dim
  adapters = 3 * RANK * 2 * (2 * (d + f) + (d + 2 * f))  # two experts, and the shared ones as one MLP
  products = 3 * (2 * d * (n + k) + 3 * d * 4 * f + 4 * d) + d * found.vocab_size
  assert train_flops_per_example(sizes) - train_flops_per_example(found) == 16 * (2 * products - 6 * adapters)
