"""Meshes: fills in the sizes of a Layout, arranges real, simulated or abstract devices, and places batches on them."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from errors import ConfigError
from strategies.layout import Layout, axes_of


def resolve(layout: Layout, devices: int, sizes: Mapping[str, int | None] | None = None) -> Layout:
  """The layout with every mesh size filled in for a number of devices.

  On one device every size that the user did not give becomes 1.

  Args:
    sizes: the user's `mesh.AXIS` fields; None where a size is not given.

  Raises:
    ConfigError: the sizes do not fit the devices or the layout.
  """
  given = {axis: size for axis, size in (sizes or {}).items() if size is not None}
  for axis, size in given.items():
    if size < 1 and size != -1:
      raise ConfigError(f"mesh.{axis} must be positive, or -1 for the devices that are left; got mesh.{axis}={size}")
    if axis not in layout.mesh and size != 1:
      raise ConfigError(f"mesh.{axis}={size}, but this strategy has no '{axis}' axis; it has: {', '.join(layout.mesh)}")
  default = dict.fromkeys(layout.mesh, 1) if devices == 1 else layout.mesh
  mesh = dict(default) | {axis: size for axis, size in given.items() if axis in layout.mesh}
  shown = ", ".join(f"mesh.{axis}={size}" for axis, size in mesh.items())
  free = [axis for axis, size in mesh.items() if size == -1]
  if len(free) > 1:
    raise ConfigError(f"{shown}: only one axis can be -1; give the others a size")
  fixed = math.prod(size for size in mesh.values() if size != -1)
  if free and devices % fixed == 0:
    mesh[free[0]] = devices // fixed
  elif fixed != devices and not (fixed == 1 and not free):  # sizes of 1 always fit: they use a single device
    raise ConfigError(
      f"{shown} do not multiply to the {devices} devices here; "
      f"use sizes whose product is {devices}, or -1 for one of them"
    )
  return dataclasses.replace(layout, mesh=mesh)


def fitted(layout: Layout, devices: int) -> Layout:
  """The layout with its fixed sizes halved until they fit this number of devices.

  Halves the largest size first, and of equal sizes the innermost, to keep as many axes as possible.
  """
  mesh = dict(layout.mesh)
  while devices % math.prod(size for size in mesh.values() if size != -1):
    largest = max(size for size in mesh.values())
    axis = [axis for axis, size in mesh.items() if size == largest][-1]
    mesh[axis] //= 2
  return dataclasses.replace(layout, mesh=mesh)


def make_mesh(layout: Layout, devices: list[jax.Device]) -> Mesh:
  """A mesh of the first `device_count` of these devices, with neighbours along its axes linked directly if possible.

  With several slices, the outer mesh axes span them. Raises ConfigError if the devices cannot be arranged so.
  """
  shape, devices = tuple(layout.mesh.values()), devices[: layout.device_count]
  shown = ", ".join(f"mesh.{axis}={size}" for axis, size in layout.mesh.items())
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  across, left = [], slices  # how many slices each mesh axis spans
  for size in shape:
    across.append(math.gcd(size, left))
    left //= across[-1]
    if left > 1 and size > across[-1]:
      raise ConfigError(
        f"{shown} cannot be laid out over {slices} slices: the outer sizes must divide the slices, or be multiples of "
        "what is left of them; use other sizes"
      )
  within = [size // n for size, n in zip(shape, across, strict=True)]
  split = {"allow_split_physical_axes": True}  # a mesh axis may take only a part of a torus dimension
  try:
    if slices > 1:
      arranged = mesh_utils.create_hybrid_device_mesh(within, across, devices, **split)
    else:
      arranged = mesh_utils.create_device_mesh(within, devices, **split)
  except (AssertionError, NotImplementedError, ValueError) as error:
    raise ConfigError(
      f"{shown} cannot be laid out along the links of these {len(devices)} devices; "
      "use all devices of each slice, or other sizes"
    ) from error
  return Mesh(arranged, tuple(layout.mesh), axis_types=(AxisType.Auto,) * len(shape))


def abstract_mesh(layout: Layout) -> AbstractMesh:
  """A mesh of this shape without devices, to trace and lower programs for other machines."""
  return AbstractMesh(tuple(layout.mesh.values()), tuple(layout.mesh), axis_types=(AxisType.Auto,) * len(layout.mesh))


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """Places batches on a mesh, with the examples split as `sharding` says. `data.batches` takes one."""

  sharding: NamedSharding

  def padded(self, batch_size: int) -> int:
    """The rows of a global batch on the devices: rows of zeros are added if the devices do not divide it."""
    axes = axes_of(self.sharding.spec[0]) if self.sharding.spec else ()
    devices = math.prod(self.sharding.mesh.shape[axis] for axis in axes)
    return -(-batch_size // devices) * devices

  def rows(self, batch_size: int) -> np.ndarray:
    """The sorted rows of a global batch that this process's devices hold. They need not be contiguous."""
    held = self._held(batch_size)
    return held[held < batch_size]

  def filled(self, host_batch: dict[str, np.ndarray], batch_size: int) -> dict[str, np.ndarray]:
    """The rows of `host_batch`, and behind them this process's rows of zeros, whose `mask` is false."""
    if self.padded(batch_size) == batch_size:
      return host_batch
    more = np.count_nonzero(self._held(batch_size) >= batch_size)
    fill = lambda rows: np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])
    return {name: fill(rows) for name, rows in host_batch.items()}

  def shard(self, host_batch: dict[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
    """Makes a global batch from the rows that this process supplies."""
    return {
      name: jax.make_array_from_process_local_data(self.sharding, rows, (self.padded(batch_size), *rows.shape[1:]))
      for name, rows in self.filled(host_batch, batch_size).items()
    }

  def _held(self, batch_size: int) -> np.ndarray:
    rows = np.arange(self.padded(batch_size))
    held = [index for index in self.sharding.addressable_devices_indices_map(rows.shape).values() if index]
    return np.unique(np.concatenate([rows[index[0]] for index in held]))


def from_local_copies(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Makes a global replicated array from an array that each process holds for its own devices. Copies no data."""
  if x.sharding.device_set == sharding.device_set:
    return x
  return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard.data for shard in x.addressable_shards])


def on_mesh(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager:
  """A context in which sharding constraints refer to this mesh."""
  return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
