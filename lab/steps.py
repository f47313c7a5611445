"""The steps of a lesson: their source as a page shows it, and what they print. lab/lessons/__init__.py says more."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True)
class LessonStep:
  """A step before it runs. `code` is the source on the page: the step, and before it what it is the first to use.

  Empty for a step of the lesson's `IN_FILE`, whose code the page links to.
  """

  run: Callable[[], Any]
  title: str
  text: str
  code: str


@dataclasses.dataclass(frozen=True)
class Shown:
  """A step after it ran: what it printed, and what it returned."""

  step: LessonStep
  output: str
  data: Any


def steps(lesson: ModuleType) -> list[LessonStep]:
  """The steps of a lesson, in order."""
  source = inspect.getsource(lesson)
  definitions = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
  own, shown, result = {function.__name__ for function in lesson.STEPS}, set(), []

  def uses(name: str) -> Iterator[str]:
    """The lesson's other definitions that this one needs and that no earlier step has shown, in order of use."""
    for node in ast.walk(definitions[name]):
      if isinstance(node, ast.Name) and node.id in definitions and node.id not in own | shown:
        shown.add(node.id)
        yield from uses(node.id)
        yield node.id

  for function in lesson.STEPS:
    title, _, text = inspect.getdoc(function).partition("\n\n")
    parts = [ast.get_source_segment(source, definitions[name]) for name in uses(function.__name__)]
    parts.append(_without_docstring(source, definitions[function.__name__]))
    result.append(
      LessonStep(function, title, text, "" if function in getattr(lesson, "IN_FILE", ()) else "\n\n\n".join(parts))
    )
  return result


def file_of(lesson: ModuleType) -> str:
  """The lesson's file, from the root."""
  return f"{lesson.__name__.replace('.', '/')}.py"


def run(step: LessonStep) -> Shown:
  """Runs a step and captures what it prints."""
  output, data = printed(step.run)
  return Shown(step, output, data)


def printed(call: Callable[[], Any]) -> tuple[str, Any]:
  """What a function prints, and what it returns."""
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    data = call()
  # If FORCE_COLOR is set, rich colors even what is captured.
  return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).strip("\n"), data


def heading(lesson: ModuleType) -> tuple[str, str, str]:
  """A lesson's title, its subject (the sentence below the title) and its imports."""
  source = inspect.getsource(lesson)
  title, _, subject = inspect.getdoc(lesson).partition("\n")[0].partition(": ")
  imports = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
  lines = source.splitlines()[imports[0].lineno - 1 : imports[-1].end_lineno]
  return title, subject[0].upper() + subject[1:], "\n".join(lines)


def _without_docstring(source: str, function: ast.FunctionDef) -> str:
  lines = source.splitlines()
  docstring, end = function.body[0], function.end_lineno
  return "\n".join([*lines[function.lineno - 1 : docstring.lineno - 1], *lines[docstring.end_lineno : end]])
