"""The pages that are made by running code, the command that makes them, and the links between all pages."""

import ast
import builtins
import dataclasses
import dis
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import one_sentence

from lab.benchmarks.pages import ROOT
from lab.lessons import PAGES, TOUR
from tools import tour


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_all_the_code_that_its_code_needs(name: str):
  """If you paste a lesson's imports and code in order, every name that the code uses is defined."""
  found = 0
  parts = [part.read_text() for part in tour.DOCS.glob(f"{name}-*.md")]  # of a page in parts, each is a lesson
  for section in parts or re.split(r"^## ", (tour.DOCS / f"{name}.md").read_text(), flags=re.MULTILINE)[1:]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
      exec(block, names)
      for defined in (node.name for node in ast.parse(block).body if isinstance(node, ast.FunctionDef)):
        assert set(global_names(names[defined].__code__)) <= {*names, *vars(builtins)}, defined
        found += 1
  shown = [set(lesson.STEPS) - set(getattr(lesson, "IN_FILE", ())) for lesson in PAGES[name].lessons]
  assert found >= sum(map(len, shown))


def global_names(code: types.CodeType) -> Iterator[str]:
  """The global names that a function and its inner functions use."""
  yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from global_names(constant)


def test_a_step_has_one_name_and_one_page():
  names = [step.__name__ for page in PAGES.values() for lesson in page.lessons for step in lesson.STEPS]
  assert len(names) == len(set(names))


def test_the_command_prints_steps_and_writes_the_page(tmp_path: Path, capsys: Any, monkeypatch: Any):
  tour.main(["--steps=meshes,layouts"])
  printed = capsys.readouterr().out
  assert "  |  [6 7]]\n" in printed
  assert "    def meshes():\n" in printed
  assert "def specs" not in printed
  monkeypatch.setitem(PAGES, "tour", dataclasses.replace(TOUR, lessons=TOUR.lessons[:1]))
  tour.main([f"--page={tmp_path / 'new' / 'page.md'}"])
  assert "(tour-devices-and-meshes.md)" in (tmp_path / "new" / "page.md").read_text()
  page = (tmp_path / "new" / "tour-devices-and-meshes.md").read_text()
  assert TOUR.conclusion in page
  assert TOUR.conclusion in capsys.readouterr().out


def test_the_command_makes_other_pages(tmp_path: Path, capsys: Any, monkeypatch: Any):
  tour.main(["pmap", "--steps=nested"])
  assert "  | pmap in a pmap: ValueError\n" in capsys.readouterr().out
  monkeypatch.setitem(PAGES, "debugging", dataclasses.replace(PAGES["debugging"], lessons=()))
  tour.main(["debugging", f"--page={tmp_path / 'page.md'}"])
  assert (tmp_path / "page.md").read_text().startswith("# Debugging\n\n<!-- Written by python -m tools.tour debugging ")


def test_a_mistake_on_the_command_line_is_one_sentence(tmp_path: Path):
  with one_sentence("steps='meshs'", "did you mean 'meshes'?"):
    tour.main(["--steps=meshs"])
  with one_sentence("name='pmat'", "did you mean 'pmap'?"):
    tour.main(["pmat"])
  with one_sentence("page=", "--steps=meshes"):
    tour.main(["--steps=meshes", "--page=page.md"])
  with one_sentence("page=", "folder"):
    tour.main([f"--page={tmp_path}"])


OF_THE_ROOT = (
  "README",
  "CONTRIBUTING",
  "SECURITY",
  "WORKSPACE",
  "CHANGELOG",
  "lab/benchmarks/README",
  "findings/README",
)


def anchors(page: Path) -> set[str]:
  """The links to headings of a page, as GitHub makes them."""
  headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
  "page",
  [*(ROOT / f"{name}.md" for name in OF_THE_ROOT), *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests/README.md"],
  ids=lambda page: f"{page.parent.name}-{page.name}",
)
def test_links_between_pages_lead_somewhere(page: Path):
  for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
    file, _, anchor = target.partition("#")
    if not re.match(r"[a-z]+:", target):
      found = (page.parent / file).resolve() if file else page
      assert found.exists(), target
      assert not anchor or found.suffix != ".md" or anchor in anchors(found), target
