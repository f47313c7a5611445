"""The model that docs/fork.md shows is what the page says of it, as somebody would write it."""

import importlib
import re
import sys
import textwrap
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import pytest
from helpers import ROOT, one_sentence

import projects
import strategies
from training import counting, settings


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """The blocks of code of the page; the project of the first is there, as `projects.mine`."""
  code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "fork.md").read_text(), re.DOTALL)
  model, config = (next(text for text in code if part in text) for part in ("class Mine", "def get_config"))
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "__init__.py").write_text(model)
  (tmp_path / "mine" / "config.py").write_text(textwrap.dedent(config))
  for name in ("projects.mine", "projects.mine.config"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.setattr(projects, "__path__", [*projects.__path__, str(tmp_path)])
  monkeypatch.setattr(settings, "PROGRAMS", {**settings.PROGRAMS})
  return code


def test_the_model_of_the_page_equals_a_single_device(page: list[str]):
  get_config = importlib.import_module("projects.mine.config").get_config
  config = get_config()
  assert (config.own.hidden, config.model.name) == (64, "mine")
  test = contract.equals_a_single_device(get_config, ())
  for name in ("tensor_parallel", "expert_fsdp"):  # devices do not divide one side of the second weight
    test(name)
  config.strategy = "pipeline"
  with one_sentence("mesh.stage=4", "splits nothing that this model has"):
    strategies.create(config, settings.program(config, "cpu"), jax.devices())


def test_flops_are_those_of_the_products(page: list[str]):
  """The second product has two gradients, the first one has none of its input."""
  config = importlib.import_module("projects.mine.config").get_config()
  first, second = 32 * 64, 64 * 2
  assert settings.program(config, "cpu").flops()[0] == 2 * (2 * first + 3 * second)


def test_a_scan_and_a_convolution_are_counted():
  def run(x: jax.Array, w: jax.Array) -> jax.Array:  # 5 products [2, 8] × [8, 8], then kernels 3 of 1 to 4 features
    x, _ = jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)
    return jax.lax.conv(x[:, None], jnp.ones((4, 1, 3)), (1,), "SAME")

  counted = counting.flops(jax.make_jaxpr(run)(jnp.ones((2, 8)), jnp.ones((8, 8))))
  assert counted == 2 * (5 * 2 * 8 * 8 + 2 * 4 * 8 * 3)
