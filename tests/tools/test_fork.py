"""tools.fork: the name of a fork, its package, and what it leaves out.

The files here are small. test_fork_run.py makes real forks and trains in them.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import one_sentence

from tools import fork
from tools.forking import naming, packaging, tree

PROJECT = b"""[project]
name = "meshwright"
version = "0.1.0"
description = "What it is."

[tool.setuptools]
packages = []
py-modules = ["meshwright"]

[tool.mypy]
files = ["data", "train.py"]
"""
SMALL = {
  "pyproject.toml": PROJECT,
  "LICENSE": b"Copyright (c) The Meshwright authors\n",
  "meshwright.py": b'"""Says that there is no package."""\n',
  "train.py": b'"""The program.\n\n    python train.py --config=configs/fsdp.py\n"""\n\nimport data\n',
  "data/__init__.py": b'"""Data."""\n\nDATASETS = {"text": "data.text"}\nFIELD = "data.name"\n',
  "data/text.py": b'"""Texts, in ~/.cache/meshwright/data."""\n',
  "configs/fsdp.py": b'"""A config."""\n',
  "docs/data.md": b"# Meshwright\n\n`python -m data.text` is [data/text.py](../data/text.py)"
  b"; MESHWRIGHT_SHARE=1, \xc3\x97\n",
  "docs/report.png": b"\x89PNG\x00meshwright",
  "Makefile": b"TRAIN := train.py --config=configs/fsdp.py\n",
}


def made(*arguments: str) -> str:
  """What tools.fork says to these arguments, on standard error."""
  done = subprocess.run([sys.executable, "-m", "tools.fork", *arguments], cwd=tree.ROOT, capture_output=True, text=True)
  assert done.returncode == 2
  return done.stderr


@pytest.mark.parametrize(
  "name, said",
  [
    ("acme-lm", "cannot be imported"),
    ("2nd", "cannot be imported"),
    ("class", "cannot be imported"),
    ("json", "Python's standard library"),
    ("jax", "an installed package"),
    ("data", "a file or folder of this repository"),
    ("train", "a file or folder of this repository"),
  ],
)
def test_a_name_that_cannot_be_a_package_is_one_sentence(name: str, said: str):
  with one_sentence(f"NAME={name!r}", said):
    naming.check(name, SMALL)


def test_a_folder_with_files_is_left_alone(tmp_path: Path):
  (tmp_path / "acme_lm").mkdir()
  (tmp_path / "acme_lm" / "mine.txt").write_text("mine")
  assert made(str(tmp_path / "acme_lm")).count("\n") == 1
  assert [file.name for file in (tmp_path / "acme_lm").iterdir()] == ["mine.txt"]


def test_every_mention_gets_the_new_name_in_its_case():
  found = naming.renamed(SMALL, "acme_lm")
  assert found["docs/data.md"].decode().startswith("# Acme Lm\n")
  assert b"ACME_LM_SHARE=1" in found["docs/data.md"]
  assert b"~/.cache/acme_lm/data" in found["data/text.py"]
  assert naming.project(found) == "acme_lm"
  assert "acme_lm.py" in found
  assert "meshwright.py" not in found
  for kept in ("LICENSE", "docs/report.png"):  # of those who wrote the code; and not a text
    assert found[kept] == SMALL[kept]


def test_names_of_kubernetes_have_hyphens():
  found = naming.renamed(SMALL | {"docs/launch/jobset.yaml": b"name: meshwright-runs\n"}, "acme_lm")
  assert found["docs/launch/jobset.yaml"] == b"name: acme-lm-runs\n"


def test_no_mention_of_this_repository_is_left():
  found = fork.fork(tree.read(), "acme_lm")
  old = naming.project(tree.read())
  assert [path for path, content in found.items() if old.encode() in content.lower()] == ["LICENSE"]
  assert not [path for path in found if old in path]


def test_a_fork_of_a_fork_is_renamed_as_well():
  once, twice = naming.renamed(SMALL, "acme_lm"), naming.renamed(SMALL, "other")
  assert naming.renamed(once, "other") == twice


@pytest.mark.parametrize(
  "before, after",
  [
    ("import data\n", "from acme import data\n"),
    ("import data.text\n", "from acme import data; import acme.data.text\n"),
    ("import data.text as texts\n", "from acme.data import text as texts\n"),
    ("import jax, data\n", "import jax; from acme import data\n"),
    ("from data import text\n", "from acme.data import text\n"),
    ("from data.text import (\n  a,\n  b,\n)\n", "from acme.data.text import (\n  a,\n  b,\n)\n"),
    ("def f():\n  from data import text  # later\n", "def f():\n  from acme.data import text  # later\n"),
    ("from database import x\nimport database\n", "from database import x\nimport database\n"),
    ("×, data = 1, 2\nx = data.text\n".replace("×", "é"), "é, data = 1, 2\nx = data.text\n"),
  ],
)
def test_imports_move_into_the_package(before: str, after: str):
  assert packaging.Move("acme", SMALL).imports(before) == after
  ast.parse(after)


@pytest.mark.parametrize(
  "before, after",
  [
    ('"data.text"', '"acme.data.text"'),
    ('"data.name"', '"data.name"'),  # a field: there is no such module
    ('import_module(f"data.{name}")', 'import_module(f"acme.data.{name}")'),
    ('find_spec("data")', 'find_spec("acme.data")'),
    ('[sys.executable, "train.py"]', '[sys.executable, "-m", "acme.train"]'),
    ("python train.py --config=configs/fsdp.py", "python -m acme.train --config=acme/configs/fsdp.py"),
    (".venv/bin/python -m data.text x", ".venv/bin/python -m acme.data.text x"),
    ('code = "import data; from data.text import x"', 'code = "from acme import data; from acme.data.text import x"'),
    ('ROOT / "data"', 'ROOT / "acme/data"'),
    ("[x](../data/text.py)", "[x](../acme/data/text.py)"),
    ("the file data/NAME.py", "the file acme/data/NAME.py"),
    ("~/.cache/x/data/text.py, my/data/text.py", "~/.cache/x/data/text.py, my/data/text.py"),
    ("data.path=data/mine", "data.path=data/mine"),
  ],
)
def test_words_about_modules_paths_and_commands_move_too(before: str, after: str):
  assert packaging.Move("acme", SMALL).words(before) == after


@pytest.mark.parametrize(
  "before, after",
  [
    ('Path(__file__).parents[1] / "docs"', 'Path(__file__).parents[2] / "docs"'),
    ('Path(__file__).parents[1] / "configs"', 'Path(__file__).parents[1] / "configs"'),
    ('Path(__file__).parents[0] / "x.css"', 'Path(__file__).parents[0] / "x.css"'),
  ],
)
def test_the_root_of_the_repository_is_one_folder_further(before: str, after: str):
  """From a file in a folder at the top. Configs move with it, and what is beside it stays beside it."""
  assert packaging.Move("acme", SMALL).climbs(before, depth=1) == after


def test_a_package_holds_all_code_and_nothing_else():
  found = packaging.packaged(SMALL, "acme")
  moved = {"acme/__init__.py", "acme/train.py", "acme/data/__init__.py", "acme/data/text.py", "acme/configs/fsdp.py"}
  stays = {"pyproject.toml", "LICENSE", "docs/data.md", "docs/report.png", "Makefile"}
  assert found.keys() == moved | stays  # without meshwright.py: there is a package
  assert found["Makefile"] == b"TRAIN := -m acme.train --config=acme/configs/fsdp.py\n"
  assert 'include = ["acme", "acme.*"]' in found["pyproject.toml"].decode()
  assert 'files = ["acme/data", "acme/train.py"]' in found["pyproject.toml"].decode()


def test_in_the_package_of_this_repository_no_import_is_left_that_leads_out_of_it():
  found = fork.fork(tree.read(), "acme", package=True)
  rooms = packaging.Move("acme", naming.renamed(tree.read(), "acme")).rooms - {"acme"}
  for path, content in found.items():
    if path.endswith(".py"):
      for node in ast.walk(ast.parse(content)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not [name for name in names if name.partition(".")[0] in rooms], path


def test_a_package_is_not_packaged_again():
  with one_sentence("--package", "one package already"):
    fork.fork(packaging.packaged(SMALL, "meshwright"), "other", package=True)


def test_without_git_a_fork_has_what_a_release_has(tmp_path: Path):
  for name in ("train.py", ".ci/run", ".venv/bin/python", "data/__pycache__/a.pyc", "runs/a/metrics.jsonl"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("#!/bin/sh\n")
  assert list(tree.read(tmp_path)) == [".ci/run", "train.py"]
  tree.write(tree.read(tmp_path), tmp_path / "copy")
  assert (tmp_path / "copy/.ci/run").stat().st_mode & 0o111


def test_importing_this_repository_as_a_library_says_what_to_do():
  done = subprocess.run([sys.executable, "-c", "import meshwright"], cwd=tree.ROOT, capture_output=True, text=True)
  assert done.stderr.splitlines()[-1].startswith("ImportError: Meshwright is a template of programs, not a library: ")
  assert "tools.fork" in done.stderr.splitlines()[-1]
