"""Shared by the tests of checkpointing/pretrained/: the golden model folders, and what is loaded from them."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from helpers import config, strategy

from checkpointing import pretrained
from checkpointing.pretrained.tensors import by_name, tensors, whole
from models.sizes import ModelSizes
from strategies import Strategy
from training import settings
from training.program import Params, Program

FOLDER = Path(__file__).parent / "golden/pretrained"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/expected.npz"))


@functools.cache
def program_of(name: str) -> Program:
  """For a golden folder, and sequences of 39 tokens."""
  return settings.program(pretrained.adopt(config(init_from=str(FOLDER / name), model__seq_len=48)), "cpu")


def loaded(name: str, under: str = "single") -> tuple[Strategy, Params]:
  """A strategy for the model of a golden folder, and its weights in this layout."""
  runner = strategy(under, program_of(name))
  folder = pretrained.Folder(str(FOLDER / name))
  return runner, pretrained.load(folder, runner.program.sizes, runner.abstract_state().params)


def weight(params: Params, name: str) -> Any:
  """A weight by its name, such as "blocks/mlp/up"."""
  return functools.reduce(lambda tree, key: tree[key], name.split("/"), params)


def of_tensors(sizes: ModelSizes, params: Params) -> dict[str, np.ndarray]:
  """The weights, or gradients of them, as the tensors of a folder."""
  host = jax.device_get(params)
  return {name: whole(own, lambda of: weight(host, of)) for name, own in by_name(tensors(sizes)).items()}
