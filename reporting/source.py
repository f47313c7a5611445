"""A trained model to use: the workdir of a run, one of its checkpoints, or a folder in the form of Hugging Face."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import strategies
from checkpointing import form, initial, pretrained, reading, record
from configs import base, project
from data.text import tokenizers
from data.text.tokenizers import Tokenizer
from errors import ConfigError, shown
from reporting.summary import TOKENIZER
from runtime.storage.bucket import Location, location
from strategies import Strategy
from training import settings
from training.program import Params

# What is taken from the file of a run: what its model is, and which fields of a row are its text.
MODEL = (
  "model", "project", "own", "init_from", "data.packing", "data.form", "data.text_field", "data.label_field",
  "data.prompt_field", "data.completion_field", "data.messages_field",
)  # fmt: skip
# To make the run's training step again, also what the step computes, and on which mesh.
STEP = (
  *MODEL, "strategy", "mesh", "gather", "sequence_parallel", "pipeline", "compiler_options", "optimizer", "steps",
  "batch_size", "accumulation", "seed", "data.augment", "eval_by_position",
)  # fmt: skip
MOST = 1 << 26  # of a whole number in a config; a model's largest one is its vocabulary, or the length of its texts
SEQ_LEN = 1024  # tokens that a model from a folder reads at a time; the length that it allows may not fit the memory


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained model.

  Attributes:
    config: the config, with the model's sizes.
    tokenizer: None for a model of something else than text.
    load: returns its weights, in the layout of a strategy.
    seq_len: tokens of a text to read at a time, unless the user says otherwise.
    trained: the length of the texts that it was trained on, or made for; None if that is not known.
  """

  config: ConfigDict
  tokenizer: Tokenizer | None
  load: Callable[[Strategy], Params]
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
  tokenizer = tokenizers.from_file(file) if file.exists() else None
  return Model(config, tokenizer, load, min(SEQ_LEN, folder.shape.context or SEQ_LEN), folder.shape.context or None)


def _of_run(workdir: Location) -> Model:
  folder, saved = checkpoint_of(workdir, None)
  load = lambda strategy: initial.read_model(folder, saved, strategy.abstract_state().params, strategy.program)
  tokenizer = _tokenizer_in(folder.parent.parent / TOKENIZER)
  if saved["data"]["tokenizer"] == tokenizers.BYTES.name:
    tokenizer = tokenizers.BYTES
  config = config_of(saved["config"], repr(str(folder)))
  return Model(config, tokenizer, load, config.model.seq_len, config.model.seq_len)


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


def config_of(given: Any, where: str, taken: tuple[str, ...] = MODEL) -> ConfigDict:
  """The config of a run as far as its file may say it, and otherwise the defaults.

  A field that is newer than the file is as in the model folder that the run began with, or else has its default.

  Args:
    given: what a record, or a config.json, holds. A stranger may have written it.
    where: that file, for the ConfigError if it has a field that is unknown, or a value of another type.
    taken: fields and sections that say what the model is. What is about this machine, such as caches and addresses,
      comes from configs/base.py and the command line alone.
  """
  if why := form.config_fault(given) or ("no model" if "model" not in given else ""):
    raise ConfigError(f"{where} has {why}, which no run has written; use the workdir of a run")
  config, found = base.get_config(), record.flat(given)
  if found.get("project"):
    project.use(config, str(found["project"]))
  for name in [name for name in found if name in taken or name.partition(".")[0] in taken]:
    section, _, field = name.rpartition(".")
    default = _section(config, section)
    if field not in default and section != "mesh":
      raise ConfigError(f"{where} has the field {shown(name)}, which is not known here; use the program that wrote it")
    if not _fits(found[name], default.get(field)):
      raise ConfigError(f"{where} has {shown(name)[1:-1]}={shown(found[name])}, which is not a value of that field")
    (config[section] if section else config)[field] = found[name]
  newer, folder = config.model.to_dict().keys() - given["model"].keys(), config.init_from
  if newer and pretrained.is_folder(folder):
    with contextlib.suppress(ConfigError):  # the folder may hold something else by now
      config.model.update({name: x for name, x in pretrained.Folder(folder).fields.items() if name in newer})
  return config


def _section(config: ConfigDict, name: str) -> dict[str, Any]:
  """The fields of a section of a config; {} if a stranger's file names a section that there is not."""
  found = config.get(name) if name else config
  return found.to_dict() if isinstance(found, ConfigDict) else {}


def _fits(value: Any, default: Any) -> bool:
  """Whether a value from a file has the type of a field's default, and a size that is not absurd."""
  if isinstance(default, dict):
    return False  # a section
  if isinstance(default, str):
    return form.text(value) and value.isprintable()
  if isinstance(default, tuple | list):
    return form.list_of(form.number)(value) and len(value) <= 64
  if isinstance(default, bool):
    return isinstance(value, bool)
  if isinstance(value, bool):
    return False
  if isinstance(default, float):
    return form.number(value) and math.isfinite(value)
  return form.whole(-1, MOST)(value) or (default is None and value is None)


def checkpoint_of(workdir: Location, step: int | None) -> tuple[Location, dict[str, Any]]:
  """The newest checkpoint of a run, or the one of a step, and the checkpoint's record."""
  steps = reading.steps(workdir / reading.FOLDER)
  if step is not None and step not in steps:
    raise ConfigError(f"step={step} has no checkpoint in {str(workdir)!r}; use one of {steps}")
  folder = reading.newest(workdir) if step is None else workdir / reading.FOLDER / str(step)
  saved = reading.read_record(folder)
  if saved is None and (why := reading.fault(folder)):
    raise ConfigError(f"{str(folder)!r} has a record with {why}, which no run has written; {reading.instead(folder)}")
  if saved is None and reading.is_place(folder):
    raise ConfigError(f"{str(folder)!r} is damaged: its record cannot be read; {reading.instead(folder)}")
  if saved is None:
    raise ConfigError(
      f"{str(workdir)!r} names no workdir with a checkpoint, no checkpoint and no folder with a model's safetensors; "
      f"{pretrained.other_form(str(workdir)) or 'name one of them'}"
    )
  record.check_version(saved, {"version": form.VERSION}, repr(str(folder)))
  return folder, saved


def laid_out(model: Model, strategy: str, mesh: dict[str, int], length: int, devices: list[jax.Device]) -> Strategy:
  """A strategy that runs the model on texts of this length."""
  config = model.config.copy_and_resolve_references()
  config.strategy, config.mesh = strategy, ConfigDict(dict.fromkeys(("replica", "stage", "data", "model")) | mesh)
  config.model.seq_len = length
  # Turns off what only training needs.
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
