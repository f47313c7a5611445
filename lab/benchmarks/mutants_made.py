"""Makes mutants for mutants.py: code with one small fault, such as `<` for `<=`, as cosmic-ray makes them.

Read `draw` first.
"""

import ast
import collections
import functools
import itertools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LARGE = 1000  # tests compare figures up to rounding, so numbers from here on are doubled, not changed by 1


class Mutant(NamedTuple):
  """One fault: lines that were `was` are `became`. `number` counts what the operator could change in the file."""

  file: str
  line: int
  operator: str
  number: int
  was: str
  became: str
  code: str  # of the whole file

  def described(self) -> dict[str, Any]:
    return {name: value for name, value in self._asdict().items() if name != "code"}


class Double:
  """A cosmic-ray operator: doubles large numbers."""

  @staticmethod
  def mutation_positions(node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    if _is_large(node):
      yield node.start_pos, node.end_pos

  @staticmethod
  def mutate(node: Any, index: int) -> Any:
    return type(node)(f"{node.prefix}(2 * {node.value})", node.start_pos)


def _is_large(node: Any) -> bool:
  return node.type == "number" and abs(ast.literal_eval(node.value)) >= LARGE


@functools.cache
def operators() -> dict[str, Any]:
  """The changes that cosmic-ray makes without settings, by name."""
  from cosmic_ray import plugins

  found = {name.partition("/")[2]: plugins.get_operator(name) for name in plugins.operator_names()}
  return {name: operator() for name, operator in found.items() if not operator.arguments()} | {"Double": Double()}


def sites(source: str) -> dict[int, list[list[tuple[str, int]]]]:
  """The places of a file that can be changed, by line: at each the (operator, number)s that can change it.

  Leaves out annotations of types.
  """
  from cosmic_ray import ast as trees

  found: dict[Any, list[tuple[str, int]]] = collections.defaultdict(list)
  nodes, skipped = list(trees.ast_nodes(trees.get_ast(source))), _annotations(source)
  for name, operator in operators().items():
    number = 0
    for node in nodes:
      for start, end in operator.mutation_positions(node):
        if not any(a <= start < b for a, b in skipped) and not (name == "NumberReplacer" and _is_large(node)):
          found[start, end].append((name, number))
        number += 1
  lines: dict[int, list[list[tuple[str, int]]]] = collections.defaultdict(list)
  for (start, _), choices in sorted(found.items()):
    lines[start[0]].append(choices)
  return lines


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
  nodes = list(ast.walk(ast.parse(source)))
  found = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
  return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found if isinstance(n, ast.expr)]


def mutant(file: str, source: str, line: int, operator: str, number: int) -> Mutant | None:
  """The file with one fault; None if that is not valid Python."""
  from cosmic_ray import mutating

  code = mutating.mutate_code(source, operators()[operator], number)
  try:
    with warnings.catch_warnings(action="ignore"):  # of `is` with a number
      compile(code, file, "exec")
  except (SyntaxError, TypeError):
    return None
  old, new = source.splitlines(), code.splitlines()
  shared = lambda a, b: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
  first, last = shared(old, new), min(shared(old[::-1], new[::-1]), len(old) - line)
  was, became = (" ".join(part.strip() for part in lines[first : len(lines) - last]).strip() for lines in (old, new))
  return Mutant(file, line, operator, number, was, became, code)


def draw(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
  """`count` mutants of these files, each at a place of its own; fewer if there are fewer places."""
  chance = random.Random(seed)
  places = [(f, line, ways) for f, text in sources.items() for line, found in sites(text).items() for ways in found]
  found: list[Mutant] = []
  for file, line, ways in chance.sample(places, len(places)):
    made = mutant(file, sources[file], line, *chance.choice(ways))
    found += [made] if made else []
    if len(found) == count:
      break
  return sorted(found)


def reaching(source: str, line: int, reached: dict[str, Any], file: str) -> list[str]:
  """The tests that reach a statement, the fastest files first, but the file of the module's own tests before them.

  What runs as the module is imported is reached by all tests in files of which a test reaches any line.
  """
  lines, seconds = {int(number): tests for number, tests in reached["lines"][file].items()}, reached["seconds"]
  nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
  head = lambda node: (
    node.lineno,
    max(node.lineno, node.body[0].lineno - 1) if "body" in node._fields else node.end_lineno,
  )
  around = [head(node) for node in nodes if head(node)[0] <= line <= head(node)[1]]
  functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
  first, last = min(around, key=lambda each: each[1] - each[0], default=(line, line))
  here = {number: tests for number, tests in lines.items() if first <= number <= last}
  found = {test for tests in here.values() for test in tests}
  is_called = any(node.body[0].lineno <= line <= node.end_lineno for node in functions)
  if not is_called or (here and not found):
    files = {test.partition("::")[0] for tests in lines.values() for test in tests}
    found = {test for test in seconds if test.partition("::")[0] in files}
  own, file_of = f"test_{Path(file).stem}", lambda test: test.partition("::")[0]
  total = collections.Counter[str]()
  for test in found:
    total[file_of(test)] += seconds[test]
  return sorted(found, key=lambda test: (own not in test, total[file_of(test)], file_of(test), seconds[test], test))
