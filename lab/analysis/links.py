"""How fast the devices of a group can send to one another: over the links of a TPU's torus, or between GPUs.

GPUs of one domain are joined by NVLink through switches. Between domains each GPU has a network adapter of its own.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from jax.sharding import Mesh

from runtime.hardware import Chip

Axes = tuple[str, ...]


class Links(Protocol):
  """The links of a mesh of devices."""

  def bandwidth(self, kind: str, axes: Axes) -> float:
    """Bytes/s that a device can send in a collective along these mesh axes, with the best ring algorithms."""
    ...


@dataclasses.dataclass(frozen=True)
class Torus:
  """The links of TPUs.

  Attributes:
    shape: the sizes of the slice.
    extents: mesh axes → the sizes of a group of devices along the dimensions of the torus.
  """

  chip: Chip
  shape: tuple[int, ...]
  extents: Callable[[Axes], Sequence[int]]

  def bandwidth(self, kind: str, axes: Axes) -> float:
    """If a group spans a whole dimension of a closed torus, a device sends both ways along it.

    Otherwise the ring folds back on itself, which leaves half of the bandwidth.
    """
    dimensions = zip(self.extents(axes), self.shape, self.chip.closed(self.shape), strict=True)
    both_ways = sum(2 if size == full and ring else 1 for size, full, ring in dimensions if size > 1)
    return self.chip.link * max(both_ways, 1)


@dataclasses.dataclass(frozen=True)
class Switched:
  """The links of GPUs.

  Attributes:
    domains: the number of each device's domain, in the shape of the mesh.
    names: the mesh axes.
    network: bytes/s from each GPU to other domains.
    counted: what `_adapters` has found, because a step has many collectives along the same axes.
  """

  chip: Chip
  domains: np.ndarray
  names: Axes
  network: float
  counted: dict[Axes, int] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

  def bandwidth(self, kind: str, axes: Axes) -> float:
    """Within a domain, that of NVLink. Across domains, traffic uses the adapters of all the group's GPUs in a domain.

    Permutes send straight to one other GPU, so they use one adapter. If groups differ, the slowest counts, because the
    next collective waits for it.
    """
    if axes not in self.counted:
      self.counted[axes] = self._adapters(axes)
    if not self.counted[axes]:
      return self.chip.link
    adapters = 1 if kind == "collective-permute" else self.counted[axes]
    return min(self.chip.link, adapters * self.network)

  def _adapters(self, axes: Axes) -> int:
    """The fewest GPUs that a group along these axes has in one domain; 0 if no group is in several domains."""
    found = groups(self.domains, self.names, axes)
    apart = found[(found != found[:, :1]).any(axis=1)]
    numbered = apart + np.arange(len(apart))[:, None] * (int(self.domains.max()) + 1)  # no two groups share a number
    return int(np.unique(numbered, return_counts=True)[1].min()) if len(apart) else 0


def groups(numbers: np.ndarray, names: Iterable[str], axes: Iterable[str]) -> np.ndarray:
  """The groups of devices along some mesh axes: an array in the shape of the mesh → [groups, devices of a group]."""
  along = [i for i, name in enumerate(names) if name in set(axes)]
  last = np.moveaxis(numbers, along, range(-len(along), 0)) if along else numbers[..., None]
  return last.reshape(-1, math.prod(numbers.shape[i] for i in along))


def of_devices(chip: Chip, mesh: Mesh, network: float | None = None) -> Links | None:
  """The links of the devices of this machine or job: by their coordinates in a torus, or by their slices.

  JAX counts GPUs that NVLink connects as a slice. None if GPUs are in several slices and the network is not known.

  Args:
    network: bytes/s from each GPU to other domains; by default that of its maker's systems.
  """
  if chip.torus:
    return Torus(chip, spans(mesh, mesh.axis_names), functools.partial(spans, mesh))
  slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
  network = network or chip.network
  if len(set(slices)) > 1 and not network:
    return None
  return Switched(chip, np.reshape(slices, mesh.devices.shape), tuple(mesh.axis_names), network)


def spans(mesh: Mesh, axes: Iterable[str]) -> tuple[int, ...]:
  """The extents along the torus of the mesh's first group of devices along these mesh axes."""
  coordinates = np.array([device.coords for device in _group(mesh, axes)])
  return tuple(len(set(column)) for column in coordinates.T.tolist())


def spans_slices(mesh: Mesh, axes: Iterable[str]) -> bool:
  """Whether a group along these axes is in several TPU slices. `Chip.link` does not connect those."""
  return len({getattr(device, "slice_index", 0) for device in _group(mesh, axes)}) > 1


def _group(mesh: Mesh, axes: Iterable[str]) -> np.ndarray:
  """The mesh's first group of devices along these axes."""
  return groups(np.asarray(mesh.devices, object), mesh.axis_names, axes)[0]


def spread(mesh: Mapping[str, int], shape: Sequence[int]) -> dict[str, list[int]]:
  """The extent of each mesh axis along each dimension of a torus.

  Approximates how `mesh_utils.create_device_mesh` arranges devices. The innermost axis comes first. Each axis gets
  whole dimensions if its size allows, and otherwise parts of dimensions.
  """
  left = list(shape)
  spans = {axis: [1] * len(shape) for axis in mesh}
  for axis in reversed(list(mesh)):
    size = mesh[axis]
    whole = next(
      (
        chosen
        for count in range(len(left), 0, -1)
        for chosen in itertools.combinations(range(len(left)), count)
        if math.prod(left[i] for i in chosen) == size
      ),
      (),
    )
    for i in whole:
      spans[axis][i], left[i] = left[i], 1
    size = 1 if whole else size
    while size > 1:
      i = max(range(len(left)), key=lambda i: left[i])
      part = next(n for n in range(min(size, left[i]), 0, -1) if left[i] % n == 0 and size % n == 0)
      if part == 1:  # no common factor: the axis wraps around the end of one dimension
        spans[axis][i] *= size
        break
      spans[axis][i], left[i], size = spans[axis][i] * part, left[i] // part, size // part
  return spans
