"""Data, an objective and a strategy of one's own keep what all others keep."""

from pathlib import Path

import contract
import jax
import numpy as np
import pytest
from helpers import one_sentence
from ml_collections import ConfigDict

import data
import strategies
import train
from models.dimensions import UNSHARDED
from models.ops.loss import Targets
from projects.sounds import make
from projects.sounds.config import get_config
from training import settings

PAIRS = "projects.sounds.pairs"


def small(preset: str = "wave") -> ConfigDict:
  config = get_config(preset)
  config.own.examples = 100
  config.compilation_cache_dir = "auto"
  config.model.update(width=32, heads=8, kv_heads=8, mlp_width=64, features=make.BANDS, classes=3, outputs=2)
  return config


test_waves_under_every_strategy = contract.equals_a_single_device(small, (), own=(PAIRS,))
# A number in place of a class. It has nothing of its own that a strategy could treat in another way.
test_pitch_under_some_strategies = contract.equals_a_single_device(
  lambda: small("pitch"), (), names=("pmap_ddp", "fsdp", "two_d", "context", "pipeline")
)


def test_the_data_fit_the_model():
  config = small()
  dataset = data.load(config)
  program = settings.program(data.with_sizes(config, dataset.model), "cpu")
  data.check(config, dataset, program.fields())
  (part,) = dataset.parts
  assert (len(part.train), len(part.validation)) == (90, 10)
  features = part.train.read(np.arange(90))["features"]
  assert features.min() < 0 < features.max()  # numbers of any sign


def test_a_config_of_a_project_takes_a_mesh_axis_of_its_own_strategy():
  config = small()
  config.strategy, config.mesh.pair = PAIRS, 4
  runner = strategies.create(config, settings.program(config, "cpu"), jax.devices())
  assert dict(runner.layout.mesh) == {"data": 2, "pair": 4}


def test_the_second_likeliest_class_counts():
  head = settings.program(small(), "cpu").sizes.predicts
  logits = np.array([[3.0, 2.0, 1.0]] * 4, np.float32)
  targets = Targets(np.array([0, 1, 2, 0]), np.array([True, True, True, False]), None)
  score = lambda logits: type(head).loss_sums(_With(logits), None, None, targets, UNSHARDED, None)[1]
  sums = jax.jit(score)(logits)
  assert (int(sums["correct"]), int(sums["top_2"]), int(sums["count"])) == (1, 2, 3)


class _With:
  """An objective whose logits are given."""

  def __init__(self, logits: jax.Array):
    self.logits = lambda *_: logits


@pytest.mark.parametrize("content, parts", [
  (b"", ("data.path=", "make.py")), (None, ("data.path=", "holds features, but tones are features, label, target")),
])  # fmt: skip
def test_a_file_without_tones_is_named(content: bytes | None, parts: tuple[str, ...], tmp_path: Path):
  file, config = tmp_path / "tones.npz", small()
  np.savez(file, features=np.zeros(3)) if content is None else file.write_bytes(content)
  config.data.path = str(file)
  with one_sentence(*parts):
    data.load(config)


def test_a_strategy_that_is_no_file_of_a_project_is_named():
  config = small()
  config.strategy = "projects.sounds.make"
  with one_sentence("strategy='projects.sounds.make'"):
    strategies.layout_of(config.strategy)


@pytest.mark.full
def test_it_learns_what_a_wave_is_and_resumes_under_another_strategy(tmp_path: Path):
  config = get_config()
  config.own.examples, config.steps, config.stop_after, config.strategy = 2000, 150, 100, PAIRS
  config.data.path = str(tmp_path / "tones.npz")
  np.savez(config.data.path, **make.tones(2000))
  first = train.train(config, tmp_path / "run")
  config.strategy, config.stop_after = "fsdp", 0
  last = train.train(config, tmp_path / "run")
  assert last["loss"] < first["loss"] < 1.0
  assert 0.9 < last["accuracy"] <= last["top_2"]
