"""Counts a compiled program's FLOPs and its memory traffic."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lab.analysis import calls
from lab.analysis.communication import KINDS
from lab.analysis.hlo import KERNELS, Computation, Instruction, Module, Shape

# Instructions that move no data: they name values, group them or control the flow.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "call-start",
  "async-start", "after-all", "iota", "partition-id", "replica-id", "optimization-barrier", "domain", "opt-barrier",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
Of = Callable[[Instruction, Computation], float]
_VIEWS = {"bitcast", "reshape", "copy", "convert", "transpose"}


def flops(module: Module, rounds: Mapping[str, int] | None = None) -> float:
  """FLOPs of all matrix products that one device runs; a multiplication and an addition are two.

  Loops with an unknown number of rounds (`Module.unknown_loops`) and unknown calls (`calls.unknown`) count as 0.

  Args:
    rounds: as in `Module.walk`.
  """
  return sum((visit.times or 0) * _products(visit.instruction, visit.computation) for visit in module.walk(rounds))


def float8_flops(module: Module, rounds: Mapping[str, int] | None = None) -> float:
  """Those of them whose operands are float8 numbers."""
  return sum((visit.times or 0) * _of_float8(visit.instruction, visit.computation) for visit in module.walk(rounds))


def _of_float8(instruction: Instruction, computation: Computation) -> float:
  """FLOPs of an instruction that multiplies float8 numbers."""
  if instruction.operation not in ("dot", "convolution", "custom-call"):
    return 0.0
  operands = [computation[name].shapes[0].dtype for name in instruction.operands[:2] if name in computation]
  are_float8 = len(operands) == 2 and all(dtype.startswith("f8") for dtype in operands)
  return _products(instruction, computation) if are_float8 else 0.0


def _products(instruction: Instruction, computation: Computation) -> float:
  """FLOPs of an instruction, without the computations that it calls."""
  counted = {"dot": _dot, "convolution": _convolution, "custom-call": calls.flops}
  return (instruction.operation in counted and counted[instruction.operation](instruction, computation)) or 0.0


class Kernel(NamedTuple):
  """What a kernel does each time that it runs: FLOPs, those of float8 numbers, and bytes of memory traffic."""

  flops: float = 0.0
  float8: float = 0.0
  bytes: float = 0.0


def kernel(module: Module, instruction: Instruction, computation: Computation) -> Kernel:
  """The work of an instruction that is not part of a kernel."""
  if instruction.operation in _FREE or instruction.operation.endswith("-done"):
    return Kernel()
  flops, float8 = (_with_inside(module, instruction, computation, of) for of in (_products, _of_float8))
  return Kernel(flops, float8, _moved(module, instruction, computation))


def _with_inside(module: Module, instruction: Instruction, computation: Computation, of: Of) -> float:
  """FLOPs of an instruction and of all that it calls, counted by `of`."""
  inside = [
    (part, module.computations[name])
    for name in module.called(instruction)
    for part in module.computations[name].values()
  ]
  return of(instruction, computation) + sum(_with_inside(module, *part, of) for part in inside)


def _dot(product: Instruction, computation: Computation) -> float:
  left = computation[product.operands[0]].shapes[0]
  contracted = product.attribute("lhs_contracting_dims")
  return 2 * product.shapes[0].size * math.prod(left.dims[int(i)] for i in contracted.split(",") if i)


def _convolution(product: Instruction, computation: Computation) -> float:
  """FLOPs of a convolution. TPU programs write every product as one.

  A product's batch dimension becomes a spatial dimension whose window meets one input at each output, and otherwise
  padding or holes. Those do not count.
  """
  left, right = (computation[name].shapes[0] for name in product.operands[:2])
  labels = product.attribute("dim_labels")
  of_left, of_right, of_out = re.split("_|->", labels)
  window = dict(re.findall(r"(\w+)=(\S+)", product.attribute("window")))
  operations = 2 * right.dims[of_right.index("i")] * right.dims[of_right.index("o")] * left.dims[of_left.index("b")]
  for dim in (label for label in of_out if label.isdigit()):
    size = right.dims[of_right.index(dim)]
    field = lambda name, default, dim=dim: window[name].split("x")[int(dim)] if name in window else default
    operations *= _hits(
      left.dims[of_left.index(dim)],
      product.shapes[0].dims[of_out.index(dim)],
      size,
      int(field("stride", "1")),
      int(field("pad", "0_0").split("_")[0]),
      int(field("lhs_dilate", "1")),
      int(field("rhs_dilate", "1")),
    )
  return operations


@functools.cache
def _hits(inputs: int, outputs: int, size: int, stride: int, pad: int, holes: int, spread: int) -> int:
  """How many pairs of an output and a window position meet an input, not padding or a hole, along one dimension.

  Args:
    holes: dilation of the input; spread: dilation of the window.
  """
  at = np.arange(outputs)[:, None] * stride + np.arange(size)[None] * spread - pad
  return int(((at >= 0) & (at <= (inputs - 1) * holes) & (at % holes == 0)).sum())


def traffic(module: Module, rounds: Mapping[str, int] | None = None) -> float:
  """Bytes that one device reads from and writes to its memory, if no cache keeps anything between kernels.

  A kernel reads its operands once and writes its result once. If it only slices an array, the slice counts. If it
  updates an array in place, the update counts.
  """
  unfused = (visit for visit in module.walk(rounds) if not visit.fused)
  return sum((visit.times or 0) * kernel(module, visit.instruction, visit.computation).bytes for visit in unfused)


def _moved(module: Module, instruction: Instruction, computation: Computation) -> int:
  operands = [computation[name].shapes for name in instruction.operands if name in computation]
  if instruction.operation in KERNELS:
    starts = instruction.operation == "fusion-start"  # result: the operands again, the results, a flag
    result = instruction.shapes[sum(map(len, operands)) : -1] if starts else instruction.shapes
    return _moved_by_kernel(module, instruction.attribute("calls"), operands, result)
  if instruction.operation == "custom-call":
    return calls.traffic(instruction, computation)
  if instruction.operation == "dynamic-update-slice":
    return 2 * _bytes(operands[1])
  if instruction.operation in _SLICES:
    return _slice(operands[0][0], instruction.shapes[0])
  if instruction.operation == "copy-start":  # result: the copy, the operand again, a flag
    return _bytes(operands[0]) + _bytes(instruction.shapes[:1])
  if instruction.operation == "slice-start":  # result: the operand again, the slice, a flag
    return _slice(operands[0][0], instruction.shapes[1])
  if instruction.operation.endswith("-start"):  # result: the operands again, the outputs, flags; or the outputs alone
    given = sum(map(len, operands))
    return sum(map(_bytes, operands)) + _bytes(instruction.shapes[given : 2 * given] or instruction.shapes)
  return sum(map(_bytes, operands)) + _bytes(instruction.shapes)


def _slice(source: Shape, piece: Shape) -> int:
  """Bytes that are read of the source and written to the piece."""
  return (0 if source.on_chip else piece.bytes) + _bytes((piece,))


def _moved_by_kernel(module: Module, name: str, operands: list[tuple[Shape, ...]], result: tuple[Shape, ...]) -> int:
  kernel = module.computations[name]
  root = next(instruction for instruction in kernel.values() if instruction.is_root)
  ends = root.operands if root.operation == "tuple" else (root.name,)
  moved = sum(_written(module, kernel, end, shape) for end, shape in zip(ends, result, strict=False))
  for number, shapes in enumerate(operands):
    moved += min(_bytes(shapes), _read(module, name, number))
  return moved


def _written(module: Module, kernel: Computation, name: str, whole: Shape) -> int:
  """Bytes that a kernel writes of a result: all of them, or only the update if it updates an array in place."""
  instruction = kernel[name]
  while instruction.operation in _VIEWS and instruction.operands:
    instruction = kernel[instruction.operands[0]]
  if whole.on_chip or _passes(instruction):
    return 0
  if instruction.operation == "dynamic-update-slice":
    return kernel[instruction.operands[1]].shapes[0].size * whole.bytes // max(whole.size, 1)
  if instruction.operation == "fusion":
    inner = module.computations[instruction.attribute("calls")]
    root = next(instruction for instruction in inner.values() if instruction.is_root)
    return whole.bytes if root.operation == "tuple" else _written(module, inner, root.name, whole)
  return whole.bytes


def _read(module: Module, name: str, number: int) -> int:
  """Bytes that a kernel reads of its operand with this number, including the kernels inside it."""
  kernel = module.computations[name]
  parameter = next(
    instruction
    for instruction in kernel.values()
    if instruction.operation == "parameter" and instruction.attributes.startswith(f"{number})")
  )
  read, waiting = 0, [parameter.name]
  while waiting:
    value = waiting.pop()
    for reader in kernel.values():
      if value not in reader.operands:
        continue
      if _passes(reader):
        continue
      if reader.operation in _SLICES:
        read += _bytes(reader.shapes)
      elif reader.operation in ("bitcast", "reshape", "tuple") or _is_view(module, reader):
        waiting.append(reader.name)
      elif reader.operation == "fusion":
        read += _read(module, reader.attribute("calls"), reader.operands.index(value))
      elif not (reader.operation == "dynamic-update-slice" and reader.operands[0] == value):
        return _bytes(parameter.shapes)
  return read


def _is_view(module: Module, instruction: Instruction) -> bool:
  """Whether an instruction is a kernel in a kernel that only passes its operand on, as on TPU7x."""
  if instruction.operation != "fusion":
    return False
  inside = module.computations[instruction.attribute("calls")].values()
  return {part.operation for part in inside} <= {"parameter", "bitcast", "copy"}


def _passes(instruction: Instruction) -> bool:
  """Whether an instruction in a kernel is part of a collective that runs beside it, or passes its buffers on."""
  beside = instruction.operation == "custom-call" and calls.target(instruction).startswith("AsyncCollective")
  return beside or instruction.operation in (*KINDS, "parameter")


def _bytes(shapes: tuple[Shape, ...]) -> int:
  return sum(shape.bytes for shape in shapes if not shape.on_chip)
