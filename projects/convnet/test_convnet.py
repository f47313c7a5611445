"""A model of flax modules, with statistics of batches, is trained as the Transformer is."""

import dataclasses
import os
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import laid_out, one_sentence, random_batch, strategy
from ml_collections import ConfigDict

import train
from projects.convnet.config import get_config
from strategies.layout import Layout
from training import settings
from training.module import ModuleProgram

TFDS = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
REFUSED = ("context", "long_context", "pipeline", "three_d")  # no positions, no equal blocks


def small() -> ConfigDict:
  config = get_config("tiny")
  config.update_from_flattened_dict({
    "model.inputs": "images", "model.objective": "class", "data.name": "synthetic", "model.image_size": 8,
    "model.channels": 3, "model.classes": 10, "own.widths": (8, 16), "data.augment": True,
  })  # fmt: skip
  return config


test_every_strategy = contract.equals_a_single_device(small, ("fsdp", *REFUSED), REFUSED)


def test_statistics_are_those_of_the_whole_batch():
  """Computed here once more by their definition, from all 16 images; a device has two of them."""
  config = small()
  config.data.augment = False
  program = settings.program(config, "cpu")
  runner = strategy("data_parallel", program)
  batch, state = random_batch(program, 16), runner.init(seed=0)
  kernel = np.asarray(state.params["stages"]["0"]["first"]["kernel"])
  after, _ = runner.train_step(state, runner.shard(batch, 16))
  x = jax.lax.conv_general_dilated(
    batch["image"] / np.float32(255), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  found = after.params["stages"]["0"]["first_norm"]
  np.testing.assert_allclose(found["mean"], 0.1 * x.mean(axis=(0, 1, 2)), rtol=1e-4)
  np.testing.assert_allclose(found["var"], 0.9 + 0.1 * x.var(axis=(0, 1, 2)), rtol=1e-4)


def test_rows_that_are_no_examples_are_refused():
  runner = strategy("data_parallel", settings.program(small(), "cpu"))
  with one_sentence("batch_size=20", "use 24"):
    runner.check_batch("batch_size", 20)
  runner.check_batch("eval_batch_size", 20)  # in evaluation, statistics do not change


def test_a_skipped_update_leaves_the_statistics():
  program = settings.program(small(), "cpu")
  params = jax.jit(program.init_params)(jax.random.key(0))
  new = jax.tree.map(lambda x: np.asarray(x) + 1, program.frozen(params))
  update = jax.jit(program.updated)
  kept, moved = (update(params, {"statistics": new}, jnp.bool_(finite)) for finite in (False, True))
  jax.tree.map(np.testing.assert_array_equal, kept, params)
  jax.tree.map(np.testing.assert_array_equal, program.frozen(moved), new)


class Wrong(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.dropout = nnx.Dropout(0.1, rngs=rngs)


@pytest.mark.parametrize("change, parts", [
  ({"module": lambda self, rngs: Wrong(rngs)}, ("dropout/rngs/count", "RngCount", "keys")),
  ({"dims_of": lambda self, name, shape: ("embed",)}, ("dims_of('head/kernel', (16, 10))", "('embed',)")),
  ({"dims_of": lambda self, name, shape: None}, ("dims_of('head/bias', (10,)) returns None", "a tuple")),
  ({"dims_of": lambda self, name, shape: ("width",) * len(shape)}, ("('width',)", "one of embed, heads, mlp")),
])  # fmt: skip
def test_an_error_names_the_parameter(change: dict, parts: tuple[str, ...]):
  program = settings.program(small(), "cpu")
  fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
  with one_sentence(*parts):
    type("Changed", (type(program),), change)(**fields).dims()


def test_an_axis_that_splits_nothing_of_the_model_is_refused():
  """Without `dims_of`, weights have `embed` alone, so with tensor parallelism all devices would do the same work."""
  program = settings.program(small(), "cpu")
  fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
  plain = type("Plain", (type(program),), {"dims_of": ModuleProgram.dims_of})(**fields)
  assert strategy("fsdp", plain).layout.shards("embed") == 8
  with one_sentence("mesh.model=8 splits nothing that this model has", "use mesh.model=1"):
    laid_out(Layout(mesh={"model": 8}, heads="model", mlp="model"), plain)


@pytest.mark.parametrize("values, part", [
  ({"loss": jnp.zeros(()), "accuracy": jnp.zeros(4)}, "an array (), but 'loss' must be there for each example, (4,)"),
  ({"loss": jnp.zeros(4)}, "only loss, but 'accuracy' must be there"),
])  # fmt: skip
def test_a_loss_that_is_not_one_of_each_example_is_refused(values: dict, part: str):
  """A mean over the batch would be taken for each example's loss, also of rows that are padding."""
  program = settings.program(small(), "cpu")
  fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
  changed = type("Changed", (type(program),), {"losses": lambda *_: values})(**fields)
  params = jax.eval_shape(changed.init_params, jax.random.key(0))
  with one_sentence(part):
    jax.eval_shape(lambda params, batch: changed.loss_sums(params, batch, None), params, random_batch(changed, 4))


@pytest.mark.parametrize("field, value, parts", [
  ("model.name", "nothing", ("model.name='nothing'", "convnet", "transformer")),
  ("project", "../tests", ("project='../tests'", "projects/")),
  ("project", "nothing", ("project='nothing'", "projects/")),
])  # fmt: skip
def test_an_unknown_model_or_project_is_named(field: str, value: str, parts: tuple[str, ...]):
  config = small()
  config.update_from_flattened_dict({field: value})
  with one_sentence(*parts):
    settings.program(config, "cpu")


def test_what_needs_a_transformer_says_so():
  program = settings.program(small(), "cpu")
  with one_sentence("model.name='convnet'", "use model.name='transformer'"):
    program.sizes.depth  # noqa: B018


@pytest.mark.full
@pytest.mark.skipif(not (TFDS / "cifar10").exists(), reason=f"the real CIFAR-10 is not prepared in {TFDS}")
def test_it_learns_cifar10_and_resumes_under_another_strategy(tmp_path: Path):
  config = get_config()
  config.own.widths, config.steps, config.stop_after, config.strategy = (16, 32), 150, 100, "fsdp"
  config.update(log_every=50, eval_every=0, eval_examples=1024, compilation_cache_dir="auto")
  first = train.train(config, tmp_path / "run")
  config.strategy, config.stop_after = "two_d", 0
  last = train.train(config, tmp_path / "run")
  assert first["accuracy"] > 0.2  # a guess has 0.1
  assert last["loss"] < first["loss"]
