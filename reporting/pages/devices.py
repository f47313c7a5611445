"""A mesh of devices, and which piece of each array lies where: pick an array, point at a device.

Python gives the mesh and each array's spec; page.js computes the pieces from them, as JAX's NamedSharding does.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from reporting.pages.element import figure, json_of, numbers, tag

Place = str | tuple[str, ...] | None  # the mesh axis or axes that split a dimension
DRAWN = 256  # the most devices in a picture
COLUMNS = 16  # the most in a row


class Array(NamedTuple):
  """An array and where its dimensions are split; `spec` may end early, as a PartitionSpec may.

  Attributes:
    group: what it is listed under, such as "weights".
    dims: the names of its dimensions; None for one without a name.
    bytes: on one device.
  """

  group: str
  name: str
  shape: Sequence[int]
  dims: Sequence[str | None]
  spec: Sequence[Place]
  bytes: str


def placement(title: str, mesh: Mapping[str, int], ids: Sequence[int], arrays: Sequence[Array]) -> str:
  """The picture, and a table of all arrays.

  Args:
    mesh: the sizes of the axes, the outermost first.
    ids: the devices' ids, in the order of the mesh.
    arrays: what can be picked; the first is shown at first.
  """
  groups: dict[str, list[str]] = {}
  for number, array in enumerate(arrays):
    groups.setdefault(array.group, []).append(tag("option", escape(array.name), value=number))
  options = "".join(tag("optgroup", *found, label=group) for group, found in groups.items())
  picker = tag("label", "Array ", tag("select", options), class_="script")
  drawn = ids[:DRAWN]
  buttons = [
    tag("button", tag("b", str(name)), tag("span"), type="button", tabindex=-1 if i else 0, data_device=i)
    for i, name in enumerate(drawn)
  ]
  columns, row_names = _rows(mesh, len(drawn))
  for i, name in reversed(list(enumerate(row_names))):
    buttons.insert(i * columns, tag("i", escape(name)))
  data = {
    "mesh": list(mesh.items()),
    "ids": list(ids),
    "arrays": [{"name": a.name, "shape": a.shape, "dims": a.dims, "spec": list(map(_axes, a.spec))} for a in arrays],
  }
  grid = tag(
    "div",
    *buttons,
    class_="devices named" if row_names else "devices",
    style=f"--columns:{columns}",
    role="group",
    aria_label="devices",
  )
  says = f"{len(ids):,} devices in a mesh of " + " × ".join(f"{axis}={size}" for axis, size in mesh.items())
  says += f"; the first {DRAWN} are drawn." if len(ids) > DRAWN else "."
  rows = [
    (a.group, a.name, " × ".join(f"{n:,}" for n in a.shape), _text(a.dims), _text(a.spec), _pieces(a, mesh), a.bytes)
    for a in arrays
  ]
  head = ("", "array", "shape", "dimensions", "split over", "pieces", "bytes a device")
  picture = tag("div", grid, tag("div", class_="array script"), class_="placement")
  return figure(
    title,
    picker + picture,
    says,
    tag("output", class_="script"),
    numbers(head, rows, title="All arrays"),
    wide=True,
    data_placement=json_of(data),
  )


def _rows(mesh: Mapping[str, int], drawn: int) -> tuple[int, list[str]]:
  """How many devices stand in a row, and the rows' names, if a row is what one place along the outermost axis has."""
  split = {axis: size for axis, size in mesh.items() if size > 1}
  inner = math.prod(list(split.values())[1:])
  if len(split) > 1 and inner <= COLUMNS:
    axis = next(iter(split))
    return inner, [f"{axis} {i}" for i in range(math.ceil(drawn / inner))]
  return max(n for n in range(1, COLUMNS + 1) if drawn % n == 0), []


def _axes(place: Place) -> list[str]:
  return [] if place is None else [place] if isinstance(place, str) else list(place)


def _text(places: Sequence[Place]) -> str:
  return ", ".join("+".join(_axes(place)) or "·" for place in places)


def _pieces(array: Array, mesh: Mapping[str, int]) -> int:
  return math.prod(mesh[axis] for place in array.spec for axis in _axes(place))
