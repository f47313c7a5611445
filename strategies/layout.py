"""Layout: which logical axis lies on which mesh axis. The whole vocabulary of sharding is in this file.

A strategy is a Layout: a mesh, and for each of the model's six logical axes (models/axes.py) the mesh axis that
splits it, or none. Two layouts join with `|`, which is how 2D is FSDP and tensor parallelism. Next: base.py, which
runs the training step under a layout.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from errors import ConfigError, one_of
from models.axes import AXES, Axes

# Canonical mesh axes, outermost (slowest links) first. Strategies compose because they agree on these names.
MESH_AXES = ("replica", "stage", "data", "context", "expert", "model")

Place = str | tuple[str, ...] | None  # the mesh axis, or axes, that split a logical axis


@dataclasses.dataclass(frozen=True)
class Layout:
  """`mesh` gives the size of each mesh axis, -1 for "the devices that are left"; the rest place the logical axes.

  Implements `models.axes.Sharding`. Call its methods under `jax.set_mesh`, in automatic sharding mode: the
  constraints written here are the fixed points and the compiler fills in the rest (WORKSPACE.md says why not
  explicit mode).
  """

  mesh: Mapping[str, int]
  batch: Place = None
  embed: Place = None
  heads: Place = None
  mlp: Place = None
  vocab: Place = None
  layers: Place = None

  def __post_init__(self) -> None:
    ordered = {axis: self.mesh[axis] for axis in MESH_AXES if axis in self.mesh}
    unknown = set(self.mesh) - set(ordered)
    unknown |= {axis for name in AXES for axis in self.axes(name)} - set(ordered)
    if unknown:
      raise ValueError(f"mesh axes {sorted(unknown)} are not in this layout's mesh {dict(self.mesh)} or not canonical")
    object.__setattr__(self, "mesh", ordered)

  def __or__(self, other: "Layout") -> "Layout":
    """Both layouts at once. Where they disagree about an axis it is an error, not a choice."""
    merged: dict[str, Any] = {"mesh": dict(self.mesh) | dict(other.mesh)}
    for name in AXES:
      mine, theirs = getattr(self, name), getattr(other, name)
      if mine and theirs and mine != theirs:
        raise ValueError(f"these layouts place '{name}' on both '{mine}' and '{theirs}'")
      merged[name] = mine or theirs
    return Layout(**merged)

  def on(self, **sizes: int) -> "Layout":
    """The same layout with other mesh sizes."""
    return dataclasses.replace(self, mesh=dict(self.mesh) | sizes)

  def place(self, **places: Place) -> "Layout":
    """The same layout with some logical axes placed elsewhere."""
    return dataclasses.replace(self, **places)  # type: ignore[arg-type]  # only logical axes are given

  def resolve(self, devices: int, sizes: Mapping[str, int | None] | None = None) -> "Layout":
    """Fills in the mesh for a number of devices; `sizes` are the user's `mesh.AXIS` fields, None where not given.

    On one device every size that the user did not give becomes 1. Raises ConfigError where the sizes don't fit.
    """
    given = {axis: size for axis, size in (sizes or {}).items() if size is not None}
    for axis, size in given.items():
      one_of("mesh axis", axis, MESH_AXES)
      if size < 1 and size != -1:
        raise ConfigError(f"mesh.{axis}={size} is no size; use a positive number, or -1 for the devices that are left")
      if axis not in self.mesh and size != 1:
        raise ConfigError(f"mesh.{axis}={size}, but this strategy has no '{axis}' axis; it has: {', '.join(self.mesh)}")
    default = dict.fromkeys(self.mesh, 1) if devices == 1 else self.mesh
    mesh = dict(default) | {axis: size for axis, size in given.items() if axis in self.mesh}
    shown = ", ".join(f"mesh.{axis}={size}" for axis, size in mesh.items())
    free = [axis for axis, size in mesh.items() if size == -1]
    if len(free) > 1:
      raise ConfigError(f"{shown}: only one axis can be -1; give the others a size")
    fixed = math.prod(size for size in mesh.values() if size != -1)
    if free and devices % fixed == 0:
      mesh[free[0]] = devices // fixed
    elif fixed != devices and not (fixed == 1 and not free):  # a mesh of ones is the single-device run, wherever
      raise ConfigError(
        f"{shown} do not multiply to the {devices} devices here; "
        f"use sizes whose product is {devices}, or -1 for one of them"
      )
    return dataclasses.replace(self, mesh=mesh)

  def fitted(self, devices: int) -> "Layout":
    """The same layout with sizes that fit this number of devices, for one meant for more: its fixed sizes halved.

    The largest first, and of equals the innermost, so that a layout keeps as many of its axes as it can.
    """
    mesh = dict(self.mesh)
    while devices % math.prod(size for size in mesh.values() if size != -1):
      largest = max(size for size in mesh.values())
      axis = [axis for axis, size in mesh.items() if size == largest][-1]
      mesh[axis] //= 2
    return dataclasses.replace(self, mesh=mesh)

  @property
  def device_count(self) -> int:
    return math.prod(self.mesh.values())

  def axes(self, name: str) -> tuple[str, ...]:
    """The mesh axes that split a logical axis."""
    return _parts(getattr(self, name))

  def shards(self, name: str) -> int:
    """The number of pieces a logical axis is split into."""
    return math.prod(self.mesh[axis] for axis in self.axes(name))

  def splits(self) -> bool:
    """Whether every mesh axis splits something: else its devices would all do the same."""
    return set(self.mesh) == {axis for name in AXES for axis in self.axes(name)}

  def spec(self, axes: Iterable[str | None]) -> P:
    """The PartitionSpec of an array whose dimensions carry these names."""
    places = [getattr(self, name) if name else None for name in axes]
    used = [axis for place in places for axis in _parts(place)]
    if len(used) != len(set(used)):
      raise ValueError(f"axes {tuple(axes)} would split two dimensions of one array over the same mesh axis: {places}")
    return P(*places)

  def make_mesh(self, devices: list[jax.Device]) -> Mesh:
    """The mesh over the first `device_count` of these devices, laid out along their links.

    Where they lie in several slices, the outermost axis goes across the slices. Raises ConfigError if that cannot be.
    """
    shape, devices = tuple(self.mesh.values()), devices[: self.device_count]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    across = [1] * len(shape)
    if slices > 1:
      outermost = next(i for i, size in enumerate(shape) if size > 1)
      if shape[outermost] % slices:
        axis = tuple(self.mesh)[outermost]
        raise ConfigError(
          f"mesh.{axis}={shape[outermost]} does not spread over {slices} slices; use a multiple of them"
        )
      across[outermost] = slices
    within = [size // n for size, n in zip(shape, across, strict=True)]
    split = {"allow_split_physical_axes": True}  # an axis may need a part of a dimension of a torus
    try:
      if slices > 1:
        arranged = mesh_utils.create_hybrid_device_mesh(within, across, devices, **split)
      else:
        arranged = mesh_utils.create_device_mesh(within, devices, **split)
    except (AssertionError, NotImplementedError, ValueError) as error:
      shown = ", ".join(f"mesh.{axis}={size}" for axis, size in self.mesh.items())
      raise ConfigError(
        f"{shown} cannot be laid out along the links of these {len(devices)} devices; "
        "use all devices of each slice, or other sizes"
      ) from error
    return Mesh(arranged, tuple(self.mesh), axis_types=(AxisType.Auto,) * len(shape))

  def abstract_mesh(self) -> AbstractMesh:
    """A mesh of this shape without devices, to trace and lower for machines that are not there."""
    return AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=(AxisType.Auto,) * len(self.mesh))

  def check_divides(self, sizes: Iterable[tuple[str, str, int]]) -> None:
    """Raises ConfigError unless every (logical axis, config field, size) splits evenly."""
    for name, field, size in sizes:
      shards = self.shards(name)
      if size % shards:
        fields = " × ".join(f"mesh.{axis}={self.mesh[axis]}" for axis in self.axes(name))
        divisors = [str(d) for d in range(1, min(size, 64) + 1) if size % d == 0]
        raise ConfigError(f"{fields} does not divide {field}={size}; use {_either(divisors)}")

  def activation(self, x: jax.Array, *axes: str | None) -> jax.Array:
    if self.device_count == 1:
      return x
    return jax.lax.with_sharding_constraint(x, self.spec(axes))

  def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
    """All-gathers a weight along `embed`; its gradient goes back the other way, reduced and split as it is stored."""
    if self.shards("embed") == 1 or "embed" not in axes:
      return w
    stored, used = self.spec(axes), self.spec(None if name == "embed" else name for name in axes)
    constrain = jax.lax.with_sharding_constraint

    def scatter(gradient: jax.Array) -> jax.Array:
      if not any(used) and any(
        size > 1 for axis, size in self.mesh.items() if axis not in ("stage", *self.axes("embed"), *self.axes("batch"))
      ):
        # With a mesh axis to spare, the compiler would split the product over it and then have to move the gradient
        # by a collective-permute, which a stage of a pipeline cannot do alone. So whole first; such weights are small.
        gradient = constrain(gradient, used)
      # As a matrix with `embed` first: the TPU compiler sums others whole where a piece would not fill its tiles.
      at, others = axes.index("embed"), [name for name in axes if name not in (None, "embed")]
      first = jnp.moveaxis(gradient, at, 0)
      matrix = constrain(first.reshape(first.shape[0], -1), self.spec(("embed", *others)))
      return constrain(jnp.moveaxis(matrix.reshape(first.shape), 0, at), stored)

    gathered = jax.custom_vjp(lambda w: constrain(w, used))
    gathered.defvjp(lambda w: (constrain(w, used), None), lambda _, gradient: (scatter(gradient),))
    return gathered(w)


def _parts(place: Place) -> tuple[str, ...]:
  return () if place is None else (place,) if isinstance(place, str) else tuple(place)


def _either(options: list[str]) -> str:
  return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def local_rows(sharding: jax.sharding.NamedSharding, size: int) -> np.ndarray:
  """The rows of a global batch of `size` that this process's devices hold, in order; they need not be neighbours."""
  held = [index for index in sharding.addressable_devices_indices_map((size,)).values() if index]
  return np.unique(np.concatenate([np.arange(size)[index[0]] for index in held]))


def from_local_copies(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """The replicated array of all processes, from what may be each process's own replicated array. Copies nothing."""
  if x.sharding.device_set == sharding.device_set:
    return x
  return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard.data for shard in x.addressable_shards])
