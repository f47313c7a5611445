"""The promises that any fork keeps, at their smallest: with texts, and with none of the options of a run.

tests/strategies/test_parity.py and tests/test_resume.py hold them for all variants. This file names no strategy, so a
fork with few of them runs it as it is.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, config, in_full, initial_state, program, random_batch, strategy

import strategies
import train
from reporting import metrics

STEPS, BATCH = 5, 16
SMALL = {"model__depth": 4, "model__mlp_width": 64, "model__seq_len": 16, "optimizer__eps": 1e-6, "steps": STEPS}
OTHERS = [name for name in strategies.names() if name != "single"]
FEW = OTHERS if len(OTHERS) < 6 else ["fsdp"]  # test_parity.py has all
RUN = SMALL | {"steps": 6, "log_every": 1, "eval_examples": 16, "eval_batch_size": 16, "sample_length": 0}


def trained(name: str) -> tuple[list[float], dict]:
  """The losses of some steps, and the weights after them."""
  runner = strategy(name, program(**SMALL))
  state, losses = initial_state(runner), []
  for step in range(STEPS):
    batch = random_batch(runner.program, BATCH, seed=step)
    state, found = runner.train_step(state, runner.shard(batch, BATCH))
    losses.append(float(found["loss"]))
  return losses, jax.device_get(state.params)


@pytest.mark.parametrize("name", in_full(FEW, "fsdp"))
def test_a_strategy_equals_a_single_device(name: str):
  (ours, weights), (theirs, expected) = trained(name), trained("single")
  np.testing.assert_allclose(ours, theirs, rtol=PARITY)
  assert_trees_close(weights, expected, 1e-4)


@pytest.mark.full
def test_a_run_goes_on_under_another_strategy(tmp_path: Path):
  """With the same losses as a run that was never stopped."""
  losses = lambda run: [
    line["loss"] for line in metrics.read(tmp_path / run / "metrics.jsonl") if line["split"] == "train"
  ]
  train.train(config("single", **RUN), tmp_path / "whole")
  train.train(config(OTHERS[0], **RUN, stop_after=3), tmp_path / "cut")
  train.train(config(OTHERS[-1], **RUN), tmp_path / "cut")
  np.testing.assert_allclose(losses("cut"), losses("whole"), rtol=PARITY)
