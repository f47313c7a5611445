"""The average of the weights over steps: what it is, and that evaluation, resuming and every other reader use it."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, config, in_full, one_sentence, program, random_batch, strategy

import strategies
from checkpointing import initial, reading, record, restore
from checkpointing.save import Checkpoints
from training.loop import LoopState
from training.program import TrainState

DECAY, BATCH, STEPS = 0.5, 16, 3
SIZES = {"width": 32, "heads": 8, "kv_heads": 8, "mlp_width": 64, "seq_len": 16, "vocab_size": 64}
FIELDS = {f"model__{name}": size for name, size in SIZES.items()} | {"optimizer__ema": DECAY, "optimizer__warmup": 0}
FIELDS |= {"optimizer__name": "sgd"}  # Adam's first step is a sign, which the last bits of a small gradient decide
RUN = {
  "config": {"model": {}}, "strategy": "", "devices": 8, "processes": 1, "version": 1, "context": 16,
  "data": {"fingerprints": [], "turns": [], "tokenizer": "", "seed": 0, "batch_size": BATCH},
}  # fmt: skip


@functools.cache
def alone() -> tuple[strategies.Strategy, TrainState, list]:
  """A run on a single device."""
  runner = strategy("single", program(**FIELDS), devices=1)
  return runner, *trained(runner)


def trained(runner: strategies.Strategy) -> tuple[TrainState, list]:
  """The state after some steps, and the weights after each."""
  state = runner.init(seed=0)
  weights = [jax.device_get(state.params)]
  for step in range(STEPS):
    state, _ = runner.train_step(state, runner.shard(random_batch(runner.program, BATCH, seed=step), BATCH))
    weights.append(jax.device_get(runner.stored.cut(state.params)))
  return state, weights


def test_the_average_is_that_of_its_definition():
  _, state, weights = alone()
  mean = weights[0]
  for step, new in enumerate(weights[1:]):
    decay = min(DECAY, (1 + step) / (10 + step))
    mean = jax.tree.map(lambda mean, w, decay=decay: decay * mean + (1 - decay) * w, mean, new)
  assert_trees_close(jax.device_get(state.opt_state.ema), mean, PARITY)


@pytest.mark.parametrize("name, fields", in_full(
  [(name, {}) for name in strategies.names() if name != "single"] + [("fsdp", {"optimizer__on_host": True})],
  ("zero1", {}),
))  # fmt: skip
def test_every_strategy_keeps_and_evaluates_the_same_average(name: str, fields: dict):
  """zero1 keeps it in pieces, though it has whole weights. Other weights would give other sums."""
  found, ours = [], strategy(name, program(**FIELDS, **fields))
  for runner, state in ((ours, trained(ours)[0]), alone()[:2]):
    averaged = runner.averaged(state)
    batch = runner.shard(random_batch(runner.program, BATCH), BATCH)
    found.append(jax.device_get((runner.stored.cut(averaged.params), runner.eval_step(averaged, batch))))
    assert jax.tree.map(lambda x: x.sharding, averaged.params) == runner.state_sharding.params
  assert_trees_close(*found, PARITY)


def test_without_it_nothing_is_computed():
  runner = strategy("single", program(), devices=1)
  state = runner.init(seed=0)
  assert runner.averaged(state) is state


def test_readers_of_a_checkpoint_take_the_average_and_a_resumed_run_takes_both(tmp_path: Path):
  saver = strategy("zero1", program(**FIELDS))
  state, _ = trained(saver)
  with Checkpoints(tmp_path, 1, 0, lambda _: None, pytest.fail) as writer:
    writer.save(state, RUN, LoopState(STEPS))
  found, _ = restore.restore(tmp_path, strategy("fsdp", program(**FIELDS)).abstract_state(), RUN, pytest.fail)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(state))

  folder = tmp_path / str(STEPS)
  saved = reading.read_record(folder)
  assert saved is not None
  plain = strategy("single", program(**{name: x for name, x in FIELDS.items() if "ema" not in name}), devices=1)
  params = initial.read_params(folder, saved, plain.abstract_state().params, plain.program, "it")
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(state.opt_state.ema))
  assert record.array_of(saved, "head") == "opt_state/ema/head"


@pytest.mark.parametrize("before, after", [(0.0, 0.9), (0.9, 0.0), (0.9, 0.99)])
def test_a_resumed_run_may_change_the_decay_but_not_whether_there_is_an_average(before: float, after: float):
  fields = lambda ema: {"model": {}, "optimizer": {"ema": ema}, "data": {"on_change": "refuse"}}
  old, new = ({**RUN, "config": fields(ema)} for ema in (before, after))
  if before and after:
    record.check_same_run(old, new, "runs/a")
  else:
    with one_sentence(f"optimizer.ema was {before} and is now {after}"):
      record.check_same_run(old, new, "runs/a")


def test_a_skipped_update_leaves_the_average():
  p = program(**FIELDS)
  state = jax.jit(p.init)(jax.random.key(0))
  broken = jax.tree.map(lambda w: np.full(w.shape, np.nan, w.dtype), state.params)
  after, metrics = jax.jit(p.apply_gradients)(state, p.no_sums(0) | {"count": 1}, broken)
  assert metrics["skipped"]
  jax.tree.map(np.testing.assert_array_equal, after.opt_state.ema, state.opt_state.ema)


def test_a_decay_of_one_is_refused():
  with one_sentence("optimizer.ema=1.0"):
    config(optimizer__ema=1.0)
    program(optimizer__ema=1.0)
