"""How fast a step can be at best: the time that its arithmetic, its memory traffic and its messages take at the peaks.

The three may overlap, so the largest is a bound that no program beats, and says what binds (Williams et al. 2009,
doi:10.1145/1498765.1498785).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from runtime.hardware import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of a step, if each part ran alone at the peak.

  Attributes:
    communication: that arithmetic can hide.
    waiting: communication that arithmetic has to wait for.
    idle: the share of time a pipeline's stages wait.
  """

  compute: float
  memory: float
  communication: float
  waiting: float = 0.0
  idle: float = 0.0

  @property
  def seconds(self) -> float:
    """The least time of a step, in which everything overlaps that can."""
    return max(self.compute / (1 - self.idle), self.memory, self.communication) + self.waiting

  @property
  def binds(self) -> str:
    times = {
      "compute": self.compute / (1 - self.idle),
      "memory": self.memory,
      "communication": self.communication + self.waiting,
    }
    return max(times, key=lambda name: times[name])

  def mfu(self, model_flops: float, chip: Chip) -> float:
    """Model FLOPs utilisation of a step that takes the least time; `model_flops` are one device's share."""
    return model_flops / (self.seconds * chip.flops)


def bandwidth(chip: Chip, extents: Sequence[int], whole: Sequence[int] = ()) -> float:
  """Bytes/s that a device can send to a group of devices, by the best ring algorithms.

  In a torus the group has `extents`, the sizes along each dimension it spans, of a slice that is `whole` there. Along
  a closed dimension a device sends both ways, along an open one the ring folds back on itself and has half of that.
  """
  if not chip.torus:
    return chip.link
  whole = whole or extents
  dimensions = zip(extents, whole, chip.closed(whole), strict=True)
  both_ways = sum(2 if size == full and ring else 1 for size, full, ring in dimensions if size > 1)
  return chip.link * max(both_ways, 1)


def extents(mesh: Mesh, axes: Iterable[str]) -> tuple[list[int], list[int]]:
  """The sizes along each dimension of the torus of a group of devices that differ in these mesh axes; and the slice's.

  For devices without coordinates (GPUs, CPUs) there is one dimension.
  """
  group = _group(mesh, axes)
  if not hasattr(group[0], "coords"):
    return [len(group)], [mesh.devices.size]
  spans = lambda devices: [len({device.coords[i] for device in devices}) for i in range(len(group[0].coords))]
  return spans(group), spans(mesh.devices.flat)


def _group(mesh: Mesh, axes: Iterable[str]) -> np.ndarray:
  """The devices of the mesh's first group of those that differ in these axes."""
  index = tuple(slice(None) if axis in set(axes) else 0 for axis in mesh.axis_names)
  return np.asarray(mesh.devices[index], object).reshape(-1)


def leaves_links(mesh: Mesh, axes: Iterable[str]) -> bool:
  """Whether such a group lies in several slices of TPUs or hosts of GPUs, which no link of `Chip` joins."""
  return len({getattr(device, "slice_index", 0) for device in _group(mesh, axes)}) > 1


def seconds_to_send(chip: Chip, mesh: Mesh, sent: Mapping[tuple[str, ...], float]) -> float:
  """Seconds for the bytes that each device sends over each set of mesh axes, one set after the other."""
  return sum(count / bandwidth(chip, *extents(mesh, axes)) for axes, count in sent.items())
