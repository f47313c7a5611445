"""Loads a project: a folder of projects/ with code of its own, which registers its models, data and whatever else."""

import importlib
import importlib.util

from ml_collections import ConfigDict

from errors import ConfigError


def load(config: ConfigDict) -> None:
  """Imports `projects.NAME` for the config's field `project`; nothing if that is empty."""
  name = config.project
  if not name:
    return
  if not name.isidentifier() or importlib.util.find_spec(f"projects.{name}") is None:
    raise ConfigError(f"project={name!r} is not a folder of projects/; use the name of one, or '' for none")
  importlib.import_module(f"projects.{name}")
