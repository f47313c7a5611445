"""TPU slices and GPU clusters of any size, to plan for and to compile for on this machine. None of them is needed.

The compilers are the real ones: libtpu for TPUs (`devices`), and that of JAX's CUDA plugin for GPUs (gpus.py).
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from errors import ConfigError
from lab.analysis import gpus, links
from lab.analysis.links import Links, Switched, Torus
from runtime import hardware
from runtime.hardware import Chip
from runtime.stderr import silenced

TPUS = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}  # version → device kind


@dataclasses.dataclass(frozen=True)
class Slice:
  """TPU chips arranged in a torus of this shape. Each chip has `cores` devices."""

  version: str
  chip: Chip
  shape: tuple[int, ...]
  cores: int = 1
  platform = "tpu"

  @property
  def kind(self) -> str:
    """The devices' `device_kind`, as far as `hardware.chip` needs it."""
    return TPUS[self.version]

  @property
  def count(self) -> int:
    """The number of devices."""
    return math.prod(self.shape) * self.cores

  def links(self, mesh: Mapping[str, int]) -> Torus:
    """The links of a mesh, as its devices are probably arranged."""
    spans = links.spread(mesh, (*self.shape, self.cores))
    extents = lambda axes: tuple(math.prod(spans[axis][i] for axis in axes) for i in range(len(self.shape)))
    return Torus(self.chip, self.shape, extents)

  def links_of(self, mesh: Mesh) -> Links | None:
    """The links of a mesh of this slice's devices."""
    return links.of_devices(self.chip, mesh)

  @property
  def described(self) -> str:
    """Nothing: a slice's name says how its chips are connected."""
    return ""

  def devices(self) -> list[jax.Device]:
    """The devices, to lower and compile programs for (jax.experimental.topologies).

    Raises ConfigError for a slice that does not exist, and if libtpu is not installed.
    """
    from jax.experimental import topologies

    name = f"{self.version}:{'x'.join(map(str, self.shape))}"
    try:
      import libtpu  # noqa: F401
    except ImportError:
      raise ConfigError(
        f"topology={name!r} needs the TPU compiler, which is not installed; pip install '.[topology]'"
      ) from None
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would query a cloud for the machine type, for minutes
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it would lock out other processes, as on a real TPU
    try:
      with silenced():
        jax.devices()  # now, because the first request makes other plugins complain about missing devices
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
      reason = str(error).splitlines()[0]
      raise ConfigError(f"topology={name!r} is not a slice that the TPU compiler knows ({reason})") from error


@dataclasses.dataclass(frozen=True)
class Cluster:
  """NVIDIA GPUs: hosts, and GPUs of each host.

  Attributes:
    network: bytes/s from each GPU to GPUs that NVLink does not connect to it.
  """

  version: str
  chip: Chip
  hosts: int
  per_host: int
  network: float
  platform = "gpu"

  @property
  def kind(self) -> str:
    """The devices' `device_kind`."""
    return gpus.TARGETS[self.version].kind

  @property
  def count(self) -> int:
    """The number of devices."""
    return self.hosts * self.per_host

  def links(self, mesh: Mapping[str, int]) -> Switched:
    """The links of a mesh. Its innermost axes are within a host, or within hosts that NVLink connects."""
    return _switched(self, tuple(mesh), tuple(mesh.values()))

  def links_of(self, mesh: Mesh) -> Links | None:
    """The links of a mesh of this cluster's devices."""
    return self.links(dict(mesh.shape))

  @property
  def described(self) -> str:
    """The network, where it matters."""
    if self.hosts <= self.chip.hosts:
      return ", all connected by NVLink"
    return f", each with {self.network * 8 / 1e9:g} Gb/s to hosts that NVLink does not connect"

  def devices(self) -> list[jax.Device]:
    """The devices, to lower and compile programs for. Raises ConfigError if the CUDA plugin is not installed."""
    return gpus.devices(self.version, self.hosts, self.per_host)


@functools.lru_cache(maxsize=8)  # a search has many candidates on one mesh, and then those on the next
def _switched(where: Cluster, names: tuple[str, ...], sizes: tuple[int, ...]) -> Switched:
  """The links of a mesh with these axes of these sizes."""
  count = -(-where.hosts // where.chip.hosts)  # of domains, which have as many hosts as one another, if possible
  hosts = np.arange(where.count) // where.per_host
  domains = hosts // -(-where.hosts // count)
  return Switched(where.chip, domains[: math.prod(sizes)].reshape(sizes), names, where.network)


Machine = Slice | Cluster


def machine_of(topology: str | None, network: str | None = None) -> Machine:
  """The slice or cluster with a name such as "v5p:8x8x16" or "h100:16x8". Raises ConfigError for one that is not valid.

  Args:
    network: the bandwidth between hosts for each GPU, such as "400Gb"; by default that of the maker's systems.
  """
  version, _, sizes = (topology or "").partition(":")
  shape = tuple(int(size) for size in sizes.split("x")) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) else ()
  kind = TPUS.get(version) or (gpus.TARGETS[version].kind if version in gpus.TARGETS else "")
  chip = hardware.chip(kind)
  if chip is None or len(shape) != (chip.torus or 2):
    raise ConfigError(
      f"topology={topology!r} is not valid; use {', '.join(TPUS)} with two (v5e, v6e) or three sizes of a slice, as in "
      f"v5p:8x8x16, or {', '.join(gpus.TARGETS)} with the number of hosts and of GPUs in a host, as in h100:16x8"
    )
  if version in gpus.TARGETS:
    if shape[1] > gpus.TARGETS[version].per_host:
      raise ConfigError(
        f"topology={topology!r} has {shape[1]} GPUs in a host, but hosts of {version} have at most "
        f"{gpus.TARGETS[version].per_host}; use {version}:HOSTSxGPUS"
      )
    return Cluster(version, chip, *shape, network=chip.network if network is None else bytes_of(network))
  if network is not None:
    raise ConfigError(f"network={network!r} is for GPUs, and topology={topology!r} has TPUs; leave it out")
  return Slice(version, chip, shape, cores=2 if version == "tpu7x" else 1)


def bytes_of(network: str) -> float:
  """The bytes/s of a bandwidth such as "400Gb" (gigabits per second). Raises ConfigError if it is not valid."""
  found = re.fullmatch(r"(\d+(?:\.\d+)?)([GT])b", network)
  if not found or not float(found.group(1)):
    raise ConfigError(f"network={network!r} is not valid; give the bits per second for each GPU, such as 400Gb")
  return float(found.group(1)) * {"G": 1e9, "T": 1e12}[found.group(2)] / 8
