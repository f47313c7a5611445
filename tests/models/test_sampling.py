"""How the next token is chosen, compared with a plain computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import one_sentence

from models.generate import Sampling, choose_token

LOGITS = np.log([0.05, 0.4, 0.1, 0.25, 0.2]).astype(np.float32)
COUNT = 4000


def shares(seen: tuple[int, ...] = (), **fields: float) -> np.ndarray:
  """How often each token is drawn."""
  held = np.tile(np.isin(np.arange(5), seen), (COUNT, 1))

  @jax.jit
  def draw() -> jax.Array:
    keys = jax.random.split(jax.random.key(0), COUNT)
    return choose_token(jnp.tile(LOGITS, (COUNT, 1)), Sampling(**fields), held, keys)

  return np.bincount(draw(), minlength=5) / COUNT


@pytest.mark.parametrize(
  "fields, expected",
  [
    ({}, [0.05, 0.4, 0.1, 0.25, 0.2]),
    ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
    ({"temperature": 0.5}, np.square([0.05, 0.4, 0.1, 0.25, 0.2]) / 0.275),
    ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    ({"top_k": 9}, [0.05, 0.4, 0.1, 0.25, 0.2]),
    ({"top_p": 0.39}, [0, 1, 0, 0, 0]),
    ({"top_p": 0.41}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    ({"top_p": 0.01}, [0, 1, 0, 0, 0]),
    # Of the three most likely, those whose probabilities make 0.7: 0.47 and 0.29 of them.
    ({"top_k": 3, "top_p": 0.7}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
  ],
)
def test_tokens_are_drawn_as_often_as_they_should(fields: dict, expected: list[float]):
  found = shares(**fields)
  np.testing.assert_allclose(found, expected, atol=0.03)
  assert ((found > 0) == (np.array(expected) > 0)).all()


def test_tokens_of_the_text_become_less_likely():
  """The logits of 1 and 3 are negative, so they are doubled: probabilities are squared before they are scaled."""
  weights = np.array([0.05, 0.4**2, 0.1, 0.25**2, 0.2])
  np.testing.assert_allclose(shares(seen=(1, 3), repetition_penalty=2.0), weights / weights.sum(), atol=0.03)
  greedy = jax.jit(lambda *given: choose_token(given[0], Sampling(2.0, 0.0), given[1], jax.random.key(0)[None]))
  assert greedy(np.float32([[2.0, 1.5]]), np.array([[True, False]])).tolist() == [1]


@pytest.mark.parametrize(
  "fields, parts",
  [
    ({"temperature": -1.0}, ["temperature=-1.0", "use 0"]),
    ({"top_k": -1}, ["top_k=-1"]),
    ({"top_p": 0.0}, ["top_p=0.0", "use 1"]),
    ({"top_p": 1.5}, ["top_p=1.5"]),
    ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0", "use 1"]),
  ],
)
def test_values_that_make_no_sense_get_one_sentence(fields: dict, parts: list[str]):
  with one_sentence(*parts):
    Sampling(**fields).check()
