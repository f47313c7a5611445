"""Which lines of Python source a compiled program's collectives come from, and those that XLA warns of.

XLA gives most instructions metadata: the scopes and the primitive (`op_name`), and the number of a stack frame. Tables
at the top of the text say which line that is.
"""

import linecache
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lab.analysis.communication import Collective, collective
from lab.analysis.hlo import Computation, Instruction, parse

_INVOLUNTARY = re.compile(
  r"Involuntary full rematerialization\. The compiler cannot go from sharding (?P<before>.*?) to (?P<after>.*?) "
  r"efficiently for HLO operation (?P<name>\S+) = (?P<array>\w+\[[\d,]*\]).*? (?P<operation>[\w\-]+)\(.*?"
  r'metadata=\{op_name="(?P<scope>[^"]*)"(?: stack_frame_id=(?P<frame>\d+))?'
)


class Origin(NamedTuple):
  """A collective, with the lines that make its operand and use its result, as FILE:LINE and the line itself."""

  collective: Collective
  made: str
  used: str


def origins(text: str, mesh: Mapping[str, int]) -> list[Origin]:
  """All collectives of a compiled program, with their lines.

  A collective that the compiler adds has the metadata of the operation that makes its operand, or of the one that needs
  its result. Which one depends on XLA's version. So this looks at the instructions before and after it.

  Args:
    mesh: the size of each mesh axis.
  """
  lines, result = source_lines(text), []
  for visit in parse(text).walk():
    if found := collective(visit, mesh):
      made = _before(visit.instruction, visit.computation, lines)
      result.append(Origin(found, made, _after(visit.instruction, visit.computation, lines, made)))
  return result


def warnings(said: str, text: str) -> tuple[str, ...]:
  """What XLA says of involuntary full rematerialization, each as a sentence that names the line.

  Args:
    said: what it wrote to standard error while it compiled.
    text: the compiled program.
  """
  lines, result = source_lines(text), dict[str, None]()
  for found in _INVOLUNTARY.finditer(said):
    where = lines.get(found["frame"] or "") or found["scope"]
    where = f"argument {where}" if found["operation"] == "parameter" else where
    result[
      f"involuntary full rematerialization: each device gathers all of an array of which it has {found['array']}, "
      f"to go from sharding {found['before']} to {found['after']}\n  made by: {where}"
    ] = None
  return tuple(result)


def source_lines(text: str) -> dict[str, str]:
  """The source line of each stack frame of a compiled program, as FILE:LINE and the line itself."""
  files = dict(re.findall(r'^(\d+) "(.*[/\\].*)"$', text, re.MULTILINE))
  places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+)", text, re.MULTILINE)
  shown = {
    number: f"{Path(files[file]).name}:{at}: {linecache.getline(files[file], int(at)).strip()}"
    for number, file, at in places
    if file in files
  }
  return {
    frame: shown.get(place, "") for frame, place in re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.MULTILINE)
  }


def _line(instruction: Instruction, lines: dict[str, str]) -> str:
  """The line of an instruction; "" if it has none."""
  return lines.get(instruction.attribute("stack_frame_id"), "")


def _before(instruction: Instruction, computation: Computation, lines: dict[str, str]) -> str:
  """The line of the nearest operand that has one, or the argument that the operand is."""
  operands = [computation[name] for name in instruction.operands]
  for one in operands:
    if found := _line(one, lines):
      return found
    if one.operation == "parameter":
      return f"argument {one.op_name}"
  return next((found for one in operands if (found := _before(one, computation, lines))), "")


def _after(instruction: Instruction, computation: Computation, lines: dict[str, str], made: str) -> str:
  """The first line after the one that made the operand: the collective's own, or that of the nearest user."""
  if (own := _line(instruction, lines)) not in ("", made):
    return own
  users = [one for one in computation.values() if instruction.name in one.operands]
  return next((found for one in users if (found := _after(one, computation, lines, made))), "")
