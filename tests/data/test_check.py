"""Examples that do not fit the model are refused before anything is compiled; sizes that the data says are adopted."""

import itertools

import numpy as np
import pytest
from helpers import IMAGES, config, one_sentence

import data
from data.check import check_examples
from models.inputs import Field
from models.sizes import model_sizes

SHAPES = model_sizes(
  config(**IMAGES | {"model__image_size": 8, "model__channels": 1, "model__classes": 3})
).example_shapes()


def batch(**changed: np.ndarray) -> dict[str, np.ndarray]:
  fits = {"image": np.zeros((4, 8, 8, 1), np.uint8), "label": np.array([0, 1, 2, 0], np.int32)}
  return fits | changed


@pytest.mark.parametrize(
  "changed, said",
  [
    ({"image": np.ones((4, 8, 8, 1), np.float32)}, ("'image'", "float32[8, 8, 1]", "uint8[8, 8, 1]")),
    ({"image": np.ones((4, 28, 28, 1), np.uint8)}, ("uint8[28, 28, 1]", "uint8[8, 8, 1]")),
    ({"image": np.ones((4, 8, 8, 3), np.uint8)}, ("uint8[8, 8, 3]", "uint8[8, 8, 1]")),
    ({"label": np.array([0, 1, 3, 0], np.int32)}, ("'label'", "from 0 to 3", "0 to 2")),
    ({"label": np.array([0, -1, 1, 0], np.int32)}, ("'label'", "from -1 to 1")),
    ({"label": np.zeros(4, np.int64)}, ("'label'", "int64[]", "int32[]")),
  ],
)
def test_what_jax_would_not_refuse_is_refused(changed: dict, said: tuple[str, ...]):
  check_examples(batch(), SHAPES, "mine")
  with one_sentence("data.name='mine'", *said):
    check_examples(batch(**changed), SHAPES, "mine")


def test_features_of_any_finite_numbers_are_taken_and_others_refused():
  shapes = {"features": Field((4, 2), np.float32, None)}
  values = np.linspace(-4, 4, 24, dtype=np.float32).reshape(3, 4, 2)
  check_examples({"features": values}, shapes, "mine")
  for wrong in (np.nan, np.inf):
    values[1, 2, 0] = wrong
    with one_sentence("data.name='mine'", "'features'", "not finite", "leave these examples out"):
      check_examples({"features": values}, shapes, "mine")


def test_a_missing_field_is_refused():
  fields = batch()
  del fields["label"]
  with one_sentence("data.name='mine'", "no 'label'", "image"):
    check_examples(fields, SHAPES, "mine")


def test_sizes_of_the_data_are_adopted_and_conflicts_refused():
  c = config(**IMAGES | {"model__image_size": 0, "model__channels": 0, "model__classes": 0})
  given = c.to_dict()
  found = {"image_size": 28, "channels": 1, "classes": 10, "pixel_mean": (0.1,), "pixel_std": (0.3,)}
  c, before = data.with_sizes(c, found), c
  assert before.to_dict() == given  # unchanged
  assert (c.model.image_size, c.model.channels, c.model.classes, c.model.pixel_mean) == (28, 1, 10, (0.1,))
  c = data.with_sizes(
    c, {"image_size": 28, "classes": 7, "pixel_mean": (0.5,)}
  )  # allowed: more classes, and one's own mean
  assert (c.model.classes, c.model.pixel_mean) == (10, (0.1,))
  with one_sentence("model.image_size=28", "32"):
    data.with_sizes(c, {"image_size": 32})
  with one_sentence("model.classes=10", "100"):
    data.with_sizes(c, {"classes": 100})
  c = data.with_sizes(c, {"features": 8, "outputs": 2})
  for name, other in (("features", 6), ("outputs", 1)):
    with one_sentence(f"model.{name}={c.model[name]}", f"use {other}"):
      data.with_sizes(c, {name: other})


def test_a_loop_of_ones_own_gets_the_batches_of_a_run():
  c = config(data__name="synthetic", batch_size=4)
  whole = [batch["id"].tolist() for batch in itertools.islice(data.batches(c), 5)]
  assert [batch["id"].tolist() for batch in itertools.islice(data.batches(c, step=2), 3)] == whole[2:]
  expected = data.Batches(data.mixture(data.load(c)), 4, c.seed)
  assert [expected.read(step)["id"].tolist() for step in range(5)] == whole


@pytest.mark.parametrize("field", ["read_ahead", "threads"])
def test_reading_ahead_needs_at_least_one(field: str):
  with one_sentence(f"data.{field}=0", "at least 1"):
    data.load(config(data__name="synthetic", **{f"data__{field}": 0}))
