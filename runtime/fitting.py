"""What would make a run fit into its devices' memory. A program of its own says so, after a run without enough of it.

That is `tools.explain`, with the flags of the run. It predicts by formulas and uses no device. Where the commands are
left out, nothing is said.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from runtime.device_memory import TooLittle

SECONDS = 120.0  # a prediction that takes longer is left out
SIZES = ("vocab_size", "image_size", "channels", "classes", "features", "outputs")  # of a model: the data may say them
PROGRAM = f"{__package__.removesuffix('runtime')}tools.explain"
ROOT = Path(__file__).parents[1 + __package__.count(".")]  # where Python finds the program


def arguments(error: TooLittle, config: Any, given: list[str]) -> list[str]:
  """The arguments of `tools.explain` for a run.

  Args:
    config: the run's config as its flags made it.
    given: the run's arguments.
  """
  fit = f"--fit={error.devices[0].platform}:{len(error.devices)}:{error.limit:.0f}"
  kept, skip = list[str](), False
  for argument in given:
    name, equals, _ = argument.lstrip("-").partition("=")
    if not skip and name != "workdir":
      kept.append(argument)
    skip = name == "workdir" and not equals
  found = {name: error.config.model[name] for name in SIZES if error.config.model[name] != config.model[name]}
  return [fit, *kept, *(f"--config.model.{name}={size}" for name, size in found.items())]


def advice(error: TooLittle, config: Any) -> str:
  """The sizes of the run's memory, up to three changes that fit with what they cost, and the command that says so.

  "" if nothing is known. Only process 0 of a job says it.
  """
  if not error.limit or jax.process_index() or not _is_there():
    return ""
  asked = arguments(error, config, sys.argv[1:])
  paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
  try:
    done = subprocess.run(
      [sys.executable, "-m", PROGRAM, *asked],
      env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
      timeout=SECONDS, check=True,
    )  # fmt: skip
  except (OSError, subprocess.SubprocessError, UnicodeError):
    return ""
  return f"{done.stdout}{shlex.join(['python', '-m', PROGRAM, *asked])}"


def _is_there() -> bool:
  try:
    return importlib.util.find_spec(PROGRAM) is not None
  except ModuleNotFoundError:  # its folder is missing, too
    return False
