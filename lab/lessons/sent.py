"""Prints what a lesson's compiled program sends, one line for each collective, and says what devices hold.

See lab/analysis/communication.py and origins.py.
"""

from typing import Any

import jax

from lab.analysis.communication import Collective, collectives
from lab.analysis.hlo import parse
from lab.analysis.origins import origins
from lab.views.communication import sentence, with_lines


def print_sent(program: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[Collective]:
  """Prints and returns all collectives of a program that was compiled for the devices of this mesh.

  A line shows the mesh axes, the number of devices that take part together, the operand (its shape on one device), and
  the bytes that each device sends around a ring.
  """
  found = collectives(parse(program.as_text()), dict(mesh.shape))
  for one in found:
    print("sends:", sentence(one))
  if not found:
    print("sends: nothing")
  return found


def print_origins(program: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[tuple[str, str, str]]:
  """Prints all collectives with the lines that make their operand and use their result, and returns these as text."""
  found = origins(program.as_text(), dict(mesh.shape))
  for one in found:
    print(*with_lines(one), sep="\n")
  return [(one.collective.kind, one.made, one.used) for one in found]


def held(tree: Any) -> str:
  """Of a tree of arrays: the bytes on the fullest device, and the number of devices that hold something."""
  found: dict[jax.Device, int] = {}
  for x in jax.tree.leaves(tree):
    for shard in x.addressable_shards:
      found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
  return f"{max(found.values()):,} bytes on a device, {len(found)} device{'s' * (len(found) > 1)}"
