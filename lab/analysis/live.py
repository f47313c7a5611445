"""The memory of a compiled step over its time: the bytes of all arrays that are still needed, at each instruction.

A compiled program is in the order in which the device runs it, so an array is needed from the instruction that makes it
to the last one that reads it. Arrays that the program updates in place, or only names again, are counted once. That
holds for the state, too, because a step is given its arrays for good (`donate_argnums`). The compiler places arrays
better or worse than that, so its own figure for the worst moment differs.
"""

import collections
from collections.abc import Sequence

from lab.analysis.hlo import Computation, Instruction, Module

# What only names existing arrays.
SAME = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "opt-barrier")


def live(module: Module) -> dict[str, int]:
  """The bytes at each instruction, by its name. All rounds of a loop are alike."""
  found: dict[str, int] = {}
  _follow(module, module.entry, 0, found)
  return found


def _follow(module: Module, name: str, around: int, found: dict[str, int]) -> None:
  """Notes the bytes for a computation, while `around` bytes are needed outside of it."""
  computation = module.computations[name]
  makers: dict[str, frozenset[str]] = {}  # of the arrays that an instruction hands on, by the instruction's name
  last: dict[str, int] = {}  # where the arrays of a maker are read for the last time
  sizes = {key: _bytes(module, instruction) for key, instruction in computation.items()}
  for at, (key, instruction) in enumerate(computation.items()):
    of = lambda names: frozenset().union(*(makers.get(name, frozenset()) for name in names))
    makers[key] = of(_handed_on(module, computation, instruction)) | {key}
    last |= dict.fromkeys(of(instruction.operands) | {key}, at)
    if instruction.is_root:
      last |= dict.fromkeys(makers[key], len(computation))
  now, ends = around, collections.Counter[int]()
  if name == module.entry:
    given = {key: one for key, one in computation.items() if one.operation == "parameter"}
    sizes |= {key: sum(shape.bytes for shape in one.shapes) for key, one in given.items()}
    now += sum(sizes[key] for key in given)
  for key, size in sizes.items():
    ends[last[key]] += size
  for at, (key, instruction) in enumerate(computation.items()):
    now += sizes[key] if instruction.operation != "parameter" else 0
    # A kernel may write into an array that it reads for the last time.
    found[key] = now - (min(sizes[key], ends[at]) if instruction.operation == "fusion" else 0)
    for called in _inside(module, instruction):
      _follow(module, called, now, found)
    for called in module.called(instruction):  # of a kernel, or of what is started
      for inner in module.computations[called]:
        found.setdefault(inner, found[key])
    now -= ends[at]


def _inside(module: Module, instruction: Instruction) -> list[str]:
  """The computations that an instruction runs and whose arrays are in memory, unlike those within a kernel."""
  if instruction.operation == "while":
    return [instruction.attribute("body")]
  return module.called(instruction) if instruction.operation in ("call", "conditional") else []


def _handed_on(module: Module, computation: Computation, instruction: Instruction) -> Sequence[str]:
  """The operands whose arrays may be parts of the result."""
  if instruction.operation in SAME or instruction.operation.endswith("-done"):
    return instruction.operands
  results = zip(instruction.shapes, _results(module, instruction), strict=False)
  written = [shape[:2] for shape, result in results if _updates(result)]
  return [name for name in instruction.operands if any(shape[:2] in written for shape in computation[name].shapes)]


def _results(module: Module, instruction: Instruction) -> list[Instruction | None]:
  """What makes each part of an instruction's result: within a kernel, what it ends with; None if that is not known."""
  if instruction.operation != "fusion":
    return [instruction] * len(instruction.shapes)
  inside = module.computations[instruction.attribute("calls")]
  root = next(one for one in inside.values() if one.is_root)
  roots = [root] if root.operation != "tuple" else [inside[name] for name in root.operands]
  return [_source(one, inside) for one in roots] if len(roots) == len(instruction.shapes) else [None]


def _source(instruction: Instruction, inside: Computation) -> Instruction:
  while instruction.operation in ("bitcast", "copy", "convert"):
    instruction = inside[instruction.operands[0]]
  return instruction


def _updates(instruction: Instruction | None) -> bool:
  """Whether an instruction writes into an array that it reads."""
  return instruction is not None and instruction.operation == "dynamic-update-slice"


def _bytes(module: Module, instruction: Instruction) -> int:
  """Bytes in the device's main memory of the arrays that an instruction makes."""
  kind, shapes = instruction.operation, instruction.shapes
  if kind in SAME or kind.endswith("-done"):
    return 0
  results = _results(module, instruction)
  if len(results) == len(shapes):
    shapes = tuple(shape for shape, result in zip(shapes, results, strict=True) if not _updates(result))
  if kind == "copy-start":
    shapes = shapes[:1]  # the copy, its source, and more
  sizes = [shape.bytes for shape in shapes if not shape.on_chip]
  return max(sizes, default=0) if kind.endswith("-start") else sum(sizes)  # a start has its operands beside its result
