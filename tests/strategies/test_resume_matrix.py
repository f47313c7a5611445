"""Saving under one strategy and resuming under another, on any number of devices, gives the same batch and loss."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import PARITY, in_full, laid_out, program, relative_difference, strategy

import data
import strategies
from checkpointing import record, restore
from checkpointing.save import Checkpoints
from data.synthetic import Synthetic
from strategies import Strategy, layout_of
from training.loop import LoopState
from training.program import Program, TrainState

BATCH = 16
STEP = 2  # the checkpoint's
CASES = [(name, n) for name in strategies.names() for n in (8, 4, 2, 1) if name != "single" or n == 1]
# With the compiler's sums and in stages. A first test shows that the checkpoints of all strategies hold the same bits.
SHORT = [("single", 1), ("fsdp", 4), ("pipeline", 8)]
# Every case restores checkpoints. In these a step follows: each strategy has one, and each number of devices has some.
STEPPING = [("single", 1), *((name, (2, 4, 8)[i % 3]) for i, name in enumerate(strategies.names()) if name != "single")]
SAVED_ON = {name: 1 if name == "single" else 8 for name in strategies.names()}
# Meshes where a strategy's default does not fit so few devices.
MESHES = {("pipeline", 2): {"mesh__stage": 2}, ("three_d", 2): {"mesh__model": 1}}
RUN = {
  "config": {"model": {}}, "strategy": "", "devices": 8, "processes": 1,
  "data": {"fingerprints": [], "turns": [], "tokenizer": "", "seed": 0, "batch_size": BATCH},
}  # fmt: skip


@functools.cache
def small(**fields: Any) -> Program:
  shape = {"width": 32, "heads": 8, "kv_heads": 8, "mlp_width": 64, "seq_len": 16, "vocab_size": 64}
  return program(**{f"model__{name}": size for name, size in shape.items()}, model__dropout=0.1, **fields)


def runner(name: str, devices: int) -> Strategy:
  """The strategy; on four devices, with the optimizer's state in the host's memory where it can."""
  fields = MESHES.get((name, devices), {})
  if devices > 1:
    fields = fields | {"pipeline__microbatches": 4, "pipeline__chunks": 1}
  return strategy(name, small(optimizer__on_host=devices == 4 and name != "pmap_ddp"), devices, **fields)


def batches() -> data.Batches:
  return data.Batches(data.Mixture((Synthetic(small().sizes, 0, 1000),)), BATCH, seed=0)


def next_step(strategy: Strategy, state: TrainState, step: int) -> tuple[TrainState, np.ndarray, float]:
  """The state after a step, the ids of its examples in order, and its loss."""
  batch = strategy.shard(batches().read(step, strategy.rows(BATCH)), BATCH)
  ids = np.asarray(batch["id"]).ravel()
  state, metrics = strategy.train_step(state, batch)
  return state, ids, float(metrics["loss"])


@functools.cache
def uninterrupted() -> tuple[TrainState, np.ndarray, float]:
  """A run on one device without checkpoints: its state after STEP steps, and the ids and loss of the next step."""
  single = runner("single", 1)
  state = single.init(seed=0)
  for step in range(STEP):
    state, _, _ = next_step(single, state, step)
  kept = jax.device_get(state)
  return kept, *next_step(single, state, STEP)[1:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
  """Returns the folder of a checkpoint written under a strategy on a number of devices."""

  @functools.cache
  def folder(name: str, devices: int) -> Path:
    laid_out = jax.device_put(uninterrupted()[0], runner(name, devices).state_sharding)
    place = tmp_path_factory.mktemp(f"{name}-{devices}")
    with Checkpoints(place, 1, 0, lambda _: None, pytest.fail) as writer:
      writer.save(laid_out, RUN, LoopState(STEP))
    return place

  return folder


@pytest.mark.parametrize("devices", in_full([8, 4], 8))
def test_every_checkpoint_holds_the_same_bits(devices: int, saved: Callable[[str, int], Path]):
  state = uninterrupted()[0]
  expected = record.arrays(jax.device_put(state, runner("single", 1).state_sharding))
  cases = [case for case in CASES if case[1] == devices] + [("single", 1)]  # on one device, all strategies are the same
  for name, devices in cases:
    found, saved_record = restore.restore(saved(name, devices), runner("single", 1).abstract_state(), RUN, pytest.fail)
    assert saved_record["arrays"] == expected
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
      np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name, devices", in_full(CASES, *SHORT))
def test_a_run_resumes_from_a_checkpoint_of_any_strategy(name: str, devices: int, saved: Callable[[str, int], Path]):
  """Tests each pair of strategies on one number of devices. The test above shows that all checkpoints are equal.

  From the same bits a strategy makes the same next step on any number of devices, so one number is enough for it.
  """
  strategy, names = runner(name, devices), strategies.names()
  expected, ids, loss = uninterrupted()
  counts = [n for other, n in CASES if other == name]
  for saver in names[(names.index(name) + counts.index(devices)) % len(counts) :: len(counts)]:
    state, saved_record = restore.restore(saved(saver, SAVED_ON[saver]), strategy.abstract_state(), RUN, pytest.fail)
    for x, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(strategy.abstract_state()), strict=True):
      assert x.sharding == abstract.sharding
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)}
    assert ("pinned_host" in kinds) == strategy.program.optimizer.on_host
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), expected)
    if (name, devices) not in STEPPING:
      continue
    _, found_ids, found_loss = next_step(strategy, state, saved_record["loop"]["step"])
    np.testing.assert_array_equal(found_ids, ids)
    assert relative_difference(found_loss, loss) <= PARITY


def test_moments_of_rows_and_columns_resume_under_another_strategy(tmp_path: Path):
  """The same bits, in the pieces of the new layout. In bfloat16, and no array has the shape of its weight."""
  trained = small(optimizer__name="adafactor", optimizer__moments="bfloat16")
  saver = strategy("fsdp", trained)
  random = np.random.default_rng(0)
  draw = lambda x: random.normal(size=x.shape).astype(x.dtype) if x.ndim else np.ones((), x.dtype)
  state = jax.tree.map(draw, saver.abstract_state())
  with Checkpoints(tmp_path, 1, 0, lambda _: None, pytest.fail) as writer:
    writer.save(jax.device_put(state, saver.state_sharding), RUN, LoopState(STEP))
  for resumed in (strategy("three_d", trained), strategy("single", trained, devices=1)):
    found, _ = restore.restore(tmp_path, resumed.abstract_state(), RUN, pytest.fail)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), state)
    assert jax.tree.map(lambda x: x.sharding, found) == resumed.state_sharding
  moments = saver.abstract_state().opt_state[0].moments["blocks"]["mlp"]["down"]
  assert [moments[side].sharding.spec for side in ("rows", "columns")] == [jax.P(None, None), jax.P(None, "data")]


# A checkpoint of a mixture, saved where eight devices share the experts, goes on under these layouts.
EXPERT = layout_of("expert")
RESUMED = {
  "single": layout_of("single"),
  "expert and data": (layout_of("data_parallel") | EXPERT).on(data=4, expert=2),
  "expert_fsdp": layout_of("expert_fsdp").on(data=1, expert=4),
  "fsdp": layout_of("fsdp").on(data=8),
  "two_d": layout_of("two_d").on(data=2, model=2),
  "pipeline": (layout_of("pipeline") | EXPERT).on(stage=2, data=2, expert=2),
}


@functools.cache
def mixture() -> Program:
  """With biases that follow the loads, moments of matrices, and experts of both kinds."""
  fields = {"experts": 8, "expert_width": 32, "shared_experts": 1, "router": "sigmoid_bias", "router_bias_rate": 0.01}
  return small(optimizer__name="muon", **{f"model__{name}": value for name, value in fields.items()})


@pytest.fixture(scope="module")
def saved_mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState, np.ndarray, float]:
  """The folder of a checkpoint, its state, and the ids and loss of the run's next step."""
  runner, place = laid_out(EXPERT.on(expert=8), mixture()), tmp_path_factory.mktemp("mixture")
  state = runner.init(seed=0)
  for step in range(STEP):
    state, _, _ = next_step(runner, state, step)
  with Checkpoints(place, 1, 0, lambda _: None, pytest.fail) as writer:
    writer.save(state, RUN, LoopState(STEP))
  kept = jax.device_get(state)
  return place, kept, *next_step(runner, state, STEP)[1:]


@pytest.mark.full
@pytest.mark.parametrize("name", RESUMED)
def test_a_mixture_resumes_where_other_devices_share_its_experts(name: str, saved_mixture: tuple):
  """The same bits, the biases of routers among them; then the exact next batch, and its loss."""
  folder, expected, ids, loss = saved_mixture
  runner = laid_out(RESUMED[name], mixture(), pipeline__microbatches=2)
  state, found = restore.restore(folder, runner.abstract_state(), RUN, pytest.fail)
  assert jax.tree.map(lambda x: x.sharding, state) == runner.state_sharding
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), expected)
  assert np.unique(expected.params["blocks"]["mlp"]["bias"]).size > 1
  _, found_ids, found_loss = next_step(runner, state, found["loop"]["step"])
  np.testing.assert_array_equal(found_ids, ids)
  assert relative_difference(found_loss, loss) <= PARITY
