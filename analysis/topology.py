"""TPU slices of any size, to compile for on this machine with the real TPU compiler (libtpu). No TPU is needed."""

import dataclasses
import math
import os
import re
from collections.abc import Sequence

import jax

from errors import ConfigError
from runtime import hardware
from runtime.hardware import Chip
from runtime.stderr import silenced

KINDS = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}  # version → device kind


@dataclasses.dataclass(frozen=True)
class Slice:
  """Chips arranged in a torus of this shape. Each chip has `cores` devices."""

  chip: Chip
  shape: tuple[int, ...]
  cores: int = 1

  @property
  def devices(self) -> int:
    return math.prod(self.shape) * self.cores

  def is_whole(self, reaches: Sequence[int]) -> bool:
    """Whether a group of devices with these extents fills a closed torus of three dimensions.

    There the TPU compiler (libtpu 0.0.42) writes an all-gather and a reduce-scatter as an all-reduce, which sends twice
    the bytes.
    """
    return len(self.shape) == 3 and all(self.chip.closed(self.shape)) and tuple(reaches) == self.shape


def slice_of(topology: str | None) -> Slice:
  """The slice with a name such as "v5p:8x8x16". Raises ConfigError for a name that is not valid."""
  found = re.fullmatch(rf"({'|'.join(KINDS)}):(\d+(?:x\d+)*)", topology or "")
  chip = hardware.chip(KINDS[found.group(1)]) if found else None
  shape = tuple(int(size) for size in found.group(2).split("x")) if found else ()
  if found is None or chip is None or len(shape) != chip.torus or 0 in shape:
    raise ConfigError(
      f"topology={topology!r} is not a valid slice; use {', '.join(KINDS)}, a colon, and two (v5e, v6e) or three "
      "sizes, as in v5p:8x8x16"
    )
  return Slice(chip, shape, cores=2 if found.group(1) == "tpu7x" else 1)


def devices(topology: str) -> list[jax.Device]:
  """The devices of a slice such as "v5p:8x8x16", to lower and compile programs for (jax.experimental.topologies).

  Raises ConfigError for a slice that does not exist, and if libtpu is not installed.
  """
  from jax.experimental import topologies

  slice_of(topology)
  try:
    import libtpu  # noqa: F401
  except ImportError:
    raise ConfigError(
      f"topology={topology!r} needs the TPU compiler, which is not installed; pip install '.[topology]'"
    ) from None
  os.environ.setdefault(
    "TPU_SKIP_MDS_QUERY", "1"
  )  # otherwise libtpu spends minutes querying a cloud for the machine type
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise it locks out other processes, as on a real TPU
  try:
    with silenced():
      return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
  except Exception as error:
    reason = str(error).splitlines()[0]
    raise ConfigError(f"topology={topology!r} is not a slice that the TPU compiler knows ({reason})") from error
