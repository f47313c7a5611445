"""Moves the code of a fork into one package: train.py becomes NAME/train.py, and `import data` becomes
`from NAME import data`.

What is renamed: the imports, by their positions in the syntax tree; names of modules in strings, where such a module
exists; paths, where such a file exists; commands; and the climb from a module's file to the root of the repository.
Tests and docs stay where they are, beside the package.
"""

import ast
import re

from tools.forking.naming import project
from tools.forking.tree import Files, text_of

STAY = ("tests", "docs", "findings")  # folders of the repository that do not move
PROGRAM = "train.py"
# Beside NAME/configs and NAME/train.py, all that a module finds by its own path is in the root of the repository.
IN_PACKAGE = ("configs", PROGRAM)
# Records and what other programs wrote hold the paths of the moment.
UNTOUCHED = (".jsonl", ".lock", ".csv", ".txt")
TABLE_OF_ROOMS = "tests/test_house.py"  # its names of rooms look like modules
BEGINS_AS_FILE = """
if not __package__:  # started as a file: the package is found from the folder around it
  sys.path.insert(0, str(Path(__file__).parents[1]))
"""


def packaged(files: Files, name: str) -> Files:
  """The files with all code in one package of this name. They have been renamed already."""
  stale = {f"{project(files)}.py"}  # it says that there is no package
  files = {path: content for path, content in files.items() if path not in stale}
  move = Move(name, files)
  result = {move.path(path): move.content(path, content) for path, content in files.items()}
  result[f"{name}/__init__.py"] = f'"""{_first_sentence(files)}"""\n'.encode()
  program = f"{name}/{PROGRAM}"
  result[program] = _starts_as_file(result[program].decode()).encode()
  result["pyproject.toml"] = project_of_package(result["pyproject.toml"].decode(), name).encode()
  return result


class Move:
  """How each file changes when the code moves into the package `name`.

  Attributes:
    rooms: the packages and modules that move, by the names that code imports now.
    modules: the dotted names of all modules that move.
  """

  def __init__(self, name: str, files: Files):
    self.name, self.files = name, files
    self.python = [path for path in files if path.endswith(".py") and path.partition("/")[0] not in STAY]
    self.rooms = {path.partition("/")[0].removesuffix(".py") for path in self.python}
    self.modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in self.python}
    self.folders = {"/".join(path.split("/")[:n]) for path in files for n in range(1, path.count("/") + 1)}
    rooms = "|".join(sorted(self.rooms))
    self._paths = re.compile(rf"(?<![\w./~$\\-])((?:\.\./)*)((?:{rooms})/[\w./-]*)")
    self._dotted = re.compile(rf"""(?<=["'])((?:{rooms})(?:\.\w+)+)(?=["'])""")
    self._commands = re.compile(rf"(?<=-m )((?:{rooms})\.[A-Za-z_.]+)")
    self._found = re.compile(rf"""((?:import_module|find_spec)\(f?["'])((?:{rooms})[."'])""")
    self._from = re.compile(rf"(?<![\w.])from ((?:{rooms})(?:\.\w+)*) import ")
    self._import = re.compile(rf"""(^|[;"'] ?|\\n)import ((?:{rooms})(?:\.\w+)*)(?=$|[;"'\\])""", re.MULTILINE)
    self._root = re.compile(rf"""(\bROOT\)? / f?["']|\{{ROOT\}}/)((?:{rooms})(?:\.py)?)(?=["'/])""")

  def path(self, path: str) -> str:
    top = path.partition("/")[0]
    moves = top in self.rooms if "/" in path else path in self.python
    return f"{self.name}/{path}" if moves else path

  def content(self, path: str, content: bytes) -> bytes:
    text = text_of(content)
    if text is None or path.endswith(UNTOUCHED):
      return content
    if path.endswith("Dockerfile"):
      text = self.copies(text)
    if path.endswith(".json"):  # pages show the commands of records
      return self.commands(text).encode()
    if path.endswith(".py"):
      text = self.imports(text)
      if path in self.python:
        text = self.climbs(text, path.count("/"))
    return self.words(text, dotted=path != TABLE_OF_ROOMS).encode()

  def imports(self, source: str) -> str:
    """A module's own imports. `import a.b` binds `a`, and goes on doing so."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.ImportFrom) and not node.level and self._is_ours(node.module):
        at, line = node.lineno - 1, lines[node.lineno - 1]
        begin = len(line.encode()[: node.col_offset].decode())
        lines[at] = line[:begin] + line[begin:].replace(f"from {node.module}", f"from {self.name}.{node.module}", 1)
      elif isinstance(node, ast.Import) and any(self._is_ours(alias.name) for alias in node.names):
        line = lines[node.lineno - 1]
        said = ast.get_source_segment(source, node) or ""
        lines[node.lineno - 1] = line.replace(said, "; ".join(map(self._imported, node.names)), 1)
    return "".join(lines)

  def _is_ours(self, module: str | None) -> bool:
    return bool(module) and str(module).partition(".")[0] in self.rooms

  def _imported(self, alias: ast.alias) -> str:
    """One name of an import statement, as a statement of its own."""
    name, named = alias.name, f" as {alias.asname}" if alias.asname else ""
    if not self._is_ours(name):
      return f"import {name}{named}"
    if named:
      around, _, last = f"{self.name}.{name}".rpartition(".")
      return f"from {around} import {last}{named}"
    top, _, rest = name.partition(".")
    return f"from {self.name} import {top}" + (f"; import {self.name}.{name}" if rest else "")

  def climbs(self, source: str, depth: int) -> str:
    """`Path(__file__).parents[N]` that reaches the root of the repository, from a file so many folders below it."""
    after = "|".join(map(re.escape, IN_PACKAGE))
    pattern = rf"""(?<=__file__\)\.parents\[){depth}(?=\])(?!\] / "(?:{after})")"""
    return re.sub(pattern, str(depth + 1), source)

  def words(self, text: str, dotted: bool = True) -> str:
    """What a text says of modules, paths and commands; also code in strings."""
    name, program = self.name, re.escape(PROGRAM)
    text = self._paths.sub(self._moved_path, text)
    text = re.sub(rf"(\bpython[\d.]* (?:-\w+ )?){program}\b", rf"\1-m {name}.train", text)
    text = re.sub(rf'((?:"python"|sys\.executable|first_process"), )"{program}"', rf'\1"-m", "{name}.train"', text)
    text = re.sub(rf"(?<=^TRAIN := ){program}", f"-m {name}.train", text, flags=re.MULTILINE)
    text = re.sub(rf"(?<=\]\()((?:\.\./)*){program}(?=[)#])", rf"\1{name}/{PROGRAM}", text)
    text = self.commands(text)
    text = self._found.sub(rf"\1{name}.\2", text)
    text = self._from.sub(rf"from {name}.\1 import ", text)
    text = self._import.sub(lambda found: f"{found[1]}{self._imported(ast.alias(found[2]))}", text)
    text = self._root.sub(rf"\1{name}/\2", text)
    return self._dotted.sub(lambda found: self._moved_module(found[0]), text) if dotted else text

  def copies(self, text: str) -> str:
    """In a Dockerfile, the lines that copy what moves copy the package."""
    rooms = "|".join(sorted(self.rooms))
    return re.sub(rf"(^COPY ({rooms})\b.*\n)+", f"COPY {self.name} {self.name}/\n", text, flags=re.MULTILINE)

  def commands(self, text: str) -> str:
    """`-m` and a module."""
    return self._commands.sub(lambda found: self._moved_module(found[0]), text)

  def _moved_path(self, found: re.Match[str]) -> str:
    up, path = found[1], found[2]
    bare = path.rstrip("/.")
    # Also a file that one is told to write, such as data/NAME.py. Those of tests are named as from their folder.
    around, _, file = bare.rpartition("/")
    may_come = around in self.folders and re.fullmatch(r"(?!test_)\w+\.py", file)
    exists = bare in self.files or bare in self.folders or may_come
    return f"{up}{self.name}/{path}" if exists else found[0]

  def _moved_module(self, dotted: str) -> str:
    """A module's dotted name, or that of something in it. Names of fields look alike, but there is no such module."""
    parts = dotted.rstrip(".").split(".")
    exists = any(".".join(parts[:n]) in self.modules for n in range(len(parts), 1, -1)) or parts[1:] == ["NAME"]
    return f"{self.name}.{dotted}" if exists else dotted


def _starts_as_file(source: str) -> str:
  """The program, which the launcher starts as a file: then Python looks for modules in its folder, not around it."""
  docstring = ast.parse(source).body[0]
  lines = source.splitlines(keepends=True)
  end = docstring.end_lineno or 0
  return "".join(lines[:end]) + "\nimport sys\nfrom pathlib import Path\n" + BEGINS_AS_FILE + "".join(lines[end:])


def _first_sentence(files: Files) -> str:
  found = re.search(r'^description = "(.*)"$', files["pyproject.toml"].decode(), re.MULTILINE)
  return found[1] if found else "Training code."


def project_of_package(text: str, name: str) -> str:
  """pyproject.toml: the package is built with all its files, and the tools look for code in it."""
  build = (
    f'[tool.setuptools.packages.find]\ninclude = ["{name}", "{name}.*"]\n\n'
    f'[tool.setuptools.package-data]\n"*" = ["*.js", "*.css", "*.json", "*.md"]\n'
  )
  text = re.sub(r"^\[tool\.setuptools\]\n(?:.+\n)+", lambda _: build, text, flags=re.MULTILINE)
  text = text.replace('  "E731",', '  "E501",  # paths and modules are longer by the name of the package\n  "E731",')
  text = re.sub(r'(?<="error::FutureWarning:)\([^)]*\)', name, text)
  text = text.replace('testpaths = ["tests", "projects"]', f'testpaths = ["tests", "{name}/projects"]')
  files = re.search(r"^\[tool\.mypy\]\nfiles = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
  if files:
    inside = re.sub(r'"([\w.]+)"', rf'"{name}/\1"', files[1])
    text = text[: files.start(1)] + inside + text[files.end(1) :]
  return text
