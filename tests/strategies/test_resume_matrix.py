"""Saving under one strategy and resuming under another, on any number of devices, gives the same batch and loss."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import PARITY, config, in_full, laid_out, placed, program, relative_difference, strategy, unpadded

import data
import strategies
from checkpointing import record, restore
from checkpointing.memory import recovery
from checkpointing.memory.tier import Tier
from checkpointing.save import Checkpoints
from data.synthetic import Synthetic
from errors import ConfigError
from runtime.storage.bucket import Folder
from strategies import Strategy, layout_of
from training.loop import LoopState
from training.program import Program, TrainState

BATCH = 16
STEP = 2  # the checkpoint's
CASES = [(name, n) for name in strategies.names() for n in (8, 4, 2, 1) if name != "single" or n == 1]
# With the compiler's sums, in stages, and twice on one device. Together they restore a checkpoint of every strategy.
SHORT = [("fsdp", 4), ("pipeline", 8), ("data_parallel", 1), ("expert_fsdp", 1)]
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


@pytest.mark.full
@pytest.mark.parametrize("devices", [8, 4])
def test_every_checkpoint_holds_the_same_bits(devices: int, saved: Callable[[str, int], Path]):
  state = uninterrupted()[0]
  expected = record.arrays(jax.device_put(state, runner("single", 1).state_sharding))
  cases = [case for case in CASES if case[1] == devices]
  cases.append(("single", 1))  # on one device, all strategies are the same
  for name, devices in cases:
    found, saved_record = restore.restore(saved(name, devices), runner("single", 1).abstract_state(), RUN, pytest.fail)
    assert saved_record["arrays"] == expected
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
      np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name, devices", in_full(CASES, *SHORT))
def test_a_run_resumes_from_a_checkpoint_of_any_strategy(name: str, devices: int, saved: Callable[[str, int], Path]):
  """Tests each pair of strategies on one number of devices. Checkpoints are equal, because what is restored is.

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


# Counts that divide neither the width, the vocabulary nor the depth: other layouts have other padding.
UNEVEN = [("fsdp", 6), ("zero1", 7), ("two_d", 6), ("pipeline", 6), ("fsdp", 3), ("single", 1)]
UNEVEN_MESHES = {"two_d": {"mesh__model": 3}, "pipeline": {"mesh__stage": 2}}


@functools.cache
def uneven(name: str, devices: int) -> Strategy:
  shape = {"width": 64, "heads": 6, "kv_heads": 6, "head_dim": 4, "mlp_width": 60, "vocab_size": 97, "depth": 5}
  sizes = {f"model__{field}": size for field, size in shape.items()} | {"model__seq_len": 12}
  return strategy(name, program(**sizes), devices, pipeline__microbatches=4, **UNEVEN_MESHES.get(name, {}))


def uneven_run(strategy: Strategy) -> dict[str, Any]:
  return RUN | {"shapes": record.shapes(strategy.shapes)}


@functools.cache
def random_state() -> TrainState:
  """A state without padding."""
  random = np.random.default_rng(0)
  draw = lambda x: random.normal(size=x.shape).astype(x.dtype) if x.ndim else np.full((), STEP, x.dtype)
  return jax.tree.map(draw, uneven("single", 1).shapes)


def check_equal(state: TrainState, strategy: Strategy) -> None:
  jax.tree.map(np.testing.assert_array_equal, unpadded(state, strategy.shapes), random_state())
  assert jax.tree.map(lambda x: x.sharding, state) == strategy.state_sharding


def write(strategy: Strategy, folder: Path) -> None:
  with Checkpoints(folder, 1, 0, lambda _: None, pytest.fail) as writer:
    writer.save(placed(random_state(), strategy), uneven_run(strategy), LoopState(STEP))


@pytest.mark.full
def test_checkpoints_have_no_padding_that_another_count_of_devices_could_see(tmp_path: Path):
  """Records are equal: true shapes, and digests without padding. What is damaged is found."""
  expected = record.arrays(placed(random_state(), uneven("single", 1)))
  for name, devices in UNEVEN:
    folder = tmp_path / f"{name}-{devices}"
    write(uneven(name, devices), folder)
    for other in UNEVEN:
      strategy = uneven(*other)
      found, saved = restore.restore(folder, strategy.abstract_state(), uneven_run(strategy), pytest.fail)
      check_equal(found, strategy)
      assert saved["arrays"] == expected
      assert "shapes" not in saved
  one_less = uneven(*UNEVEN[-1])
  shapes = record.shapes(one_less.shapes) | {"params/embedding": [98, 64]}
  with pytest.raises(
    ConfigError, match=r"params/embedding is float32\[97, 64\] in the checkpoint and float32\[98, 64\]"
  ):
    restore.restore(folder, one_less.abstract_state(), RUN | {"shapes": shapes}, pytest.fail)


@pytest.mark.full
def test_memory_and_buckets_go_from_one_count_of_devices_to_another(in_memory: Folder, tmp_path: Path):
  saver = uneven("fsdp", 6)
  (tmp_path / "run").mkdir()
  asked = config(checkpoint__memory_every=1, checkpoint__memory_dir=str(tmp_path / "memory"))
  tier = lambda: Tier(asked, tmp_path / "run", pytest.fail)
  ours = tier()
  ours.prepare(record.named(saver.abstract_state()))
  ours.save(placed(random_state(), saver), uneven_run(saver), LoopState(STEP, False))
  ours.wait()
  write(saver, tmp_path / "local")
  step = tmp_path / "local" / str(STEP)
  (in_memory / str(STEP)).upload(step, [str(file.relative_to(step)) for file in step.rglob("*") if file.is_file()])
  for name, devices in UNEVEN:
    strategy = uneven(name, devices)
    found, _ = recovery.restore(tier(), strategy.abstract_state(), uneven_run(strategy), -1, pytest.fail)
    check_equal(found, strategy)
    found, _ = restore.restore(in_memory, strategy.abstract_state(), uneven_run(strategy), pytest.fail)
    check_equal(found, strategy)
