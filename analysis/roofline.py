"""The roofline of a step: the time of its arithmetic, memory traffic and communication at the device's peaks.

The three may overlap, so the largest is a lower bound on the step time, and shows what binds (Williams et al. 2009,
doi:10.1145/1498765.1498785).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from runtime.hardware import Chip


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds that each part of a step takes alone, at the peak.

  Attributes:
    communication: that which arithmetic can hide.
    waiting: communication that arithmetic has to wait for.
    idle: the share of time in which a pipeline's stages wait.
  """

  compute: float
  memory: float
  communication: float
  waiting: float = 0.0
  idle: float = 0.0

  @property
  def seconds(self) -> float:
    """The least time of a step, if everything overlaps that can."""
    return max(self.compute / (1 - self.idle), self.memory, self.communication) + self.waiting

  @property
  def binds(self) -> str:
    """What takes the most time: compute, memory or communication."""
    times = {
      "compute": self.compute / (1 - self.idle),
      "memory": self.memory,
      "communication": self.communication + self.waiting,
    }
    return max(times, key=lambda name: times[name])

  def mfu(self, model_flops: float, chip: Chip) -> float:
    """Model FLOPs utilization of a step that takes the least time. `model_flops` is one device's share."""
    return model_flops / (self.seconds * chip.flops)


def bandwidth(chip: Chip, extents: Sequence[int], whole: Sequence[int] = ()) -> float:
  """Bytes/s that a device can send in a collective of a group of devices, with the best ring algorithms.

  If a group spans a whole dimension of a closed torus, a device sends both ways along it. Otherwise the ring folds back
  on itself, which leaves half of the bandwidth.

  Args:
    extents: the group's sizes along the dimensions of the torus.
    whole: the slice's sizes; the group's if not given.
  """
  if not chip.torus:
    return chip.link
  whole = whole or extents
  dimensions = zip(extents, whole, chip.closed(whole), strict=True)
  both_ways = sum(2 if size == full and ring else 1 for size, full, ring in dimensions if size > 1)
  return chip.link * max(both_ways, 1)


def extents(mesh: Mesh, axes: Iterable[str]) -> tuple[list[int], list[int]]:
  """Two lists of sizes along the torus: those of a group of devices along these mesh axes, and those of the slice.

  Devices without coordinates (GPUs, CPUs) count as one dimension.
  """
  group = _group(mesh, axes)
  if not hasattr(group[0], "coords"):
    return [len(group)], [mesh.devices.size]
  spans = lambda devices: [len({device.coords[i] for device in devices}) for i in range(len(group[0].coords))]
  return spans(group), spans(mesh.devices.flat)


def _group(mesh: Mesh, axes: Iterable[str]) -> np.ndarray:
  """The mesh's first group of devices along these axes."""
  index = tuple(slice(None) if axis in set(axes) else 0 for axis in mesh.axis_names)
  return np.asarray(mesh.devices[index], object).reshape(-1)


def leaves_links(mesh: Mesh, axes: Iterable[str]) -> bool:
  """Whether a group along these axes spans several TPU slices or GPU hosts. `Chip.link` does not connect those."""
  return len({getattr(device, "slice_index", 0) for device in _group(mesh, axes)}) > 1


def seconds_to_send(chip: Chip, mesh: Mesh, sent: Mapping[tuple[str, ...], float]) -> float:
  """Seconds to send these bytes: mesh axes → bytes that each device sends over them. One set of axes at a time."""
  return sum(count / bandwidth(chip, *extents(mesh, axes)) for axes, count in sent.items())
