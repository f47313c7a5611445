"""Prompts and completions in a run: the loss is that of the completions, written out by hand; and a run resumes."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, config, initial_state, measured, one_sentence, strategy
from ml_collections import ConfigDict

import data
import train
from data.batches import EvaluationBatches, HostBatch
from models.ops.loss import Targets
from models.parameters import bind
from reporting.evaluation.evaluator import Evaluator
from tools import evaluate
from training import settings
from training.program import Params, Program

LENGTH = 48  # predictions of a sequence
# Three of most examples fit into a sequence. A few have longer completions, and one a prompt of several sequences.
ROWS = [{"prompt": f"{i} + {i} = ", "completion": f"{2 * i}!" * (1 + (i % 9 == 0) * (i % 17))} for i in range(90)]
ROWS[40]["prompt"] = "add: " * 40 + ROWS[40]["prompt"]
SMALL = {
  "model__depth": 1, "model__width": 32, "model__seq_len": LENGTH, "model__vocab_size": 256, "log_every": 1,
  "sample_length": 0, "data__packing": "documents", "data__prompt_field": "prompt", "eval_examples": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The rows to train on, and those to validate on."""
  folder = tmp_path_factory.mktemp("rows")
  for name, some in (("train", ROWS[:80]), ("validation", ROWS[80:])):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
  return folder


def of(rows: Path, name: str = "fsdp", **fields: Any) -> ConfigDict:
  paths = {"data__path": str(rows / "train.jsonl"), "data__validation_path": str(rows / "validation.jsonl")}
  return config(name, **SMALL | paths | {"data__cache_dir": str(rows / "cache")} | fields)


def pieces(some: list[dict[str, str]]) -> tuple[np.ndarray, np.ndarray]:
  """The tokens of each example alone [P, LENGTH + 1], long ones in pieces, and which predictions count [P, LENGTH]."""
  tokens, counted = [], []
  for row in some:
    prompt, completion = row["prompt"].encode(), row["completion"].encode() + b"\0"
    for start in range(0, len(prompt + completion) - 1, LENGTH):
      piece = (prompt + completion)[start : start + LENGTH + 1]
      tokens.append([*piece, *[7] * (LENGTH + 1 - len(piece))])
      counted.append([len(prompt) <= start + i + 1 < start + len(piece) for i in range(LENGTH)])
  return np.array(tokens), np.array(counted)


def losses_alone(program: Program, params: Params, some: list[dict[str, str]]) -> jax.Array:
  """The loss of each token of a completion [P, LENGTH], from the logits of each example alone; 0 for other tokens."""
  tokens, counted = pieces(some)
  logits = bind(program.sizes, params)(tokens[:, :-1])
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
  return losses * counted


def written_out(program: Program, params: Params, some: list[dict[str, str]]) -> jax.Array:
  """The mean of these losses over the tokens of completions."""
  return jnp.sum(losses_alone(program, params, some)) / pieces(some)[1].sum()


@pytest.fixture(scope="module")
def whole(rows: Path) -> tuple[Program, HostBatch]:
  """A program, and all examples to train on as one batch."""
  c = of(rows)
  source = data.load(c).parts[0].train
  return settings.program(c, "cpu"), EvaluationBatches(source, len(source)).read(0)


def test_loss_and_gradients_are_those_of_the_completions_alone(whole: tuple[Program, HostBatch]):
  program, batch = whole
  assert len(batch["tokens"]) < len(pieces(ROWS[:80])[0]) / 1.5  # several examples in a sequence
  state = initial_state(strategy("single", program))
  metrics, gradients = jax.jit(lambda b: program.mean(*program.gradient_sums(state.params, b, state.step)))(batch)
  loss, expected = jax.jit(jax.value_and_grad(lambda params: written_out(program, params, ROWS[:80])))(state.params)
  assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
  assert_trees_close(gradients, expected, 1e-5)
  assert int(program.targets(batch).counted.sum()) == sum(len(row["completion"].encode()) + 1 for row in ROWS[:80])


def test_what_follows_within_a_prompt_does_not_matter(whole: tuple[Program, HostBatch]):
  program, batch = whole
  params, targets = initial_state(strategy("single", program)).params, program.targets(batch)

  @jax.jit
  def gradients(values: jax.Array) -> tuple[jax.Array, Params]:
    def loss(params: Params) -> jax.Array:
      given = Targets(values, targets.counted)
      inputs, segments = program.inputs(batch, None), program.segments(batch)
      return bind(program.sizes, params).loss_sums(inputs, given, segments=segments)[0]

    return jax.value_and_grad(loss)(params)

  expected, other = gradients(targets.values), (targets.values + 1) % 256
  jax.tree.map(np.testing.assert_array_equal, gradients(jnp.where(targets.counted, targets.values, other)), expected)
  assert float(gradients(other)[0]) != pytest.approx(float(expected[0]), rel=1e-3)


def test_an_evaluation_is_over_the_completions(rows: Path):
  """In all, and by the position in an example."""
  c = of(rows, eval_batch_size=8, eval_by_position=True)
  runner = strategy("fsdp", settings.program(c, "cpu"))
  evaluator, state = Evaluator(runner, data.load(c), c), initial_state(runner)
  found = evaluator(state)
  alone = jax.jit(lambda params: losses_alone(runner.program, params, ROWS[80:]))(jax.device_get(state.params))
  losses, counted = np.asarray(alone, np.float64), pieces(ROWS[80:])[1]
  mean = lambda columns: losses[:, columns].sum() / counted[:, columns].sum()
  expected = {"loss": mean(slice(None)), "bits_per_byte": mean(slice(None)) / math.log(2)}
  expected |= {f"loss_at/{last}": mean(slice(last // 2, last)) for last in (1, 2, 4, 8, 16, 32, 64)}
  assert found == pytest.approx(expected, rel=1e-5)
  assert evaluator.baseline() is None


@pytest.mark.full
def test_a_stopped_run_resumes_bit_for_bit_and_keeps_its_fields(
  rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """And the tool finds the loss that the run found."""
  monkeypatch.setattr(evaluate, "start_jax", lambda config: jax.devices())  # keeps the cache of conftest.py
  fields = {"steps": 6, "eval_every": 3, "accumulation": 2, "batch_size": 16}
  train.train(of(rows, **fields), tmp_path / "whole")
  for stop in (3, 0):
    train.train(of(rows, **fields, stop_after=stop), tmp_path / "run")
  assert measured(tmp_path / "run") == measured(tmp_path / "whole")

  text, file = [f"--data.path={rows / 'validation.jsonl'}", "--data.prompt_field=prompt"], tmp_path / "found.json"
  evaluate.main([str(tmp_path / "run"), *text, f"--data.cache_dir={rows / 'cache'}", f"--json={file}"])
  found, last = json.loads(file.read_text())["text"], measured(tmp_path / "run")[-1]
  assert (found["loss"], found["bits_per_byte"]) == pytest.approx((last["loss"], last["bits_per_byte"]), rel=1e-5)
  assert found["tokens"] == found["bytes"] == sum(len(row["completion"].encode()) + 1 for row in ROWS[80:])

  other = {"data__prompt_field": "completion", "data__completion_field": "prompt"}
  with one_sentence("data.prompt_field was 'prompt' and is now 'completion'", "name another workdir"):
    train.train(of(rows, **fields, **other), tmp_path / "run")
