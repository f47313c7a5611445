"""Which piece lies where, on meshes and specs that no strategy has: the page agrees with JAX's NamedSharding."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from browser import Browser
from helpers import in_full
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reporting.pages import document, write
from reporting.pages.devices import Array, placement

ODD, CUBE = {"stage": 1, "data": 3, "model": 2}, {"stage": 2, "data": 2, "model": 2}
SPECS = [
  (), (None, "model"), ("model", "data"), (("data", "model"),), (("model", "data"), None), (None, ("data", "model")),
  ("stage", None, "model"), (("stage", "model"), "data"), (("model", "stage"), None, "data"),
  (("stage", "data", "model"),),
]  # fmt: skip
FEW = [(("model", "data"), None), ("stage", None, "model"), (("stage", "model"), "data")]


@pytest.mark.parametrize("sizes, specs", in_full([(ODD, FEW), (ODD, SPECS), (CUBE, SPECS)], (ODD, FEW)))
def test_pieces_are_those_of_jax(sizes: dict[str, int], specs: list[tuple], browser: Browser, tmp_path: Path):
  count = int(np.prod(list(sizes.values())))
  devices = np.array(jax.devices()[:count][::-1]).reshape(*sizes.values())  # in an order of its own
  mesh, shape = Mesh(devices, tuple(sizes)), (24, 12, 36)
  arrays = [Array("arrays", str(spec), shape, ("a", None, "c"), spec, "") for spec in specs]
  ids = [device.id for device in devices.flat]
  write(tmp_path / "page.html", document("Mesh", "", placement("Mesh", sizes, ids, arrays)))

  def act(page: Any) -> list[list[str]]:
    found = []
    for number in range(len(arrays)):
      page.locator("select").select_option(str(number))
      page.locator("button").nth(0).hover()
      said = []
      for device in range(count):
        page.locator("button").nth(device).hover()
        said.append(page.locator("output").inner_text())
      found.append(said)
    return found

  seen = browser.look(tmp_path / "page.html", act)
  assert not seen.errors
  for spec, said in zip(specs, seen.value, strict=True):
    slices = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(shape)
    for device, text in zip(devices.flat, said, strict=True):
      assert text.startswith(f"Device {device.id} (")
      pieces = zip(slices[device], shape, strict=True)
      ranges = [f"{one.start or 0}:{size if one.stop is None else one.stop}" for one, size in pieces]
      assert re.findall(r"\d+:\d+", text) == ranges
      same = [d.id for d in devices.flat if d != device and slices[d] == slices[device]]
      assert [int(n) for n in re.findall(r"\d+", text.partition("So do")[2])] == same


def test_the_picture_highlights_the_piece_of_the_device(browser: Browser, tmp_path: Path):
  arrays = [
    Array("weights", "w", (8, 16), ("embed", "mlp"), ("data", "model"), ""),
    Array("scales", "s", (8,), (None,), (), ""),
  ]
  write(tmp_path / "page.html", document("Mesh", "", placement("Mesh", {"data": 2, "model": 4}, range(8), arrays)))

  def act(page: Any) -> list[list[float]]:
    piece = lambda: [float(page.locator(".piece").get_attribute(name)) for name in ("x", "y", "width", "height")]
    page.locator("button").nth(6).focus()
    found = [piece()]
    page.locator("select").select_option("1")
    return [*found, piece()]

  assert browser.look(tmp_path / "page.html", act).value == [[150, 85, 75, 85], [0, 0, 300, 40]]
