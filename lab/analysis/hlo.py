"""Parses the text of a compiled program (XLA's HLO) and counts how often each instruction runs.

XLA's own cost analysis counts the body of a loop once, but a Transformer's blocks are the body of a loop. So this file
follows loops. The text format is not documented as stable; this parser was written for jax 0.10.2 (CPU, and TPU with
libtpu 0.0.42). Next: work.py and communication.py, which read the instructions.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KERNELS = (
  "fusion",
  "fusion-start",
)  # several instructions as one; XLA:GPU of jax 0.12 starts some to run by themselves
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8, "c64": 8}

# NAME = TYPE OPERATION(OPERANDS), ATTRIBUTES. A TYPE may be a nested tuple with layouts: ((f32[2]{0:T(128)}), s32[]).
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"\s*([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Shape(NamedTuple):
  """An array of a compiled program on one device. `on_chip`: whether a TPU keeps it outside of its main memory."""

  dtype: str
  dims: tuple[int, ...]
  on_chip: bool = False

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    return self.size * (1 if self.dtype.startswith("f8") else BYTES.get(self.dtype, 4))


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    shapes: the arrays of the result; tuples are flattened.
    operands: names of instructions in the same computation.
    attributes: the text after the operands.
  """

  name: str
  operation: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  attributes: str
  is_root: bool

  @property
  def op_name(self) -> str:
    """Its origin in the Python program: scopes and primitives, outermost first, separated by slashes."""
    found = _OP_NAME.search(self.attributes)
    return found.group(1) if found else ""

  def attribute(self, name: str) -> str:
    """The value of an attribute without nested braces; for computations their name; "" if there is none."""
    found = re.search(rf"\b{name}=(\{{[^{{}}]*\}}|[^,\s]+)", self.attributes)
    return found.group(1).strip("{}").lstrip("%") if found else ""


Computation = dict[str, Instruction]


class Visit(NamedTuple):
  """An instruction met on a walk through a program.

  Attributes:
    name: of the computation.
    times: how often the instruction runs in total; None if unknown.
    fused: whether it is part of a kernel, so that its result is not written to memory.
  """

  instruction: Instruction
  computation: Computation
  name: str
  times: int | None
  fused: bool


class Each(int):
  """How many rounds a loop has each time that it runs."""


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program of one device: computations by name, and the name of the first one."""

  computations: Mapping[str, Computation]
  entry: str

  def walk(self, rounds: Mapping[str, int] | None = None) -> Iterator[Visit]:
    """Every instruction that may run, with how often it runs. Every branch of a conditional counts as run.

    Args:
      rounds: for loops whose trip count is not in the program, such as a pipeline's units: name of the loop's scope →
        rounds in the whole program, or `Each` time.
    """
    yield from self._walk(self.entry, 1, False, rounds or {})

  def _walk(self, name: str, times: int | None, fused: bool, rounds: Mapping[str, int]) -> Iterator[Visit]:
    computation = self.computations[name]
    for instruction in computation.values():
      yield Visit(instruction, computation, name, times, fused)
      if instruction.operation == "while":
        inside = self.rounds(instruction, computation, times, rounds)
        yield from self._walk(instruction.attribute("body"), inside, fused, rounds)
      else:
        within = fused or instruction.operation in KERNELS
        for called in self.called(instruction):
          yield from self._walk(called, times, within, rounds)

  def unknown_loops(self, rounds: Mapping[str, int] | None = None) -> list[str]:
    """The outermost loops with an unknown number of rounds, by their origin in the Python program."""
    loops = ((visit, visit.instruction) for visit in self.walk(rounds) if visit.instruction.operation == "while")
    return sorted(
      {
        loop.op_name or loop.name
        for visit, loop in loops
        if visit.times is not None and self.rounds(loop, visit.computation, visit.times, rounds or {}) is None
      }
    )

  def called(self, instruction: Instruction) -> list[str]:
    """The computations that an instruction runs once each. Every branch of a conditional counts as run."""
    # `call-start` is a call on another core, such as a TPU7x's cores for communication. In other instructions,
    # `to_apply` names the scalar function of a reduction, which does not count.
    wanted = ("to_apply", "calls") if instruction.operation in ("call", "call-start") else ("calls",)
    if instruction.operation == "conditional":
      wanted = ("true_computation", "false_computation")
    called = [name for kind, name in _CALLED.findall(instruction.attributes) if kind in wanted]
    branches = _BRANCHES.search(instruction.attributes)
    return called + ([name.strip().lstrip("%") for name in branches.group(1).split(",")] if branches else [])

  def rounds(
    self, loop: Instruction, around: Computation, outside: int | None, rounds: Mapping[str, int]
  ) -> int | None:
    """How often a loop's body runs in total, if the loop itself runs `outside` times. None if unknown."""
    trips = self._trips(loop, around)
    if trips is not None:
      return None if outside is None else outside * trips
    path = loop.op_name.split("/")  # ends with the loop itself
    found = rounds.get(path[-2]) if len(path) > 1 else None
    return found if not isinstance(found, Each) else None if outside is None else found * outside

  def _trips(self, loop: Instruction, around: Computation) -> int | None:
    """How often a loop runs: the compiler's annotation, or else computed from a counter with constant bounds."""
    if noted := _TRIPS.search(loop.attributes):
      return int(noted.group(1))
    condition, body = (self.computations[loop.attribute(name)] for name in ("condition", "body"))
    root, compared = self._unfused(next(found for found in condition.values() if found.is_root), condition)
    if root.operation != "compare" or root.attribute("direction") != "LT":
      return None
    counter, limit = compared
    end = next(instruction for instruction in body.values() if instruction.is_root)
    start = around[loop.operands[0]]
    if counter.operation != "get-tuple-element" or {start.operation, end.operation} != {"tuple"}:
      return None
    index = int(counter.attribute("index"))
    first, until = _constant(_source(around[start.operands[index]], around)), _constant(limit)
    following, terms = self._unfused(_source(body[end.operands[index]], body), body)
    added = [n for term in terms if (n := _constant(term)) is not None]
    if following.operation != "add" or not added or added[0] < 1 or first is None or until is None:
      return None
    return max(0, -((first - until) // added[0]))

  def _unfused(self, instruction: Instruction, computation: Computation) -> tuple[Instruction, list[Instruction]]:
    """An instruction and its operands; of a fusion, the last instruction inside."""
    given = [computation[name] for name in instruction.operands]
    if instruction.operation != "fusion":
      return instruction, given
    inside = self.computations[instruction.attribute("calls")]
    root = next(found for found in inside.values() if found.is_root)
    number = lambda found: int(found.attributes.split(")")[0])
    operands = [inside[name] for name in root.operands]
    return root, [given[number(found)] if found.operation == "parameter" else found for found in operands]


def _source(instruction: Instruction, computation: Computation) -> Instruction:
  """The original of a copy; an instruction that is not a copy is its own."""
  while instruction.operation == "copy":
    instruction = computation[instruction.operands[0]]
  return instruction


def _constant(instruction: Instruction) -> int | None:
  written = re.match(r"(-?\d+)\)", instruction.attributes) if instruction.operation == "constant" else None
  return int(written.group(1)) if written else None


def parse(text: str) -> Module:
  """Parses an HLO text. Raises ValueError for an instruction in an unknown format."""
  computations: dict[str, Computation] = {}
  entry, current = "", {}
  for line in re.sub(r'\n(?="|\}\})', " ", text).splitlines():  # a kernel's metadata are on lines of their own
    if header := _COMPUTATION.match(line):
      current = computations.setdefault(header.group(2), {})
      entry = header.group(2) if header.group(1) else entry
    elif found := _INSTRUCTION.match(line):
      root, name, written = found.groups()
      end = _closing(written) if written.startswith("(") else written.find(" ")
      result, called = written[:end], _OPERATION.match(written[end:])
      if not called:
        raise ValueError(f"this line of a compiled program cannot be read: {line.strip()[:200]}")
      operation, rest = called.groups()
      operands, attributes = _split(rest)
      if operation in ("constant", "parameter"):  # their parentheses hold a value or a number, not operands
        attributes = rest
      current[name] = Instruction(name, operation, shapes(result), operands, attributes, bool(root))
  return Module(computations, entry)


def shapes(text: str) -> tuple[Shape, ...]:
  """The arrays of a type such as f32[2,3]{1,0}, or of a tuple of types."""
  return tuple(
    Shape(dtype, tuple(int(dim) for dim in dims.split(",") if dim), "S(" in layout)
    for dtype, dims, layout in _SHAPE.findall(text)
  )


def _split(rest: str) -> tuple[tuple[str, ...], str]:
  """Splits the text after an operation's opening parenthesis into the names of the operands and the attributes."""
  end = _closing("(" + rest) - 1
  return tuple(re.findall(r"%([\w.\-]+)", rest[:end])), rest[end:]


def _closing(text: str) -> int:
  """The index after the parenthesis that closes the one at the start of the text."""
  depth = 0
  for found in re.finditer(r"[()]", text):
    depth += 1 if found.group() == "(" else -1
    if depth == 0:
      return found.end()
  return len(text)
