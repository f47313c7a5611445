"""Compares pmap with a hand-written shard_map of the same step, which also shows how to migrate from pmap."""

import jax
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, one_sentence, program, random_batch, strategy
from jax.sharding import PartitionSpec as P

from strategies.execution.mesh import abstract_mesh


@pytest.mark.full
def test_pmap_equals_shard_map():
  """Also Muon, whose layers the devices divide here. In the shard_map each device works on all of them."""
  p = program(model__dropout=0.1, model__depth=8, optimizer__name="muon")
  runner = strategy("pmap_ddp", p)

  def step(state, batch):
    sums, grads = p.gradient_sums(state.params, batch, state.step)
    return p.apply_gradients(state, *jax.lax.psum((sums, grads), "data"))

  mapped = jax.shard_map(step, mesh=runner.mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
  ours, theirs = runner.init(seed=0), runner.init(seed=0)
  for seed in range(3):
    batch = random_batch(p, 16, seed=seed)
    ours, metrics = runner.train_step(ours, runner.shard(batch, 16))
    theirs, expected = jax.jit(mapped)(theirs, batch)
    assert_trees_close(jax.device_get(metrics), jax.device_get(expected), PARITY)
  assert_trees_close(jax.device_get(ours.params), jax.device_get(theirs.params), PARITY)


@pytest.mark.full
def test_results_have_no_leading_dimension_of_devices():
  p = program(model__depth=2)
  runner = strategy("pmap_ddp", p)
  state, batch = runner.init(seed=0), runner.shard(random_batch(p, 16), 16)
  metrics, gradients = runner.gradients(state, batch)
  sums = runner.eval_step(state, batch)
  state, more = runner.train_step(state, batch)
  for x, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(runner.abstract_state()), strict=True):
    assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
    assert x.is_fully_replicated
  assert all(x.shape == () for x in jax.tree.leaves((metrics, sums, more)))
  assert jax.tree.map(np.shape, gradients) == jax.tree.map(np.shape, state.params)


def test_pmap_refuses_an_abstract_mesh():
  runner = strategy("pmap_ddp", program())
  with one_sentence("strategy='pmap_ddp'", "data_parallel"):
    type(runner)(runner.runner, abstract_mesh(runner.layout))
