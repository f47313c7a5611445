"""The promises about how the repository reads: sizes of files, and who may import whom."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("strategies", "training", "models", "data", "configs", "analysis", "tools", "benchmarks")
FILES = sorted(f for f in [*ROOT.glob("*.py"), *(f for p in PACKAGES for f in (ROOT / p).rglob("*.py"))])

# Whom a room may import, itself aside. Imports go one way: train.py and tools → strategies → training → models, data.
MAY_IMPORT = {
  "errors": set(),
  "models": {"errors"},
  "data": {"errors", "models"},  # of models, the config alone
  "training": {"errors", "models", "data"},
  "strategies": {"errors", "models", "training"},
  "configs": {"errors"},
  "analysis": {"errors", "models", "training", "strategies"},
  "tools": {"errors", "models", "data", "training", "strategies", "configs", "analysis", "benchmarks", "train"},
  "benchmarks": {"errors", "models", "data", "training", "strategies", "configs", "analysis"},
  "train": {"errors", "models", "data", "training", "strategies", "configs"},
}
# Not strategies themselves.
LONGER = {f"strategies/{name}.py" for name in ("__init__", "layout", "base", "schedule", "stage")}


def room(file: Path) -> str:
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
  assert ours <= MAY_IMPORT[room(file)] | {room(file)}


def test_nothing_outside_strategies_asks_which_strategy_it_is():
  for file in FILES:
    if room(file) != "strategies":
      assert not re.search(r"strategy(\.name)? (==|in|is|!=) ", file.read_text()), file


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are_for(file: Path):
  name, text = file.relative_to(ROOT).as_posix(), file.read_text()
  limit = 250
  if room(file) == "strategies" and name not in LONGER:
    limit = 200 if file.stem == "pipeline" else 60
  assert len(text.splitlines()) <= limit
  assert ast.get_docstring(ast.parse(text))
