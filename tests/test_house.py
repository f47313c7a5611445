"""Rules for the repository: how long a file may be, and which package may import which."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The packages that a package may import, in addition to itself. All are in rows above its own, so imports go one way.
MAY_IMPORT = {
  "errors": set(),
  "models": {"errors"},
  "configs": {"errors"},
  "data": {"errors", "models"},
  "training": {"errors", "models"},
  "runtime": {"errors"},
  "strategies": {"errors", "models", "training"},
  "evaluation": {"errors", "models", "data", "training", "strategies"},
  "pretrained": {"errors", "models"},
  "checkpointing": {"errors", "models", "data", "training", "runtime", "strategies", "pretrained"},
  "pages": set(),
  "reporting": {
    "errors",
    "pages",
    "models",
    "data",
    "training",
    "runtime",
    "strategies",
    "evaluation",
    "checkpointing",
  },
  "analysis": {"errors", "models", "configs", "training", "runtime", "strategies"},
}
LIBRARY = set(MAY_IMPORT)  # everything but the programs that users start
MAY_IMPORT |= {"train": LIBRARY - {"analysis"}, "benchmarks": LIBRARY, "tools": LIBRARY | {"benchmarks", "train"}}
PACKAGES = [name for name in MAY_IMPORT if (ROOT / name).is_dir()]
FILES = sorted(f for f in [*ROOT.glob("*.py"), *(f for p in PACKAGES for f in (ROOT / p).rglob("*.py"))])
# Files of strategies/ that are not strategies themselves.
SUPPORT = {
  "__init__",
  "layout",
  "mesh",
  "sharding",
  "sums",
  "base",
  "by_layer",
  "compiler_options",
  "schedule",
  "stage",
}


def package(file: Path) -> str:
  return file.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_one_way(file: Path):
  imported = set()
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.Import):
      imported |= {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      imported.add((node.module or "").split(".")[0])
  ours = imported & MAY_IMPORT.keys()
  assert ours <= MAY_IMPORT[package(file)] | {package(file)}


def test_only_strategies_compare_a_strategys_name():
  for file in FILES:
    if package(file) != "strategies":
      comparisons = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Compare)]
      assert not [c for c in comparisons if re.search(r"strategy(\.name)? (==|in|is|!=) ", ast.unparse(c))], file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files_are_short_and_have_a_docstring(file: Path):
  text, limit = file.read_text(), 250
  if package(file) == "strategies" and file.stem not in SUPPORT:
    limit = 200 if file.parent.name == "pipeline" else 60
  assert len(text.splitlines()) <= limit
  assert ast.get_docstring(ast.parse(text))
