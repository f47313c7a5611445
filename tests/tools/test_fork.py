"""tools.fork: the name of a fork, its package, and what it leaves out.

The files here are small. test_fork_run.py makes real forks and trains in them.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import in_full, one_sentence

from tools import fork
from tools.forking import features, naming, packaging, slimming, tree
from tools.forking.standins import StandIn
from tools.forking.trimming import Tests

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
  "docs/report.png": b"\x89PNG\x00 meshwright",
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


@pytest.fixture(scope="module")
def every() -> tree.Files:
  return {path: content for path, content in tree.read().items() if path not in fork.OWN}


@pytest.mark.parametrize("arguments, said", [
  (["sub"], "'sub' is within this repository"), (["../nowhere", "--keep="], "--keep= names nothing"),
])  # fmt: skip
def test_a_fork_of_nothing_or_into_itself_is_refused(
  arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
  monkeypatch.setattr(sys, "argv", ["fork", *arguments])
  monkeypatch.chdir(tree.ROOT)
  with pytest.raises(SystemExit):
    fork.main()
  assert said in capsys.readouterr().err


def test_an_unknown_feature_is_one_sentence(every: tree.Files):
  with one_sentence("--keep has 'txt'", "did you mean 'text'?", "tensor_parallel"):
    features.chosen(["txt"], every)


def test_what_a_feature_needs_is_kept_with_it(every: tree.Files):
  assert features.chosen(["pipeline"], every) == {"pipeline", "stages"}
  assert {"rows", "tokenizers", "text"} <= features.chosen(["commands"], every)


def test_every_file_of_code_belongs_to_a_feature_or_the_core(every: tree.Files):
  """With all features and strategies, nothing is left out."""
  code = {path for path in every if path.endswith(".py") and path.partition("/")[0] not in ("tests", "findings")}
  kept = {*features.FEATURES, *features.strategies_of(every)}
  whole = slimming.Slim(every, kept)
  assert code - whole.here - {*whole.tests_of_projects} == {"meshwright.py"}
  for name, feature in features.FEATURES.items():
    assert features.left_out(kept - {name}, every), f"{name} has no files"
    assert set(feature.needs.split()) <= features.FEATURES.keys(), name


@pytest.mark.parametrize("keep", in_full(["text,fsdp,tensor_parallel", "images,pipeline"], "text,fsdp,tensor_parallel"))
def test_all_that_a_slim_fork_imports_is_there(keep: str, every: tree.Files):
  """Every module and every name; of other packages, those that it still depends on."""
  found = slimming.slim(every, keep.split(","))
  lines = sum(c.count(b"\n") for p, c in found.items() if p.endswith(".py") and not p.startswith("tests/"))
  assert lines < 20_700  # of 58,000; docs/fork.md says how many for each choice
  modules = {"jax": "jax", **{slimming.MODULE_OF.get(p, p.replace("-", "_")): p for p in slimming.packages(found)}}
  theirs = {slimming.MODULE_OF.get(p, p.replace("-", "_")) for p in slimming.packages(every)} - modules.keys()
  for path, content in found.items():
    if path.endswith(".py"):
      source = content.decode()
      assert not slimming.imported(source) & theirs, path
      for module, names in slimming.imports(source, every):
        assert module in found, f"{path} imports {module}"
        bound = set(StandIn(found[module].decode(), "", (), ()).defined) | {"__path__", "__file__", "__name__"}
        lazy = {each for each in names if slimming.file_of(f"{module[:-12].replace('/', '.')}.{each}", found)}
        assert names <= bound | lazy, f"{path} imports {names - bound - lazy} from {module}"


WING = '''"""A wing."""

import jax
import numpy as np

from errors import ConfigError

WAYS = ("a", "b")
UNUSED = 1


class Lost(ConfigError):
  """An error."""


class Tier:
  """Does much."""

  size = 3

  def __init__(self, on):
    self.on = on

  def save(self):
    return jax.numpy.zeros(self.size)


def choose(on):
  """Says what to do."""
  return compute(on) if on else None


def compute(on):
  return np.zeros(on)
'''


def test_a_stand_in_has_what_is_needed_while_a_feature_is_off():
  source = StandIn(WING, "wing", ["WAYS", "Lost", "Tier", "choose"], ["choose", "Tier.__init__"]).text()
  found: dict = {}
  exec(source, found)
  assert found["WAYS"] == ("a", "b")
  assert issubclass(found["Lost"], ValueError | Exception)
  assert found["Tier"](True).on
  assert not hasattr(found["Tier"], "save")
  assert found["choose"](0) is None
  with one_sentence("leaves out wing", "--keep=...,wing"):
    found["choose"](1)
  assert "UNUSED" not in source
  assert "numpy" not in source  # nor what only others need


def test_tests_of_what_is_left_out_go_and_the_others_stay():
  every = {
    "data/text.py": b"",
    "tests/helpers.py": b"from models import x\n\nGONE = x()\nHERE = 1\n",
    "tests/data/test_a.py": (
      b"import pytest\nfrom helpers import GONE, HERE\n\n\ndef test_gone():\n  assert GONE\n\n\n"
      b"@pytest.mark.parametrize('x', [1])\ndef test_here(x):\n  assert HERE\n\n\ndef test_lora():\n  assert 'lora'\n"
    ),
    "tests/models/test_b.py": b"from helpers import HERE\n\n\ndef test_of_a_folder_that_is_gone():\n  assert HERE\n",
  }
  found = Tests(every, lambda module, name: module != "models", {"data"}, "lora").files()
  assert found.keys() == {"tests/helpers.py", "tests/data/test_a.py"}
  text = found["tests/data/test_a.py"].decode()
  assert "def test_here" in text
  assert "GONE" not in text
  assert "lora" not in text
  assert found["tests/helpers.py"].decode().split() == ["HERE", "=", "1"]


def test_a_lock_loses_what_nothing_asks_for():
  lock = (
    "a==1 \\\n    --hash=sha256:0\n    # via meshwright (pyproject.toml)\n"
    "b==1 \\\n    --hash=sha256:0\n    # via\n    #   a\n    #   d\n"
    "c==1 \\\n    --hash=sha256:0\n    # via a\n"
    "d==1 \\\n    --hash=sha256:0\n    # via\n    #   meshwright (pyproject.toml)\n"
  )
  assert [line[0] for line in slimming.unlocked(lock, {"a"}, "meshwright").splitlines() if "==" in line] == ["b", "d"]


def test_the_image_of_a_package_has_the_package():
  file = "docs/launch/Dockerfile"
  whole = packaging.packaged(naming.renamed(tree.read(), "acme"), "acme")[file].decode()
  assert "\nCOPY acme acme/\n" in whole
  assert whole.count("COPY") == 2
  assert '["python", "-m", "acme.runtime.first_process", "-m", "acme.train"]' in whole
