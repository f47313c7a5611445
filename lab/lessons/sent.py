"""Prints what a lesson's compiled program sends, one line for each collective (see lab/analysis/communication.py)."""

from collections import Counter

import jax

from lab.analysis.communication import Collective, collectives
from lab.analysis.hlo import parse


def print_sent(program: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[Collective]:
  """Prints and returns all collectives of a program that was compiled for the devices of this mesh.

  A line shows the mesh axes, the number of devices that take part together, the operand (its shape on one device), and
  the bytes that each device sends around a ring.
  """
  found = collectives(parse(program.as_text()), dict(mesh.shape))
  for one in found:
    print("sends:", line(one))
  if not found:
    print("sends: nothing")
  return found


def line(one: Collective) -> str:
  """One collective as text."""
  shapes = Counter(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in one.operands)
  given = ", ".join(shape if n == 1 else f"{n} × {shape}" for shape, n in shapes.items())
  given = given if len(shapes) <= 2 else f"{len(one.operands)} arrays"
  often = "" if one.times == 1 else f", {one.times} times"
  # A permutation is always between pairs of devices.
  together = "" if one.kind == "collective-permute" else f", {one.devices} devices together"
  return (
    f"{one.kind} over {' and '.join(one.axes)}{together}: each puts in {given} and sends {one.sent:,.0f} bytes{often}"
  )
