"""A trained model to use: the workdir of a run, one of its checkpoints, or a folder in the form of Hugging Face."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import pretrained
import strategies
from checkpointing import restore
from configs import base
from data.dataset import Text
from data.text import tokenizers
from errors import ConfigError
from reporting.summary import TOKENIZER
from strategies import Strategy
from training import settings
from training.program import Params


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model.

  Attributes:
    config: with its sizes.
    text: its tokenizer; None for a model of something else.
    load: returns its weights, in the layout of a strategy.
    window: the longest text it can read; None if it does not say.
  """

  config: ConfigDict
  text: Text | None
  load: Callable[[Strategy], Params]
  window: int | None


def open_model(path: str) -> Model:
  """The model that a path names. Raises ConfigError if it names none."""
  return _of_folder(path) if pretrained.is_folder(path) else _of_run(Path(path).expanduser())


def _of_folder(path: str) -> Model:
  config = base.get_config()
  config.update_from_flattened_dict({"init_from": path, "model.seq_len": 1})
  config, folder = pretrained.adopt(config), pretrained.Folder(path)
  file = folder.path / "tokenizer.json"
  load = lambda strategy: pretrained.load(folder, strategy.program.model, strategy.abstract_state().params)
  return Model(config, tokenizers.from_file(file).text if file.exists() else None, load, folder.shape.window)


def _of_run(workdir: Path) -> Model:
  folder, saved = checkpoint_of(workdir, None)
  load = lambda strategy: restore.read_params(folder, saved, strategy.abstract_state().params, str(folder))
  files = folder.parent.parent / TOKENIZER
  text = tokenizers.from_file(files / "tokenizer.json").text if files.exists() else None
  if saved["data"]["tokenizer"] == tokenizers.BYTES.name:
    text = tokenizers.BYTES.text
  return Model(config_of(saved), text, load, None)


def config_of(saved: dict[str, Any]) -> ConfigDict:
  """The config of the run that wrote a checkpoint with this record, with the defaults of fields that came later."""
  config = base.get_config().to_dict()
  for name, value in saved["config"].items():
    config[name] = {**config[name], **value} if isinstance(config.get(name), dict) else value
  return ConfigDict(config)


def checkpoint_of(workdir: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
  """The newest checkpoint of a run, or that of a step, and its record."""
  steps = restore.steps(workdir / restore.FOLDER)
  if step is not None and step not in steps:
    raise ConfigError(f"step={step} has no checkpoint in {str(workdir)!r}; use one of {steps}")
  folder = restore.newest(workdir) if step is None else workdir / restore.FOLDER / str(step)
  saved = restore.read_record(folder)
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
