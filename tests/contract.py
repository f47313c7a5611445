"""What every program must keep under every strategy, whatever its model. A project's tests take it in one line each."""

import functools
from collections.abc import Callable, Collection

import jax
import numpy as np
import pytest
from helpers import PARITY, assert_trees_close, in_full, placed, random_batch, strategy, unpadded
from ml_collections import ConfigDict

import strategies
from errors import ConfigError
from training import settings
from training.program import Params, Sums, TrainState

BATCH = 16
Found = tuple[float, Params, Params, Sums]


def equals_a_single_device(
  config: Callable[[], ConfigDict],
  in_each: Collection[str],
  refused: Collection[str] | None = None,
  own: Collection[str] = (),
  names: Collection[str] = (),
) -> Callable[[str], None]:
  """A test of each strategy: gradients, a step and an evaluation equal a single device's, or one sentence refuses it.

  Args:
    config: makes a small config of the program.
    in_each: the strategies that `make test` runs; `make test-all` runs all.
    refused: the strategies that cannot run it; None: whichever say so in one sentence.
    own: strategies of the project.
    names: the strategies, if not all.
  """

  @functools.cache
  def found(name: str, parts: int, gather: str = "part") -> Found:
    changed = config()
    changed.accumulation, changed.gather = parts, gather
    changed.optimizer.name = "sgd"  # Adam makes a step of the last bits of a gradient that is almost zero
    runner = strategy(name, settings.program(changed, "cpu"), devices=1 if name == "single" else 8)
    batch = runner.shard(random_batch(runner.program, BATCH), BATCH)
    # The first way also tests how a strategy makes the state, and evaluates.
    state = runner.init(seed=1) if parts == 1 else placed(start(), runner)
    metrics, gradients = runner.gradients(state, batch)
    gradients = unpadded(gradients, runner.program.trained(runner.shapes.params))
    sums = jax.device_get(runner.eval_step(state, batch)) if parts == 1 else {}
    after = unpadded(runner.train_step(state, batch)[0].params, runner.shapes.params)
    return float(metrics["loss"]), gradients, after, sums

  @functools.cache
  def start() -> TrainState:
    """The initial state, as a single device makes it."""
    changed = config()
    changed.optimizer.name = "sgd"
    return jax.device_get(strategy("single", settings.program(changed, "cpu"), devices=1).init(seed=1))

  def refusal(name: str) -> str:
    """Why a strategy refuses the program; "" if it does not."""
    try:
      found(name, 1)
    except ConfigError as error:
      return str(error)
    return ""

  cases = names or [name for name in (*strategies.names(), *own) if name != "single"]

  @pytest.mark.parametrize("name", in_full(cases, *in_each))
  def test(name: str) -> None:
    why = refusal(name) if refused is None or name in refused else ""
    if why or (refused and name in refused):
      assert "; use" in why
      assert "\n" not in why
      return
    # Weights are gathered by the compiler, or by hand: for each part of the batch, or once a step.
    for way in ((1, "part"), (2, "part"), (2, "step")):
      if way[1] == "step" and strategies.layout_of(name).shards("embed") == 1:
        continue
      (loss, gradients, after, sums), expected = found(name, *way), found("single", way[0])
      assert loss == pytest.approx(expected[0], rel=PARITY)
      assert_trees_close(gradients, expected[1], PARITY)
      assert_trees_close(after, expected[2], PARITY)
      for measure, value in sums.items():
        np.testing.assert_allclose(value, expected[3][measure], rtol=PARITY, err_msg=measure)

  return test
