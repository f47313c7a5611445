"""The tests of a slim fork: without the functions that are about what was left out.

A statement at the top of a test file goes if it uses a name that is not there any more, or has a word of a feature that
was left out (`Feature.words`), or names a file that is not there. What uses it goes, too, also in other files.
"""

import ast
import re
from collections.abc import Callable, Iterator

from tools.forking.tree import Files

VARIANTS = "tests/variants.py"
FILES = re.compile(r"golden|\bkept\b")  # folders of files that tests read, and that are not copied
Names = Callable[[ast.AST], set[str]]  # the names that code imports and that are not there


class Trimmed:
  """A test file, or a helper of tests, without what cannot run. `lost`: the names that it had and has no more."""

  def __init__(self, source: str, missing: Names, words: re.Pattern[str] | None):
    self.lines, self.tree = source.splitlines(keepends=True), ast.parse(source)
    self.lost = set[str]()
    gone = list[ast.stmt]()
    rest = self.tree.body[1:] if ast.get_docstring(self.tree) else list(self.tree.body)
    while more := [node for node in rest if node not in gone and self._cannot_run(node, missing, words)]:
      gone += more
      self.lost |= {name for node in more for name in defined(node)}
    self.gone = gone
    left = [] if any("autouse=True" in self._code(node) for node in gone) else [n for n in rest if n not in gone]
    self.tests = [n for n in left if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]

  def _cannot_run(self, node: ast.stmt, missing: Names, words: re.Pattern[str] | None) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
      self.lost |= missing(node)
      return False  # its other names may be needed; what is not used is removed at the end (tree.tidy)
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    names |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}  # fixtures
    return bool(names & self.lost or missing(node) or (words and words.search(self._code(node))))

  def _code(self, node: ast.stmt) -> str:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return "".join(self.lines[first - 1 : node.end_lineno])

  def text(self, here: Callable[[str, str], bool]) -> str:
    """The source that is left. `here` says whether an import of a name from a module can stay."""
    lines = list(self.lines)
    for node in self.gone:
      first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
      lines[first - 1 : node.end_lineno] = [""] * ((node.end_lineno or first) - first + 1)
    for node in self.tree.body:
      if isinstance(node, ast.ImportFrom) and node.module:
        names = [alias for alias in node.names if here(node.module, alias.name)]
        if len(names) < len(node.names):
          span = slice(node.lineno - 1, node.end_lineno)
          kept = ast.unparse(ast.ImportFrom(node.module, names, 0)) + "\n" if names else ""
          lines[span] = [kept] + [""] * ((node.end_lineno or 0) - node.lineno)
      elif isinstance(node, ast.Import) and not all(here(alias.name, "") for alias in node.names):
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
    return "".join(lines)


def defined(node: ast.stmt) -> Iterator[str]:
  """The names that a statement at the top of a file defines."""
  if isinstance(node, ast.FunctionDef | ast.ClassDef):
    yield node.name
  for target in (
    node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
  ):
    yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


class Tests:
  """The tests of a fork in which `is_here` says which names of which modules of this repository are left."""

  def __init__(self, every: Files, is_here: Callable[[str, str], bool], folders: set[str], words: str):
    self.folders = folders
    self.is_here, self.words = is_here, re.compile(words, re.IGNORECASE) if words else None
    self.sources = {path: content.decode() for path, content in every.items() if re.fullmatch(r"tests/.*\.py", path)}
    self.helpers = {p.removeprefix("tests/")[:-3]: p for p in self.sources if p.count("/") == 1 and "/test_" not in p}
    # Folders of tests that are no folder of code are packages of helpers with files of their own.
    apart = {path.split("/")[1] for path in self.sources if path.count("/") > 1}
    self.apart = apart - {path.partition("/")[0] for path in every if not path.startswith("tests/")}
    self.lost = {name: set[str]() for name in self.helpers}
    while True:
      helpers = {name: self._trimmed(path) for name, path in self.helpers.items()}
      lost = {name: each.lost for name, each in helpers.items()}
      if lost == self.lost:
        break
      self.lost = lost
    self.trimmed = {path: self._trimmed(path) for path in self.sources}

  def _trimmed(self, path: str) -> Trimmed:
    return Trimmed(self.sources[path], self.missing, self.words_for(path))

  def words_for(self, path: str) -> re.Pattern[str] | None:
    """A helper may name a feature: what it cannot do without goes by its imports. Variants are cases of tests."""
    return self.words if "/test_" in path or path == VARIANTS else FILES

  def here(self, module: str, name: str) -> bool:
    if module in self.helpers:
      return name not in self.lost[module]
    return module.partition(".")[0] not in self.apart and self.is_here(module, name)

  def missing(self, code: ast.AST) -> set[str]:
    """The names that code imports and that are not there, or takes from a module of helpers."""
    found = set[str]()
    for node in ast.walk(code):
      if isinstance(node, ast.Import):
        found |= {a.asname or a.name.partition(".")[0] for a in node.names if not self.here(a.name, "")}
      elif isinstance(node, ast.ImportFrom) and node.module:
        found |= {a.asname or a.name for a in node.names if not self.here(node.module, a.name)}
      elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.helpers:
        found |= {node.attr} & self.lost[node.value.id]
    return found

  def is_about(self, path: str) -> bool:
    """Whether a test is about a folder that is there: tests mirror the tree."""
    folder = path.split("/")[1]
    return folder.endswith(".py") or folder in self.folders

  def files(self) -> Files:
    """The test files that still have a test, and the helpers that they import."""
    kept = {path for path, each in self.trimmed.items() if "/test_" in path and each.tests and self.is_about(path)}
    waiting, found = [*kept, "tests/conftest.py", "tests/budget.py", "tests/shares.py", "tests/skips.py"], Files()
    waiting += ["tests/contract.py"] if "projects" in self.folders else []
    while waiting:
      path = waiting.pop()
      if path in self.trimmed and path not in found:
        text = self.trimmed[path].text(self.here)
        found[path] = text.encode()
        modules = {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
        waiting += [self.helpers[name] for name in modules & self.helpers.keys()]
    return found
