"""A trained model to use: the workdir of a run, one of its checkpoints, or a folder in the form of Hugging Face."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import pretrained
import strategies
from checkpointing import initial, reading
from configs import base
from data.text import tokenizers
from data.text.tokenizers import Tokenizer
from errors import ConfigError
from reporting.summary import TOKENIZER
from storage.bucket import Location, location
from strategies import Strategy
from training import settings
from training.program import Params

SEQ_LEN = 1024  # tokens of a text that a model from a folder reads at a time; what it allows may not fit the memory


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model.

  Attributes:
    config: with its sizes.
    tokenizer: None for a model of something else than text.
    load: returns its weights, in the layout of a strategy.
    window: the longest text it can read; None if it does not say.
    seq_len: tokens of a text to read at a time, unless the user says otherwise.
    trained: the length of the texts that it was trained on; None if that is not known.
  """

  config: ConfigDict
  tokenizer: Tokenizer | None
  load: Callable[[Strategy], Params]
  window: int | None
  seq_len: int
  trained: int | None = None

  def reads_text(self) -> Tokenizer:
    """The tokenizer. Raises ConfigError if there is none."""
    if self.tokenizer is None:
      raise ConfigError("this model has no tokenizer, so it reads no text; use one that was trained on text")
    return self.tokenizer


def open_model(path: str) -> Model:
  """The model that a path names. Raises ConfigError if it names none."""
  return _of_folder(path) if pretrained.is_folder(path) else _of_run(location(path, "model"))


def _of_folder(path: str) -> Model:
  config = base.get_config()
  config.update_from_flattened_dict({"init_from": path, "model.seq_len": 1})
  config, folder = pretrained.adopt(config), pretrained.Folder(path)
  file = folder.path / "tokenizer.json"
  load = lambda strategy: pretrained.load(folder, strategy.program.sizes, strategy.abstract_state().params)
  tokenizer, window = tokenizers.from_file(file) if file.exists() else None, folder.shape.window
  return Model(config, tokenizer, load, window, min(SEQ_LEN, window or SEQ_LEN))


def _of_run(workdir: Location) -> Model:
  folder, saved = checkpoint_of(workdir, None)
  load = lambda strategy: initial.read_model(folder, saved, strategy.abstract_state().params, strategy.program)
  tokenizer = _tokenizer_in(folder.parent.parent / TOKENIZER)
  if saved["data"]["tokenizer"] == tokenizers.BYTES.name:
    tokenizer = tokenizers.BYTES
  config = config_of(saved)
  return Model(config, tokenizer, load, None, config.model.seq_len, config.model.seq_len)


def _tokenizer_in(folder: Location) -> Tokenizer | None:
  """The tokenizer that a run has left in this folder; None without one."""
  if not folder.is_dir():
    return None
  if isinstance(folder, Path):
    return tokenizers.from_file(folder / "tokenizer.json")
  with tempfile.TemporaryDirectory() as here:
    for name in folder.names():
      (folder / name).download(Path(here) / name)
    return tokenizers.from_file(Path(here) / "tokenizer.json")


def config_of(saved: dict[str, Any]) -> ConfigDict:
  """The config of the run that wrote a checkpoint with this record."""
  return ConfigDict(base.get_config().to_dict() | saved["config"])


def checkpoint_of(workdir: Location, step: int | None) -> tuple[Location, dict[str, Any]]:
  """The newest checkpoint of a run, or that of a step, and its record."""
  steps = reading.steps(workdir / reading.FOLDER)
  if step is not None and step not in steps:
    raise ConfigError(f"step={step} has no checkpoint in {str(workdir)!r}; use one of {steps}")
  folder = reading.newest(workdir) if step is None else workdir / reading.FOLDER / str(step)
  saved = reading.read_record(folder)
  if saved is None:
    raise ConfigError(
      f"{str(workdir)!r} names no workdir with a checkpoint, no checkpoint and no folder with a model's safetensors; "
      "name one of them"
    )
  return folder, saved


def laid_out(model: Model, strategy: str, mesh: dict[str, int], length: int, devices: list[jax.Device]) -> Strategy:
  """A strategy that runs the model on texts of this length."""
  if model.window and length > model.window:
    raise ConfigError(f"{length} tokens are more than the window of {model.window} positions of this model; use fewer")
  config = model.config.copy_and_resolve_references()
  config.strategy, config.mesh = strategy, ConfigDict(dict.fromkeys(("replica", "stage", "data", "model")) | mesh)
  config.model.seq_len = length
  # What only training needs.
  config.update_from_flattened_dict(
    {"accumulation": 1, "optimizer.on_host": False, "optimizer.name": "sgd", "model.dropout": 0.0}
  )
  return strategies.create(config, settings.program(config, devices[0].platform), devices)


def mesh_of(given: Sequence[str]) -> dict[str, int]:
  """The sizes of mesh axes, from AXIS=SIZE."""
  sizes = dict(one.partition("=")[::2] for one in given)
  for axis, size in sizes.items():
    if not size.isdigit():
      raise ConfigError(f"mesh={axis}={size} has no size; write it as --mesh=model=2")
  return {axis: int(size) for axis, size in sizes.items()}
