"""Which implementation of attention a model gets on a platform, and why."""

import dataclasses
import types
from typing import Any

import pytest
from helpers import IMAGES, config, one_sentence

import strategies
from models.ops import attention
from models.sizes import model_sizes
from strategies.execution.choice import on_device

TEXT = {"model__width": 512, "model__seq_len": 256}


def chosen(platform: str, **fields: object) -> attention.Choice:
  return attention.choose(model_sizes(config(**TEXT | fields), platform), platform)


@pytest.mark.parametrize(
  "platform, fields, name, why",
  [
    ("cpu", {}, "blockwise", ""),
    ("gpu", {}, "cudnn", ""),
    ("gpu", {"model__seq_len": 255, "data__packing": "documents"}, "cudnn", ""),
    ("gpu", {"model__dtype": "float32"}, "plain", "model.dtype='float32'"),
    ("gpu", {"model__head_dim": 256}, "cudnn", ""),
    ("gpu", {"model__head_dim": 512}, "plain", "model.head_dim=512"),
    ("gpu", {"model__window": 8, "model__layers_pattern": "local:1,global:1"}, "cudnn", ""),
    ("gpu", {**IMAGES, "model__window": 8}, "plain", "windows with a causal mask only"),
    ("tpu", {}, "splash", ""),
    ("tpu", {"model__seq_len": 1000, "model__head_dim": 48, "data__packing": "documents"}, "splash", ""),
    ("tpu", IMAGES, "plain", "sees 64"),
  ],
)
def test_auto_picks_the_best_that_fits_and_says_why_not(platform: str, fields: dict, name: str, why: str):
  found = chosen(platform, **fields)
  assert found.name == name
  assert bool(found.why) == bool(why)
  assert why in found.why


@pytest.mark.parametrize(
  "platform, fields, parts",
  [
    ("cpu", {"model__attention": "cudnn"}, ["model.attention='cudnn'", "NVIDIA GPU", "'cpu'", "'auto'"]),
    ("gpu", {"model__attention": "splash"}, ["model.attention='splash'", "TPU", "'gpu'"]),
    ("gpu", {"model__attention": "cudnn", "model__dtype": "float32"}, ["model.attention='cudnn'", "'float32'"]),
    ("gpu", {"model__attention": "cudnn", "model__head_dim": 512}, ["model.attention='cudnn'", "model.head_dim=512"]),
    ("tpu", {"model__attention": "splash", "model__seq_len": 100}, ["model.attention='splash'", "128", "100"]),
  ],
)
def test_an_implementation_that_does_not_fit_is_refused(platform: str, fields: dict, parts: list[str]):
  with one_sentence(*parts):
    attention.choose(model_sizes(config(**TEXT | fields), platform), platform)


@pytest.mark.parametrize(
  "capability, head, name", [("8.0", 128, "cudnn"), ("8.9", 192, "plain"), ("9.0", 192, "cudnn")]
)
def test_gpus_before_h100_have_smaller_heads(capability: str, head: int, name: str):
  sizes = dataclasses.replace(model_sizes(config(**TEXT, model__head_dim=head), "gpu"), attention="cudnn")
  device: Any = types.SimpleNamespace(device_kind="a GPU", platform="gpu", compute_capability=capability)
  found = on_device(sizes, strategies.layout_of("single"), device)
  assert found.attention == name
  assert ("at most 128 on a GPU, and model.head_dim=192" in found.attention_why) == (name == "plain")
