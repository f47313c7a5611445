"""Rules for the repository: how long a file may be, and which package may import which. A test for each rule."""

import ast
import functools
import re
from pathlib import Path

import strategies

ROOT = Path(__file__).parents[1]
CODE = Path(strategies.__file__).parents[1]  # the root, or the package of a fork that is one package
# The rooms that a room may import, in addition to itself. All are in rows above its own, so imports go one way. A room
# inside another has a row of its own if others may import it without the one around it, or it must not import that.
MAY_IMPORT = {
  "errors": set(),
  "limits": {"errors"},
  "runtime.storage": {"errors"},
  "models": {"errors"},
  "configs": {"errors"},
  "data": {"errors", "limits", "runtime.storage", "models", "configs"},
  "training": {"errors", "models", "configs"},
  "runtime": {"errors", "runtime.storage"},
  "strategies": {"errors", "models", "training"},
  "reporting.evaluation": {"errors", "models", "data", "training", "strategies"},
  "checkpointing.pretrained": {"errors", "limits", "models"},
  "reporting.pages": set(),
}
MAY_IMPORT["checkpointing"] = MAY_IMPORT.keys() - {"configs", "reporting.evaluation", "reporting.pages"}
MAY_IMPORT["reporting"] = set(MAY_IMPORT)
MAY_IMPORT["job"] = set(MAY_IMPORT)
TRAINER = set(MAY_IMPORT)  # what a run needs
MAY_IMPORT["train"] = TRAINER
MAY_IMPORT["lab"] = TRAINER | {"train"}
MAY_IMPORT["tools"] = TRAINER | {"lab"}
MAY_IMPORT["benchmarks"] = set()  # a file that says what its commands are called now
MAY_IMPORT["meshwright"] = MAY_IMPORT["__init__"] = set()  # what `import meshwright` says; the same of a package
PACKAGES = [name for name in MAY_IMPORT if (CODE / name).is_dir()]  # at the top
FILES = sorted(f for f in [*CODE.glob("*.py"), *(f for p in PACKAGES for f in (CODE / p).rglob("*.py"))])


def room(module: str) -> str:
  """The smallest room of a module that has a row; its package at the top, if none has."""
  parts = module.removeprefix(f"{CODE.name}.").split(".")
  return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in MAY_IMPORT), parts[0])


def package(file: Path) -> str:
  return room(".".join(file.relative_to(CODE).with_suffix("").parts))


@functools.cache
def parsed(file: Path) -> ast.Module:
  return ast.parse(file.read_text())


def imported(file: Path) -> set[str]:
  """The rooms that a file imports from, at its top or in a function."""
  found = set()
  for node in ast.walk(parsed(file)):
    if isinstance(node, ast.Import):
      found |= {room(alias.name) for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {room(f"{node.module}.{alias.name}") for alias in node.names}
  return found


def test_imports_go_one_way():
  for file in FILES:
    up = (imported(file) & MAY_IMPORT.keys()) - MAY_IMPORT[package(file)] - {package(file)}
    assert not up, f"{file} must not import {up}"


def test_each_file_beside_the_layout_is_a_strategy():
  """`ls strategies` is the README's table, the value that they are made of, and the package that runs it."""
  files = {path.stem for path in (CODE / "strategies").glob("*.py")} - {"__init__", "layout"}
  assert files == set(strategies.names())
  assert [path.parent.name for path in (CODE / "strategies").glob("*/__init__.py")] == ["execution"]
  listed = re.findall(r"^\| \[`(\w+)`\]\(strategies/(\w+)\.py\)", (ROOT / "README.md").read_text(), re.MULTILINE)
  assert sorted(name for name, file in listed if name == file) == strategies.names()


def test_only_strategies_compare_a_strategys_name():
  for file in FILES:
    if package(file) != "strategies":
      comparisons = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Compare)]
      assert not [c for c in comparisons if re.search(r"strategy(\.name)? (==|in|is|!=) ", ast.unparse(c))], file


def test_files_are_short():
  for file in FILES:
    is_strategy = file.parent == CODE / "strategies" and re.search("^LAYOUT = ", file.read_text(), re.MULTILINE)
    lines, limit = len(file.read_text().splitlines()), 60 if is_strategy else 350
    assert lines <= limit, f"{file} has {lines} lines, more than {limit}"


def test_every_file_has_a_docstring():
  assert [file for file in FILES if not ast.get_docstring(parsed(file))] == []
