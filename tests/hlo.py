"""Reads compiled programs: the floating-point operations of matrix products, by the loops they stand in."""

import dataclasses
import math
import re

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\([^()]*(?:\([^()]*\)[^()]*)*\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass
class Work:
  """Operations that a piece of program always does, and the loops in it that may run any number of rounds."""

  flops: float = 0
  loops: list["Loop"] = dataclasses.field(default_factory=list)

  def __add__(self, other: "Work") -> "Work":
    return Work(self.flops + other.flops, self.loops + other.loops)


@dataclasses.dataclass
class Loop:
  """`rounds` is None where it is decided while the program runs. `body` is one round."""

  rounds: int | None
  body: Work

  def total(self) -> float:
    """Of a loop whose rounds, and those of the loops in it, are known."""
    assert self.rounds is not None
    return self.rounds * (self.body.flops + sum(loop.total() for loop in self.body.loops))


def work(text: str) -> Work:
  """What the entry computation of an HLO module does on one device. Loops without matrix products are left out."""
  computations: dict[str, list[re.Match]] = {}
  entry, current = "", []
  for line in text.splitlines():
    header = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
    if header:
      current = computations.setdefault(header.group(2), [])
      entry = header.group(2) if header.group(1) else entry
    elif found := _INSTRUCTION.match(line):
      current.append(found)
  return _work(computations, entry)


def _work(computations: dict[str, list[re.Match]], name: str) -> Work:
  shapes = {found.group(1): _dims(found.group(2)) for found in computations[name]}
  done = Work()
  for found in computations[name]:
    _, result, operation, rest = found.groups()
    if operation == "dot":
      left = re.findall(r"%([\w.\-]+)", rest)[0]
      contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
      assert contracted is not None
      sizes = [shapes[left][int(i)] for i in contracted.group(1).split(",") if i]
      done += Work(2 * math.prod(_dims(result)) * math.prod(sizes))
    elif operation == "while":
      body = re.search(r"body=%?([\w.\-]+)", rest)
      assert body is not None
      known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
      loop = Loop(int(known.group(1)) if known else None, _work(computations, body.group(1)))
      if loop.body.flops or loop.body.loops:
        done += Work(loops=[loop])
    else:
      called = _CALLED.findall(rest)
      branches = re.search(r"branch_computations=\{([^}]*)\}", rest)
      called += re.findall(r"%?([\w.\-]+)", branches.group(1)) if branches else []
      for callee in called:
        done += _work(computations, callee)
  return done


def _dims(shape: str) -> list[int]:
  found = re.match(r"\w+\[([\d,]*)\]", shape)
  return [int(size) for size in found.group(1).split(",") if size] if found else []
