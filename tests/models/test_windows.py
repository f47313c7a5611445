"""Which layers are local, and that no model reads more positions than they see."""

import pytest
from helpers import model_sizes, one_sentence

from models.windows import local_layers, pattern_of

L, G = True, False


@pytest.mark.parametrize(
  "pattern, expected",
  [
    ("", [L, L, L, L, L]),
    ("local:2,global:1", [L, L, G, L, L]),  # ends within a period
    ("global:1,local:1", [G, L, G, L, G]),
    ("global:3,local:2", [G, G, G, L, L]),
    ("local:1,global:1,local:2,global:1", [L, G, L, L, G]),
  ],
)
def test_a_pattern_repeats_from_the_first_layer(pattern: str, expected: list[bool]):
  assert list(local_layers(pattern, 5)) == expected
  assert list(local_layers(pattern_of(expected), 5)) == expected


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"seq_len": 49, "window": 48}, ["model.seq_len=49", "window of 48 positions", "use at most 48"]),
    ({"window": -1}, ["model.window=-1", "use 0"]),
    ({"layers_pattern": "local:1"}, ["model.layers_pattern='local:1'", "set model.window"]),
    ({"window": 512, "layers_pattern": "local"}, ["'local'", "KIND:NUMBER"]),
    ({"window": 512, "layers_pattern": "near:1,global:1"}, ["'near:1'", "local or global"]),
    ({"window": 512, "layers_pattern": "local:0,global:1"}, ["'local:0'", "KIND:NUMBER"]),
    ({"window": 512, "layers_pattern": "local:2,global:1"}, ["for 3 layers", "model.depth=2", "at most 2"]),
    ({"window": 512, "layers_pattern": "global:2"}, ["'global:2'", "no local layer", "model.layers_pattern=''"]),
  ],
)
def test_a_window_that_is_none_gets_one_sentence(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    model_sizes(depth=2, **fields)


def test_a_model_may_read_as_many_positions_as_its_local_layers_see():
  sizes = model_sizes(depth=2, seq_len=48, window=48, layers_pattern="global:1,local:1")
  assert (sizes.window, sizes.layers_pattern) == (48, "global:1,local:1")
