"""Prints which lines of a Python program a compiled program's collectives come from.

XLA gives most instructions metadata: the scopes and the primitive (`op_name`), and the number of a stack frame. Tables
at the top of the text say which line that is.
"""

import linecache
import re
from pathlib import Path

import jax

from lab.analysis.communication import collective
from lab.analysis.hlo import Computation, Instruction, parse
from lab.lessons.sent import line


def print_origins(program: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[tuple[str, str, str]]:
  """Prints all collectives with the lines that make their operand and use their result, and returns these as text.

  A collective that the compiler adds has the metadata of the operation that makes its operand, or of the one that needs
  its result. Which one depends on XLA's version. So this looks at the instructions before and after it.
  """
  text = program.as_text()
  lines, result = source_lines(text), []
  for visit in parse(text).walk():
    if found := collective(visit, dict(mesh.shape)):
      made = _before(visit.instruction, visit.computation, lines)
      used = _after(visit.instruction, visit.computation, lines, made)
      print(f"sends: {line(found)}", f"  made by: {made}", f"  used by: {used}", sep="\n")
      result.append((found.kind, made, used))
  return result


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
