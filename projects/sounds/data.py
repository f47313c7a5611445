"""Reads the file that make.py writes. `load` is what data/__init__.py asks for."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from data.dataset import Dataset, HostBatch, Part
from errors import ConfigError
from projects.sounds import make

FIELDS = ("features", "label", "target")


@dataclasses.dataclass(frozen=True, eq=False)
class Tones:
  """Some rows of the file's arrays."""

  arrays: dict[str, np.ndarray]
  rows: np.ndarray

  def __len__(self) -> int:
    return len(self.rows)

  def read(self, ids: np.ndarray) -> HostBatch:
    return {name: array[self.rows[ids]] for name, array in self.arrays.items()}


def load(config: ConfigDict) -> Dataset:
  """The tones of `data.path`, or `own.examples` new ones. Every `own.validate`-th is to validate on."""
  path = config.data.path
  try:
    arrays = dict(np.load(path, allow_pickle=False)) if path else make.tones(config.own.examples)
  except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
    raise ConfigError(f"data.path={path!r} is not an .npz file of tones ({error}); write one with make.py") from error
  if {*FIELDS} - {*arrays}:
    raise ConfigError(f"data.path={path!r} holds {', '.join(arrays)}, but tones are {', '.join(FIELDS)}")
  rows = np.arange(len(arrays["label"]))
  is_validation = rows % config.own.validate == 0
  train, validation = (Tones(arrays, rows[chosen]) for chosen in (~is_validation, is_validation))
  digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in FIELDS)).hexdigest()
  name = Path(path).name if path else "new tones"
  return Dataset(
    parts=(Part(name, train, validation, f"sounds-{config.own.validate}-{digest}"),),
    description=f"tones of {name}: {len(train):,} to train on and {len(validation):,} to validate on",
    model={"features": arrays["features"].shape[2], "classes": len(make.WAVES), "outputs": arrays["target"].shape[1]},
    class_names=tuple(make.WAVES),
  )
