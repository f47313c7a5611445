"""Layout: which logical dimension is sharded over which mesh axis.

A strategy is a Layout: the sizes of a device mesh, and for each of the model's nine logical dimensions
(models/dimensions.py) the mesh axis that splits it, or none. Two more places say where `embed` is split in the sums of
gradients and in the optimizer's state, if not as in the weights. Two layouts join with `|`: 2D is FSDP | tensor
parallelism. This file holds the value and its algebra. Next, in execution/: mesh.py (sizes and devices), transfers.py
(what a layout makes move), constraints.py (what it does to arrays), and strategy.py, which runs the training step.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from errors import ConfigError
from models.dimensions import DIMENSIONS, FIRST_LAYERS

# Canonical mesh axes, the outermost (slowest links) first. Strategies compose because they agree on these names.
# A layout may add axes of its own; they come after these, in the order given.
MESH_AXES = ("replica", "stage", "data", "context", "expert", "model")

# What may be split along `embed` into more pieces than the weights, each with what it follows if it has no place.
FOLLOWS = {"gradients": "embed", "state": "gradients"}
PLACES = (*DIMENSIONS, *FOLLOWS)

# The dimensions of weights that devices need not divide: padding.py rounds them up where they are stored.
PADDED = ("embed", "vocab", "layers")

Place = str | tuple[str, ...] | None  # the mesh axis or axes that split a dimension


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the place of each logical dimension on it.

  Attributes:
    mesh: the size of each mesh axis; -1 takes the devices that are left.
    batch, positions, sequence, embed, heads, mlp, experts, vocab, layers: the mesh axis or axes that split this
      dimension; None if not split.
    gradients: those that split `embed` in sums of gradients, while the parts of a batch run; None: as in the weights.
    state: those that split `embed` in the optimizer's state; None: as in the sums of gradients.
  """

  mesh: Mapping[str, int]
  batch: Place = None
  positions: Place = None
  sequence: Place = None
  embed: Place = None
  heads: Place = None
  mlp: Place = None
  experts: Place = None
  vocab: Place = None
  layers: Place = None
  gradients: Place = None
  state: Place = None

  def __post_init__(self) -> None:
    own = [axis for axis in self.mesh if axis not in MESH_AXES]
    ordered = {axis: self.mesh[axis] for axis in (*MESH_AXES, *own) if axis in self.mesh}
    unknown = {axis for name in PLACES for axis in self.axes(name)} - set(ordered)
    if unknown:
      raise ValueError(f"mesh axes {sorted(unknown)} are not in this layout's mesh {dict(self.mesh)}")
    for finer, coarser in FOLLOWS.items():  # so that a device cuts its piece out of what it holds
      if self.axes(finer)[: len(self.axes(coarser))] != self.axes(coarser):
        raise ValueError(f"{finer}={self.axes(finer)} must begin with the axes of {coarser}, {self.axes(coarser)}")
    object.__setattr__(self, "mesh", ordered)

  def __or__(self, other: "Layout") -> "Layout":
    """The union of two layouts. A batch is split over the axes of both.

    Raises ValueError where they place another dimension differently.
    """
    merged: dict[str, Any] = {"mesh": dict(self.mesh) | dict(other.mesh)}
    for name in PLACES:
      mine, theirs = getattr(self, name), getattr(other, name)
      if name == "batch" and mine and theirs:
        both = {*self.axes(name), *other.axes(name)}
        mine = theirs = place_of(tuple(axis for axis in Layout(merged["mesh"]).mesh if axis in both))
      if mine and theirs and mine != theirs:
        raise ValueError(f"these layouts place '{name}' on both '{mine}' and '{theirs}'")
      merged[name] = mine or theirs
    return Layout(**merged)

  def on(self, **sizes: int) -> "Layout":
    """The same layout with other mesh sizes."""
    return dataclasses.replace(self, mesh=dict(self.mesh) | sizes)

  def place(self, **places: Place) -> "Layout":
    """The same layout with some dimensions placed elsewhere."""
    return dataclasses.replace(self, **dict[str, Any](places))

  def for_positions(self, count: int, sequence_parallel: bool = True) -> "Layout":
    """The same layout for this number of positions: they stay whole if they do not split evenly, or must not split."""
    splits = sequence_parallel and count % (self.shards("positions") * self.shards("sequence")) == 0
    return self if splits else self.place(sequence=None)

  def stored_as(self, what: str) -> "Layout":
    """The layout of "gradients" or "state": `embed` is placed where it is in them."""
    return self.place(embed=place_of(self.axes(what)), gradients=None, state=None)

  def restricted_to(self, axes: Collection[str]) -> "Layout":
    """The layout as seen by code that knows some mesh axes only: the other axes split nothing."""
    kept = {name: tuple(axis for axis in axes_of(getattr(self, name)) if axis in axes) for name in PLACES}
    mesh = {axis: size for axis, size in self.mesh.items() if axis in axes}
    return Layout(mesh, **{name: place_of(found) for name, found in kept.items()})

  @property
  def mesh_in_words(self) -> str:
    """The axes of the mesh and their sizes, without axes of size 1."""
    return " × ".join(f"{axis}={size}" for axis, size in self.compact.mesh.items())

  @property
  def compact(self) -> "Layout":
    """The layout without its mesh axes of size 1, as users are shown it."""
    return self.restricted_to([axis for axis, size in self.mesh.items() if size != 1])

  @property
  def device_count(self) -> int:
    return math.prod(self.mesh.values())

  def axes(self, dim: str) -> tuple[str, ...]:
    """The mesh axes that split a dimension; for "gradients" and "state", those that split `embed` in them."""
    place = None if dim == FIRST_LAYERS else getattr(self, dim)
    return axes_of(place) if place or dim not in FOLLOWS else self.axes(FOLLOWS[dim])

  def axes_in(self, dims: Iterable[str | None], dim: str) -> tuple[str, ...]:
    """The mesh axes that split a dimension of an array with these dimensions; those of `experts` split no other.

    So if `embed` is split over the same axes and others, weights of experts are split over the others.
    """
    taken = self.axes("experts") if "experts" in dims and dim != "experts" else ()
    return tuple(axis for axis in self.axes(dim) if axis not in taken)

  def shards_in(self, dims: Iterable[str | None], dim: str) -> int:
    """The number of pieces of `dim` in an array with these dimensions (see `axes_in`)."""
    return math.prod(self.mesh[axis] for axis in self.axes_in(dims, dim))

  def shards(self, dim: str) -> int:
    """The number of pieces a dimension is split into."""
    return math.prod(self.mesh[axis] for axis in self.axes(dim))

  def uses_every_axis(self) -> bool:
    """Whether every mesh axis splits something. The devices along an unused axis would all do the same work."""
    return not self._unused()

  def _unused(self) -> list[str]:
    used = {axis for name in PLACES for axis in self.axes(name)}
    return [axis for axis in self.mesh if axis not in used]

  def placed(self, between: str, mark: str = "") -> list[str]:
    """What is split over which axes, in words, such as "batch over data". Names `gradients` and `state` only if given.

    Args:
      between: the text between two axes of a dimension.
      mark: the text before and after each name of a dimension.
    """
    names = [(name, "optimizer state" if name == "state" else name) for name in PLACES if getattr(self, name)]
    return [f"{mark}{shown}{mark} over {between.join(self.axes(name))}" for name, shown in names]

  def spec(self, dims: Iterable[str | None]) -> P:
    """The PartitionSpec of an array whose dimensions have these names. `sequence` splits what `positions` has split."""
    dims = tuple(dims)
    before = lambda dim: self.axes("positions") if dim == "sequence" else ()
    places = [place_of(before(dim) + self.axes_in(dims, dim)) if dim else None for dim in dims]
    used = [axis for place in places for axis in axes_of(place)]
    if len(used) != len(set(used)):
      raise ValueError(f"{tuple(dims)} would split two dimensions of one array over the same mesh axis: {places}")
    return P(*places)

  def check_used(self, dims: Collection[str | None] = DIMENSIONS) -> None:
    """Raises ConfigError if an axis of several devices splits none of these dimensions, which a program has."""
    splits = {axis for dim in DIMENSIONS if dim in dims for axis in self.axes("state" if dim == "embed" else dim)}
    if "positions" not in dims:  # whatever else an axis splits, its devices would all compute the same examples
      splits -= {*self.axes("positions")}
    for axis, size in self.mesh.items():
      if size > 1 and axis not in splits:
        raise ConfigError(
          f"mesh.{axis}={size} splits nothing that this model has, so its devices would all do the same work; use "
          f"mesh.{axis}=1, or another strategy"
        )

  def check_divides(self, sizes: Iterable[tuple[str, str, int]]) -> None:
    """Raises ConfigError unless every (logical dimension, config field, size) splits evenly that must.

    Devices need not divide the dimensions of `PADDED`. But if both weights and, finer, the optimizer's state are in
    pieces of `embed`, they must: padded pieces of the state would not lie within those of the weights.
    """
    nested = 1 < self.shards("embed") < self.shards("state")
    must = [(dim, field, size) for dim, field, size in sizes if dim not in PADDED or (dim == "embed" and nested)]
    for dim, field, size in must:
      finest = "state" if dim == "embed" else dim
      n = self.shards(finest)
      if size % n:
        fields = " × ".join(f"mesh.{axis}={self.mesh[axis]}" for axis in self.axes(finest))
        together = math.gcd(*(size for other, _, size in must if self.axes(other) == self.axes(dim)))
        fix = self.sizes_in_words(self.axes(finest), divisor_of(together))
        if dim not in ("embed", "heads"):  # heads follow the width, and each other
          fix += f", or {field}={-(-size // n) * n}"
        raise ConfigError(f"{fields} does not divide {field}={size}; use {fix}")

  def fitting(self, axes: Sequence[str]) -> int:
    """What sizes of these mesh axes, multiplied, must divide if `data` takes the devices that are left; 0: anything."""
    together = math.prod(self.mesh[axis] for axis in {*axes, "data"} if axis in self.mesh)
    return together if set(self.mesh) > set(axes) else 0

  def sizes_in_words(self, axes: Sequence[str], works: Callable[[int], bool]) -> str:
    """The sizes of some mesh axes, multiplied, that work: "1, 2 or 4". Without other axes: "1, 2 or 4 devices"."""
    whole = self.fitting(axes)
    fits = [n for n in range(1, min(self.device_count, 64) + 1) if works(n) and whole % n == 0]
    return either(map(str, fits)) + ("" if whole else " device" if fits == [1] else " devices")


def axes_of(place: Place) -> tuple[str, ...]:
  """The mesh axes of a place."""
  return () if place is None else (place,) if isinstance(place, str) else tuple(place)


def place_of(axes: tuple[str, ...]) -> Place:
  """The place that has these mesh axes."""
  return axes[0] if len(axes) == 1 else axes or None


def divisor_of(total: int) -> Callable[[int], bool]:
  return lambda size: total % size == 0


def either(options: Iterable[str]) -> str:
  *others, last = options
  return f"{', '.join(others)} or {last}" if others else last
