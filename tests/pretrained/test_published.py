"""The config.json files of published models, as they are: each is read, and means the model that was published."""

import math
from pathlib import Path

import pytest
from helpers import config

import pretrained
from analysis.weights import weights
from tools import explain
from training import settings

FOLDER = Path(__file__).parent / "published"
# Parameters, as the makers and the files' own indices say. A tied embedding counts once.
PARAMETERS = {
  "Llama-2-7b-hf": 6_738_415_616,
  "Llama-3.1-8B": 8_030_261_248,
  "Llama-3.2-1B": 1_235_814_400,
  "SmolLM2-135M": 134_515_008,
  "Mistral-7B-v0.1": 7_241_732_096,
  "Mistral-7B-v0.3": 7_248_023_552,
  "Qwen2.5-0.5B": 494_032_768,
  "Qwen2.5-7B": 7_615_616_512,
  "Qwen3-0.6B": 596_049_920,
  "Qwen3-8B": 8_190_735_360,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_means_the_published_model(name: str):
  adopted = pretrained.adopt(config("fsdp", init_from=str(FOLDER / name)))
  sizes = settings.program(adopted, "cpu").sizes
  assert sum(math.prod(weight.shape) for weight in weights(sizes)) == PARAMETERS[name]
  assert pretrained.Folder(adopted.init_from).shape.window == (4096 if name == "Mistral-7B-v0.1" else None)


def test_a_model_is_explained_from_its_config_alone():
  """Without weights. Sizes are those of the folder, and the step is lowered."""
  runner = explain.create(
    config("fsdp", init_from=str(FOLDER / "SmolLM2-135M"), batch_size=8, data__name="synthetic"), None
  )
  assert "tensor<49152x576xf32>" in runner.lower_train_step(8).as_text()
