"""Reads the collectives of a compiled program: their mesh axes, how often they run, and how many bytes they send.

Bytes are those that one device sends in a bandwidth-optimal ring (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002). It receives as many.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from lab.analysis.hlo import Computation, Instruction, Module, Shape, Visit

BESIDE = "async_collective_fusion"  # how the names of kernels begin that run a part of a collective beside a product
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled program.

  Attributes:
    name: that of its instruction. A program has two collectives of a name if it calls a function twice.
    kind: one of KINDS.
    axes: the mesh axes along which the devices of a group differ.
    devices: the number of devices in a group.
    operands: the arrays that each device contributes.
    times: how often it runs in a step; None if unknown.
    op_name: its origin in the Python program (`hlo.Instruction.op_name`).
  """

  name: str
  kind: str
  axes: tuple[str, ...]
  devices: int
  operands: tuple[Shape, ...]
  times: int | None
  op_name: str

  @property
  def bytes(self) -> int:
    """Bytes that a device contributes."""
    return sum(shape.bytes for shape in self.operands)

  @property
  def sent(self) -> float:
    """Bytes that a device sends each time it runs; for a ragged all-to-all, if it sends equally much to all.

    That reads rows of its first array and writes rows of the second. One of both may be a buffer for more rows.
    """
    n = self.devices
    if self.kind == "ragged-all-to-all":
      return min(shape.bytes for shape in self.operands[:2]) * (n - 1) / n
    per_byte = {
      "all-gather": n - 1,
      "all-reduce": 2 * (n - 1) / n,
      "reduce-scatter": (n - 1) / n,
      "all-to-all": (n - 1) / n,
      "collective-permute": 1,
    }
    return self.bytes * per_byte[self.kind]

  @property
  def ring(self) -> bool:
    """Whether it is a step of a ring. The TPU compiler writes a reduce-scatter so to overlap it with its product."""
    return self.kind == "collective-permute" and self.op_name.endswith("dot_general")

  @property
  def label(self) -> str:
    return "reduce-scatter, as a ring" if self.ring else self.kind

  @property
  def sent_in_step(self) -> float:
    return self.sent * (self.times or 0)


def collectives(module: Module, mesh: Mapping[str, int], rounds: Mapping[str, int] | None = None) -> list[Collective]:
  """Every collective that a step runs, except those whose groups are single devices.

  Args:
    mesh: axis → size, outermost first.
    rounds: as in `Module.walk`.
  """
  return [found for visit in module.walk(rounds) if visit.times != 0 and (found := collective(visit, mesh))]


def collective(visit: Visit, mesh: Mapping[str, int]) -> Collective | None:
  """The collective that an instruction starts; None if it starts none, or one whose groups are single devices."""
  kind = visit.instruction.operation.removesuffix("-start")
  if kind not in KINDS or _continues(visit):
    return None
  found = _read(visit, kind, mesh)
  return found if found.devices > 1 else None


def _continues(visit: Visit) -> bool:
  """Whether an instruction continues a collective that another kernel began.

  To overlap a collective with arithmetic, a TPU program splits it into several kernels: the first starts it,
  `async_collective_fusion` runs a part of it beside a product, and the last waits. Their channel_id does not identify a
  collective, because several calls of one function share it.
  """
  return visit.name.startswith(BESIDE) or is_called(visit.computation, "AsyncCollectiveDone")


def is_called(computation: Computation, name: str) -> bool:
  """Whether a computation has a custom call of this function."""
  return any(instruction.attribute("custom_call_target") == f'"{name}"' for instruction in computation.values())


def _read(visit: Visit, kind: str, mesh: Mapping[str, int]) -> Collective:
  instruction = visit.instruction
  if kind == "collective-permute":
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.attributes)
    assert pairs is not None
    numbers = np.array([int(n) for n in re.findall(r"\d+", pairs.group(1))]).reshape(-1, 2)
    axes, devices = _varying(numbers, mesh), int(np.any(numbers[:, 0] != numbers[:, 1])) + 1
  else:
    members = groups(instruction, int(np.prod(list(mesh.values()))))
    axes, devices = _varying(members, mesh), members.shape[1]
  if visit.name.startswith("all-reduce-scatter"):  # TPU: an all-reduce fused with a slice of its result
    kind = "reduce-scatter"
  operands = tuple(shape for name in instruction.operands for shape in visit.computation[name].shapes)
  return Collective(instruction.name, kind, axes, devices, operands, visit.times, instruction.op_name)


def groups(instruction: Instruction, devices: int) -> np.ndarray:
  """The groups of devices of a collective: device numbers [groups, devices of a group].

  XLA has three notations: a list, {{0,1},{2,3}}; a reshaped and transposed range, [2,2]<=[2,2]T(1,0); and axes of its
  own mesh, mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}.
  """
  text = instruction.attributes
  if found := re.search(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", text
  ):
    axes, dims, order, reduced = found.groups()
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", axes)}
    numbers = np.arange(int(np.prod(list(sizes.values()))))
    if dims and order:
      numbers = numbers.reshape(_numbers(dims)).transpose(_numbers(order))
    within = [i for i, name in enumerate(sizes) if name in reduced.split(",")]
    together = np.moveaxis(numbers.reshape(list(sizes.values())), within, range(-len(within), 0))
    return together.reshape(-1, int(np.prod([list(sizes.values())[i] for i in within])))
  if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    shape, dims, order = found.groups()
    numbers = np.arange(devices).reshape(_numbers(dims))
    return (numbers.transpose(_numbers(order)) if order else numbers).reshape(_numbers(shape))
  found = re.search(r"replica_groups=\{(\{.*?\})\}", text)
  if not found:  # {}: one group of all devices
    return np.arange(devices)[None]
  return np.array([_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found.group(1))])


def _varying(numbers: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes along which the devices of a group differ; `numbers` is [groups, n]."""
  places = np.stack(np.unravel_index(numbers, tuple(mesh.values())))  # [axes, groups, n]
  return tuple(axis for axis, place in zip(mesh, places, strict=True) if (place != place[..., :1]).any())


def _numbers(listed: str) -> list[int]:
  return [int(n) for n in listed.split(",")]
