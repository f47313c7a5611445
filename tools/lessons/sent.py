"""What a compiled program of a lesson sends, in one line for each collective. analysis/communication.py reads it."""

from collections import Counter

import jax

from analysis.communication import Collective, collectives
from analysis.hlo import parse


def print_sent(program: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[Collective]:
  """Prints and returns every collective of a compiled program whose devices are those of the mesh.

  A line says which mesh axes it runs along, how many devices take part together, what each of them puts in (the shape
  on one device), and the bytes that each sends, as a ring of devices does it.
  """
  found = collectives(parse(program.as_text()), dict(mesh.shape))
  for one in found:
    print("sends:", line(one))
  if not found:
    print("sends: nothing")
  return found


def line(one: Collective) -> str:
  """One collective in words."""
  shapes = Counter(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in one.operands)
  given = ", ".join(shape if n == 1 else f"{n} × {shape}" for shape, n in shapes.items())
  given = given if len(shapes) <= 2 else f"{len(one.operands)} arrays"
  often = "" if one.times == 1 else f", {one.times} times"
  # A permutation is between pairs, however many devices there are.
  together = "" if one.kind == "collective-permute" else f", {one.devices} devices together"
  return (
    f"{one.kind} over {' and '.join(one.axes)}{together}: each puts in {given} and sends {one.sent:,.0f} bytes{often}"
  )
