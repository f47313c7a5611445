"""Loads a project: a folder of projects/ with code of its own, which registers its models, data and whatever else."""

import contextlib
import importlib
import importlib.util
from types import ModuleType

from ml_collections import ConfigDict

from errors import ConfigError


def use(config: ConfigDict, name: str) -> None:
  """Makes this the config of a project: sets `project`, and adds the fields of its `OWN` as the section `own`."""
  config.project = name
  module = load(config)
  with config.unlocked():
    config.own = ConfigDict(getattr(module, "OWN", {}))
  config.mesh.unlock()  # as configs/base.py leaves it: a layout may have mesh axes of its own


def load(config: ConfigDict) -> ModuleType | None:
  """Imports `projects.NAME` for the config's field `project`; nothing if that is empty."""
  name = config.project
  if not name:
    return None
  found = None
  with contextlib.suppress(ModuleNotFoundError):  # there is no folder projects/
    found = importlib.util.find_spec(f"projects.{name}") if name.isidentifier() else None
  if found is None:
    raise ConfigError(f"project={name!r} is not a folder of projects/; use the name of one, or '' for none")
  return importlib.import_module(f"projects.{name}")
