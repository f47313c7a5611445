"""Pictures of shardings show where each piece is, for any array and any number of devices."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from lab.views import pictures
from lab.views.pictures import picture


def mesh(*sizes: int) -> jax.sharding.Mesh:
  return jax.make_mesh(sizes, ("stage", "data", "model")[-len(sizes) :])


def read(text: str) -> dict[tuple[str, str], list[str]]:
  """Reads a picture: the devices of each cell, by the ranges in the margins, {(rows, columns): devices}."""
  lines = text.splitlines()
  frame = next(line for line in lines if "┌" in line)
  edges = [i for i, character in enumerate(frame) if character in "┌┬┐"]
  between = lambda line: [line[a + 1 : b].strip() for a, b in itertools.pairwise(edges)]
  columns = between(lines[0]) if "┌" not in lines[0] else [""]
  cells: dict[tuple[str, str], list[str]] = {}
  for line in lines:
    if "│" in line and any(between(line)):
      row = line[: edges[0]].strip()
      cells |= {(row, column): devices.split() for column, devices in zip(columns, between(line), strict=True)}
  return cells


def ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[str]:
  return ["{}:{}".format(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True)]


@pytest.mark.parametrize(
  "spec", [P("data", "model"), P("model", "data"), P(None, "model"), P("model"), P(("data", "model")), P()]
)
def test_every_device_is_in_the_cell_of_the_indices_it_holds(spec: P):
  sharding, shape = NamedSharding(mesh(4, 2), spec), (8, 16)
  cells = read(picture(sharding, shape))
  seen = 0
  for device, index in sharding.devices_indices_map(shape).items():
    assert str(device.id) in cells[tuple(ranges(index, shape))]
    seen += 1
  assert sum(map(len, cells.values())) == seen == 8


def test_every_sharding_of_an_array_is_drawn_at_the_same_size():
  specs = [P("data", "model"), P("model", "data"), P(None, "model"), P("model"), P()]
  drawn = [picture(NamedSharding(mesh(4, 2), spec), (8, 16)).splitlines() for spec in specs]
  assert {(len(lines), len(lines[1])) for lines in drawn} == {(11, 53)}


def test_the_docstring_shows_a_real_picture():
  four = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
  shown = picture(NamedSharding(four, P("data", "model")), (8, 16))
  assert all("    " + line in pictures.__doc__.splitlines() for line in shown.splitlines())


def test_a_vector_is_a_row_and_a_scalar_is_a_cell():
  vector = picture(NamedSharding(mesh(8), P("model")), (16,))
  assert read(vector) == {("", f"{2 * i}:{2 * i + 2}"): [str(i)] for i in range(8)}
  assert read(picture(NamedSharding(mesh(8), P()), ())) == {("", ""): [str(i) for i in range(8)]}
  assert read(picture(SingleDeviceSharding(jax.devices()[3]), (5,))) == {("", "0:5"): ["3"]}


def test_with_more_dimensions_the_split_ones_are_drawn_and_named():
  two = picture(NamedSharding(mesh(4, 2), P(None, "data", None, "model")), (4, 64, 8, 16))
  assert read(two)["16:32", "8:16"] == ["3"]
  assert "rows: dimension 1, columns: dimension 3, of (4, 64, 8, 16)" in two
  one = picture(NamedSharding(mesh(4, 2), P(None, None, "data")), (4, 64, 8, 16))
  assert set(read(one)) == {("0:64", f"{2 * i}:{2 * i + 2}") for i in range(4)}  # and the largest other dimension
  none = picture(NamedSharding(mesh(4, 2), P()), (4, 64, 8, 16))
  assert set(read(none)) == {("0:64", "0:16")}


def test_with_three_split_dimensions_the_first_piece_of_the_third_is_drawn():
  text = picture(NamedSharding(mesh(2, 2, 2), P("stage", "data", "model")), (4, 64, 8))
  assert read(text) == {
    ("0:2", "0:32"): ["0"], ("0:2", "32:64"): ["2"], ("2:4", "0:32"): ["4"], ("2:4", "32:64"): ["6"],
  }  # fmt: skip
  assert "dimension 2 is split into 2 pieces too; this is the first, 0:4" in text
  assert "8 pieces of (2, 32, 4), each on 1 device" in text


@dataclasses.dataclass(frozen=True)
class Device:
  id: int


@dataclasses.dataclass
class Imagined:
  """A sharding over rows × columns × copies imagined devices."""

  rows: int
  columns: int
  copies: int

  def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, tuple[slice, ...]]:
    height, width = shape[0] // self.rows, shape[1] // self.columns
    places = itertools.product(range(self.rows), range(self.columns), range(self.copies))
    return {
      Device(i): (slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
      for i, (r, c, _) in enumerate(places)
    }


@pytest.mark.parametrize("rows, columns, copies", [(4096, 1, 1), (1, 4096, 1), (64, 64, 1), (1, 1, 4096), (16, 2, 128)])
@pytest.mark.parametrize("side", [4096, 2**40])
def test_thousands_of_devices_fit_on_a_page(rows: int, columns: int, copies: int, side: int):
  text = picture(Imagined(rows, columns, copies), (side, side))
  assert max(map(len, text.splitlines())) <= pictures.WIDTH
  assert len(text.splitlines()) <= 20
  cells = read(text)
  first, last = f"0:{side // rows}", f"{side - side // columns}:{side}"
  assert cells[first, last][0] == str((columns - 1) * copies)
  if rows > 8:
    assert cells["…", last] == ["…"]
  if copies > 8:
    assert cells[first, last] == [*(str((columns - 1) * copies + i) for i in range(3)), "…", str(columns * copies - 1)]
  pieces, held = re.search(r"([\d,]+) pieces? of .* on ([\d,]+) devices?$", text, re.MULTILINE).groups()
  assert int(pieces.replace(",", "")) * int(held.replace(",", "")) == 4096


def test_a_sharding_that_does_not_divide_raises():
  with pytest.raises(ValueError, match="divide"):
    picture(NamedSharding(mesh(8), P("model")), (6,))
