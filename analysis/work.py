"""What a compiled program computes, and what it moves between a device and its memory."""

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from analysis.hlo import Computation, Instruction, Module, Shape

# Instructions that only name, group or steer: they move nothing.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all", "iota",
  "partition-id", "replica-id", "optimization-barrier", "domain", "opt-barrier", "custom-call",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "copy", "convert", "transpose"}


def flops(module: Module, rounds: Mapping[str, int] | None = None) -> float:
  """Floating-point operations of all matrix products of one device in one run, a multiplication and an addition each.

  Loops whose rounds nobody knows count as never run (`Module.walk`).
  """
  counted = {"dot": _dot, "convolution": _convolution}
  return sum(
    (visit.times or 0) * counted[visit.instruction.operation](visit.instruction, visit.computation)
    for visit in module.walk(rounds)
    if visit.instruction.operation in counted
  )


def _dot(product: Instruction, computation: Computation) -> float:
  left = computation[product.operands[0]].shapes[0]
  contracted = product.attribute("lhs_contracting_dims")
  return 2 * product.shapes[0].size * math.prod(left.dims[int(i)] for i in contracted.split(",") if i)


def _convolution(product: Instruction, computation: Computation) -> float:
  """TPU programs write every product so; a batch dimension becomes a window in which all but one place is padding."""
  left, right = (computation[name].shapes[0] for name in product.operands[:2])
  labels = product.attribute("dim_labels")
  of_left, of_right, of_out = re.match(r"(\w+)_(\w+)->(\w+)", labels).groups()  # type: ignore[union-attr]
  window = dict(re.findall(r"(\w+)=(\S+)", product.attribute("window")))
  operations = 2 * right.dims[of_right.index("i")] * right.dims[of_right.index("o")] * left.dims[of_left.index("b")]
  for place in (label for label in of_out if label.isdigit()):
    size = right.dims[of_right.index(place)]
    field = lambda name, default, place=place: window.get(name, default).split("x")[int(place) if name in window else 0]
    operations *= _hits(
      left.dims[of_left.index(place)],
      product.shapes[0].dims[of_out.index(place)],
      size,
      int(field("stride", "1")),
      int(field("pad", "0_0").split("_")[0]),
      int(field("lhs_dilate", "1")),
      int(field("rhs_dilate", "1")),
    )
  return operations


@functools.cache
def _hits(inputs: int, outputs: int, size: int, stride: int, pad: int, holes: int, spread: int) -> int:
  """How many (output, place in the window) pairs of one dimension meet an input and not padding or a hole."""
  at = np.arange(outputs)[:, None] * stride + np.arange(size)[None] * spread - pad
  return int(((at >= 0) & (at <= (inputs - 1) * holes) & (at % holes == 0)).sum())


def traffic(module: Module, rounds: Mapping[str, int] | None = None) -> float:
  """Bytes that one device reads from and writes to its memory in one run, if nothing stays in a cache in between.

  A kernel reads its operands and writes its result once. Of an array that is only sliced the slice counts, and of one
  that is updated in place the update.
  """
  total = 0.0
  for visit in module.walk(rounds):
    if (
      not visit.fused and visit.instruction.operation not in _FREE and not visit.instruction.operation.endswith("-done")
    ):
      total += (visit.times or 0) * _moved(module, visit.instruction, visit.computation)
  return total


def _moved(module: Module, instruction: Instruction, computation: Computation) -> int:
  operands = [computation[name].shapes for name in instruction.operands if name in computation]
  called = instruction.attribute("calls").lstrip("%")
  if instruction.operation == "fusion" and called in module.computations:
    return _moved_by_kernel(module.computations[called], operands, instruction.shapes)
  if instruction.operation == "dynamic-update-slice":
    return 2 * _bytes(operands[1])
  if instruction.operation in _SLICES:
    return 2 * _bytes(instruction.shapes)
  if instruction.operation.endswith("-start"):  # the result names the operand again
    return _bytes(operands[0]) + _bytes(instruction.shapes[:1]) if operands else 0
  return sum(map(_bytes, operands)) + _bytes(instruction.shapes)


def _moved_by_kernel(kernel: Computation, operands: list[tuple[Shape, ...]], result: tuple[Shape, ...]) -> int:
  users: dict[str, list[Instruction]] = {}
  for instruction in kernel.values():
    for name in instruction.operands:
      users.setdefault(name, []).append(instruction)
  root = next(instruction for instruction in kernel.values() if instruction.is_root)
  ends = (
    [_source(kernel, name) for name in root.operands] if root.operation == "tuple" else [_source(kernel, root.name)]
  )
  moved = 0
  updated = set()  # parameters that the kernel changes in place
  for end, shape in zip(ends, result, strict=False):
    if end.operation == "dynamic-update-slice":
      updated.add(_source(kernel, end.operands[0]).name)
      moved += 0 if shape.on_chip else _bytes(kernel[end.operands[1]].shapes)
    else:
      moved += _bytes((shape,))
  parameters = [instruction for instruction in kernel.values() if instruction.operation == "parameter"]
  for instruction in parameters:
    number = re.match(r"(\d+)", instruction.attributes.removeprefix("("))
    shapes = operands[int(number.group(1))] if number else instruction.shapes
    if instruction.name in updated or any(shape.on_chip for shape in shapes):
      continue
    readers = _readers(users, instruction.name)
    if readers and all(reader.operation in _SLICES for reader in readers):
      moved += sum(_bytes(reader.shapes) for reader in readers)
    else:
      moved += _bytes(shapes)
  return moved


def _source(kernel: Computation, name: str) -> Instruction:
  """What an instruction of a kernel is a view of."""
  instruction = kernel[name]
  while instruction.operation in _VIEWS and instruction.operands:
    instruction = kernel[instruction.operands[0]]
  return instruction


def _readers(users: Mapping[str, list[Instruction]], name: str) -> list[Instruction]:
  """Who reads a value of a kernel, or a view of it."""
  found = []
  for user in users.get(name, []):
    found += _readers(users, user.name) if user.operation in ("bitcast", "reshape") else [user]
  return found


def _bytes(shapes: tuple[Shape, ...]) -> int:
  return sum(shape.bytes for shape in shapes if not shape.on_chip)
