"""Which implementation of attention a model gets on a platform, and why."""

import pytest
from helpers import IMAGES, config, one_sentence

from models.ops import attention
from models.sizes import model_sizes

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
    ("gpu", {"model__head_dim": 192}, "plain", "model.head_dim=192"),
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
    ("gpu", {"model__attention": "cudnn", "model__head_dim": 256}, ["model.attention='cudnn'", "model.head_dim=256"]),
    ("tpu", {"model__attention": "splash", "model__seq_len": 100}, ["model.attention='splash'", "128", "100"]),
  ],
)
def test_an_implementation_that_does_not_fit_is_refused(platform: str, fields: dict, parts: list[str]):
  with one_sentence(*parts):
    attention.choose(model_sizes(config(**TEXT | fields), platform), platform)
