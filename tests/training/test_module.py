"""The model that docs/fork.md shows is what the page says of it, as somebody would write it."""

import importlib
import re
import textwrap
from pathlib import Path

import contract
import jax
import pytest
from helpers import ROOT, one_sentence

import projects
import strategies
from training import settings


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """The blocks of code of the page; the project of the first is there, as `projects.mine`."""
  code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "fork.md").read_text(), re.DOTALL)
  model, config = (next(text for text in code if part in text) for part in ("class Mine", "def get_config"))
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "__init__.py").write_text(model)
  (tmp_path / "mine" / "config.py").write_text(textwrap.dedent(config))
  monkeypatch.setattr(projects, "__path__", [*projects.__path__, str(tmp_path)])
  monkeypatch.setattr(settings, "PROGRAMS", {**settings.PROGRAMS})
  return code


def test_the_model_of_the_page_equals_a_single_device(page: list[str]):
  get_config = importlib.import_module("projects.mine.config").get_config
  config = get_config()
  assert (config.own.hidden, config.model.name) == (64, "mine")
  test = contract.equals_a_single_device(get_config, ())
  for name in ("fsdp", "tensor_parallel", "expert_fsdp", "pipeline"):  # devices divide no side of the second weight
    test(name)
  config.strategy = "pipeline"
  with one_sentence("mesh.stage=4", "splits nothing that this model has"):
    strategies.create(config, settings.program(config, "cpu"), jax.devices())
