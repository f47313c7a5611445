"""A model folder: what it holds, checked before anything large is read, and parts of its tensors.

Weights are in `model.safetensors`, or in several such files that `model.safetensors.index.json` lists.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes bfloat16 known to numpy)
import numpy as np
from safetensors import SafetensorError, safe_open

from errors import ConfigError, file_name, first_line
from models.sizes import ModelSizes
from pretrained import families
from pretrained.tensors import Tensor, tensors

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
READ_BYTES = 1 << 24  # of a tensor, at a time
UNUSED = (".rotary_emb.inv_freq",)  # what old files hold besides weights: it follows from config.json


def is_folder(path: str) -> bool:
  """Whether this looks like a model folder, complete or not. The workdir of a run also has a config.json."""
  folder = Path(path).expanduser()
  if not path or not folder.is_dir():
    return False
  if any((folder / name).exists() for name in (SINGLE, INDEX)):
    return True
  return (folder / CONFIG).is_file() and "model_type" in (folder / CONFIG).read_text()


@dataclasses.dataclass(frozen=True)
class Stored:
  """Where a tensor is."""

  file: Path
  shape: tuple[int, ...]
  dtype: str


class Folder:
  """A model folder. Raises ConfigError for one whose model is unknown, or whose files are missing or damaged.

  Only config.json is read at first, so a folder without weights still says what the model is.

  Attributes:
    shape: what its config.json says.
  """

  def __init__(self, path: str):
    self.path, self.where = Path(path).expanduser(), f"init_from={path!r}"
    self.shape = families.read(self._json(CONFIG), f"{CONFIG} of {self.where}")

  def _json(self, name: str) -> dict[str, Any]:
    try:
      found = json.loads((self.path / name).read_text())
    except (OSError, ValueError) as error:
      raise ConfigError(f"{self.where} has no {name} that can be read ({first_line(error)}); copy it again") from error
    if not isinstance(found, dict):
      raise ConfigError(f"{self.where} has a {name} that holds no fields; copy it again")
    return found

  @functools.cached_property
  def stored(self) -> dict[str, Stored]:
    """Where each tensor is, by name, from the headers of the files."""
    if not (self.path / INDEX).exists():
      return self._header(SINGLE)
    index = self._json(INDEX).get("weight_map")
    if not isinstance(index, dict):
      raise ConfigError(f"{self.where} has an {INDEX} without a weight_map; copy it again")
    stored: dict[str, Stored] = {}
    for name in {file_name(f"{INDEX} of {self.where}", name): None for name in index.values()}:
      stored |= self._header(name)
    for name, file in index.items():
      if name not in stored or stored[name].file.name != file:
        raise ConfigError(f"{self.where} has an {INDEX} that names {name!r} in {file!r}, which holds none; copy both")
    return {name: stored[name] for name in index}

  def _header(self, name: str) -> dict[str, Stored]:
    file = self.path / name
    try:
      with safe_open(file, "numpy") as opened:
        names = opened.keys()
        slices = {name: opened.get_slice(name) for name in names}
        return {name: Stored(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except FileNotFoundError as error:
      raise ConfigError(f"{self.where} lacks the file {name!r}; copy it there") from error
    except (OSError, SafetensorError) as error:
      raise ConfigError(f"{self.where}: {name!r} is damaged ({first_line(error)}); copy it again") from error

  def check(self, sizes: ModelSizes) -> None:
    """Raises ConfigError unless the folder holds the weights of this model, and no others."""
    wanted = {tensor.name: tensor for tensor in tensors(sizes)}
    unused = (*UNUSED, "lm_head.weight") if sizes.tied_embedding else UNUSED
    for name in self.stored:
      if name not in wanted and not name.endswith(unused):
        raise ConfigError(f"{self.where} holds the tensor {name!r}, which a {self.shape.family} model does not have")
    for name, tensor in wanted.items():
      if name not in self.stored:
        raise ConfigError(f"{self.where} lacks the tensor {name!r}; copy all files of the model")
      found = self.stored[name]
      if found.shape != tensor.shape:
        raise ConfigError(
          f"{self.where} holds {name!r} with shape {list(found.shape)}, but its {CONFIG} asks for "
          f"{list(tensor.shape)}; copy both from the same model"
        )
      if found.dtype not in DTYPES:
        raise ConfigError(
          f"{self.where} holds {name!r} as {found.dtype}, which cannot be read; use a model in one of "
          f"{', '.join(DTYPES)}"
        )

  @functools.cached_property
  def dtypes(self) -> list[str]:
    """The dtypes of the tensors."""
    return sorted({found.dtype for found in self.stored.values()})

  def read(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """A part of the weight that a tensor holds.

    Columns are in all pages of a file, and pages count as this process's memory while the file is open. So it is opened
    for a few rows at a time.
    """
    rows, *columns = tensor.part(index)
    file = self.stored[tensor.name].file
    each = max(1, READ_BYTES // (4 * math.prod(tensor.shape[1:])))
    found = []
    for start in range(rows.start, rows.stop, each):
      with safe_open(file, "numpy") as opened:
        some = slice(start, min(start + each, rows.stop))
        found.append(opened.get_slice(tensor.name)[(some, *columns)])
    shape = [len(range(*at.indices(size))) for at, size in zip(index, tensor.sizes, strict=True)]
    return tensor.to_weight(np.concatenate(found) if len(found) > 1 else found[0], shape)
