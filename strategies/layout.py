"""Layout: which logical dimension is sharded over which mesh axis.

A strategy is a Layout: the sizes of a device mesh, and for each of the model's six logical dimensions
(models/dimensions.py) the mesh axis that splits it, or none. Two layouts join with `|`: 2D is FSDP | tensor
parallelism. This file holds the value and its algebra. Next: mesh.py (sizes and devices), sharding.py (what a layout
does to arrays), and base.py, which runs the training step under a layout.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from errors import ConfigError
from models.dimensions import DIMENSIONS

# Canonical mesh axes, the outermost (slowest links) first. Strategies compose because they agree on these names.
# A layout may add axes of its own; they come after these, in the order given.
MESH_AXES = ("replica", "stage", "data", "model")

Place = str | tuple[str, ...] | None  # the mesh axis or axes that split a dimension


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the place of each logical dimension on it.

  Attributes:
    mesh: the size of each mesh axis; -1 takes the devices that are left.
    batch, embed, heads, mlp, vocab, layers: the mesh axis or axes that split this logical dimension; None if not split.
  """

  mesh: Mapping[str, int]
  batch: Place = None
  embed: Place = None
  heads: Place = None
  mlp: Place = None
  vocab: Place = None
  layers: Place = None

  def __post_init__(self) -> None:
    own = [axis for axis in self.mesh if axis not in MESH_AXES]
    ordered = {axis: self.mesh[axis] for axis in (*MESH_AXES, *own) if axis in self.mesh}
    unknown = {axis for dim in DIMENSIONS for axis in self.axes(dim)} - set(ordered)
    if unknown:
      raise ValueError(f"mesh axes {sorted(unknown)} are not in this layout's mesh {dict(self.mesh)}")
    object.__setattr__(self, "mesh", ordered)

  def __or__(self, other: "Layout") -> "Layout":
    """The union of two layouts. Raises ValueError where they place the same dimension differently."""
    merged: dict[str, Any] = {"mesh": dict(self.mesh) | dict(other.mesh)}
    for dim in DIMENSIONS:
      mine, theirs = getattr(self, dim), getattr(other, dim)
      if mine and theirs and mine != theirs:
        raise ValueError(f"these layouts place '{dim}' on both '{mine}' and '{theirs}'")
      merged[dim] = mine or theirs
    return Layout(**merged)

  def on(self, **sizes: int) -> "Layout":
    """The same layout with other mesh sizes."""
    return dataclasses.replace(self, mesh=dict(self.mesh) | sizes)

  def place(self, **places: Place) -> "Layout":
    """The same layout with some dimensions placed elsewhere."""
    return dataclasses.replace(self, **dict[str, Any](places))

  def only(self, axes: Collection[str]) -> "Layout":
    """The layout as seen by code that knows some mesh axes only: the other axes split nothing."""
    kept = {dim: tuple(axis for axis in self.axes(dim) if axis in axes) for dim in DIMENSIONS}
    places = {dim: found[0] if len(found) == 1 else found or None for dim, found in kept.items()}
    return Layout({axis: size for axis, size in self.mesh.items() if axis in axes}, **places)

  def axes_by_hand(self, gathers_once: bool) -> tuple[str, ...]:
    """The mesh axes of the batch if some gradients are summed over them once a step; none if every part needs its sums.

    Every part needs them if it gathers weights along `embed` and scatters their gradients over all of these axes.
    """
    axes = tuple(axis for axis, size in self.mesh.items() if size > 1 and axis in self.axes("batch"))
    return axes if gathers_once or set(axes) - set(self.axes("embed")) else ()

  @property
  def device_count(self) -> int:
    return math.prod(self.mesh.values())

  def axes(self, dim: str) -> tuple[str, ...]:
    """The mesh axes that split a dimension."""
    return _parts(getattr(self, dim))

  def shards(self, dim: str) -> int:
    """The number of pieces a dimension is split into."""
    return math.prod(self.mesh[axis] for axis in self.axes(dim))

  def uses_every_axis(self) -> bool:
    """Whether every mesh axis splits something. The devices along an unused axis would all do the same work."""
    return set(self.mesh) == {axis for dim in DIMENSIONS for axis in self.axes(dim)}

  def spec(self, dims: Iterable[str | None]) -> P:
    """The PartitionSpec of an array whose dimensions carry these names."""
    places = [getattr(self, dim) if dim else None for dim in dims]
    used = [axis for place in places for axis in _parts(place)]
    if len(used) != len(set(used)):
      raise ValueError(f"{tuple(dims)} would split two dimensions of one array over the same mesh axis: {places}")
    return P(*places)

  def check_divides(self, sizes: Iterable[tuple[str, str, int]]) -> None:
    """Raises ConfigError unless every (logical dimension, config field, size) splits evenly."""
    for dim, field, size in sizes:
      if size % self.shards(dim):
        fields = " × ".join(f"mesh.{axis}={self.mesh[axis]}" for axis in self.axes(dim))
        divisors = [str(d) for d in range(1, min(size, 64) + 1) if size % d == 0]
        raise ConfigError(f"{fields} does not divide {field}={size}; use {_either(divisors)}")


def _parts(place: Place) -> tuple[str, ...]:
  return () if place is None else (place,) if isinstance(place, str) else tuple(place)


def _either(options: list[str]) -> str:
  return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
