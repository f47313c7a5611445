"""Devices that are not there: TPU slices of any size, for which the real compiler (libtpu) compiles on this machine."""

import os
import re

import jax

from errors import ConfigError
from training.quiet import silenced

VERSIONS = ("v5e", "v5p", "v6e", "tpu7x")


def devices(topology: str) -> list[jax.Device]:
  """The devices of a slice such as "v5p:8x8x16", to lower and compile for.

  Source: jax.experimental.topologies. Raises ConfigError for a slice that does not exist, and where libtpu is missing.
  """
  from jax.experimental import topologies

  if not re.fullmatch(rf"({'|'.join(VERSIONS)}):\d+(x\d+)*", topology):
    raise ConfigError(
      f"topology={topology!r} names no slice; use one of {', '.join(VERSIONS)}, a colon and a shape, as in v5p:8x8x16"
    )
  try:
    import libtpu  # noqa: F401
  except ImportError:
    raise ConfigError(
      f"topology={topology!r} needs the TPU compiler, which is not installed; pip install '.[topology]'"
    ) from None
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it asks a cloud for minutes what machine this is
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it keeps other processes out, as if it had a TPU to itself
  try:
    with silenced():
      return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
  except Exception as error:
    reason = str(error).splitlines()[0]
    raise ConfigError(f"topology={topology!r} is no slice that the TPU compiler knows ({reason})") from error
