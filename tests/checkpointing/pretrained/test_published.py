"""The config.json files of published models: each is read, and means the model that was published.

Those of mixtures were written by hand, from the sizes that are published; the others are as they were published.
"""

import math
from pathlib import Path

import pytest
from helpers import config, one_sentence

from checkpointing import pretrained
from lab.analysis.weights import weights
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
  "Mixtral-8x7B-v0.1": 46_702_792_704,
  "Mixtral-8x22B-v0.1": 140_620_634_112,
  "Qwen3-30B-A3B": 30_532_122_624,
  "Qwen3-235B-A22B": 235_093_634_560,
}
# Billions of parameters that work on a token, as the makers say.
ACTIVE = {"Mixtral-8x7B-v0.1": 12.9, "Mixtral-8x22B-v0.1": 39, "Qwen3-30B-A3B": 3.3, "Qwen3-235B-A22B": 22}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_means_the_published_model(name: str):
  adopted = pretrained.adopt(config("fsdp", init_from=str(FOLDER / name)))
  sizes = settings.program(adopted, "cpu").sizes
  assert sum(math.prod(weight.shape) for weight in weights(sizes)) == PARAMETERS[name]
  assert sizes.window == (4096 if name == "Mistral-7B-v0.1" else 0)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_published_mixture_uses_as_many_weights_for_a_token(name: str):
  sizes = settings.program(pretrained.adopt(config("fsdp", init_from=str(FOLDER / name))), "cpu").sizes
  idle = 1 - sizes.experts.per_token / sizes.experts.count
  active = sum(math.prod(w.shape) * (1 - idle * ("experts" in w.dims)) for w in weights(sizes))
  assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


def test_latent_attention_is_refused():
  with one_sentence("config.json of init_from=", "deepseek_v2", "multi-head latent attention"):
    pretrained.adopt(config("fsdp", init_from=str(FOLDER / "DeepSeek-V2-Lite")))


def test_a_model_is_explained_from_its_config_alone():
  """Without weights. Sizes are those of the folder, and the step is lowered."""
  runner = explain.create(
    config("fsdp", init_from=str(FOLDER / "SmolLM2-135M"), batch_size=8, data__name="synthetic"), None
  )
  assert "tensor<49152x576xf32>" in runner.lower_train_step(8).as_text()
