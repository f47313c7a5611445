"""Mutation testing: what is drawn, which tests run with a mutant, and the record: each survivor has a reason."""

import importlib
import sys
from pathlib import Path

import pytest

from lab.benchmarks import mutants, mutants_made
from lab.benchmarks.mutants_worker import ROOT, Mutated

TOY = """\
LIMIT: int | None = 4000


def above(x: int | None, limit: int = LIMIT) -> bool:
  if x is None:
    return False
  return (
    x * 2
    > limit + 1
  )


def other() -> int:
  return 1
"""
# As coverage has it: lines 1, 4 and 13 run as the module is imported, by the first test that imports it.
REACHED = {
  "seconds": {
    "tests/test_a.py::slow": 3.0, "tests/test_a.py::fast": 1.0, "tests/test_toy.py::own": 2.0, "tests/b.py::c": 0.5,
  },
  "lines": {
    "toy.py": {
      "1": ["tests/b.py::c"], "4": ["tests/b.py::c"], "5": ["tests/test_a.py::slow", "tests/test_a.py::fast"],
      "8": ["tests/test_a.py::slow"], "9": ["tests/test_toy.py::own"], "14": ["tests/b.py::c"],
    }
  },
}  # fmt: skip


def test_a_mutant_runs_with_the_tests_that_reach_its_statement():
  reaching = lambda line: mutants_made.reaching(TOY, line, REACHED, "toy.py")
  assert reaching(5) == ["tests/test_a.py::fast", "tests/test_a.py::slow"]  # the fastest first
  assert reaching(9) == reaching(7) == ["tests/test_toy.py::own", "tests/test_a.py::slow"]  # the module's own first
  assert reaching(14) == ["tests/b.py::c"]
  assert reaching(6) == []
  everything = ["tests/test_toy.py::own", "tests/b.py::c", "tests/test_a.py::fast", "tests/test_a.py::slow"]
  assert reaching(1) == reaching(4) == everything  # the value is used by whatever runs later


def test_tests_fit_the_seconds_of_a_mutant():
  tests = ["tests/test_a.py::slow", "tests/test_a.py::fast", "tests/test_toy.py::own"]
  assert mutants.fitting(tests, REACHED["seconds"], 4.5) == tests[:2]
  assert mutants.fitting(tests, REACHED["seconds"], 1.0) == tests[:1]
  assert mutants.fitting(tests[1:] + tests[:1], REACHED["seconds"], 4.0) == tests[1:]
  assert (
    mutants.fitting([*tests[1:2], *tests[:1], *tests[2:]], REACHED["seconds"], 3.0) == tests[1:]
  )  # not the long one
  assert mutants.fitting([], REACHED["seconds"], 1.0) == []


def test_a_mutant_replaces_its_module_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  file = tmp_path / "toy_module.py"
  file.write_text("ANSWER = 42\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, "meta_path", [Mutated("toy_module", file, "ANSWER = 43\n"), *sys.meta_path])
  assert importlib.import_module("toy_module").ANSWER == 43
  assert file.read_text() == "ANSWER = 42\n"
  monkeypatch.delitem(sys.modules, "toy_module")


def test_a_seed_draws_the_same_mutants():
  pytest.importorskip("cosmic_ray", reason="needs cosmic-ray: pip install '.[mutation]'")
  drawn = mutants_made.draw({"toy.py": TOY}, 5, seed=1)
  assert drawn == mutants_made.draw({"toy.py": TOY}, 5, seed=1) != mutants_made.draw({"toy.py": TOY}, 5, seed=2)
  assert len(drawn) == 5
  every = mutants_made.draw({"toy.py": TOY}, 100, seed=0)
  assert {made.line for made in every} == {1, 5, 6, 8, 9, 14}  # no annotation
  assert [made.became for made in every if made.line == 1] == ["LIMIT: int | None = (2 * 4000)"]
  assert [(made.was, made.became) for made in every if "GtE" in made.operator] == [
    ("x * 2 > limit + 1", "x * 2 >= limit + 1")
  ]
  for made in every:
    assert made.became != made.was
    assert made.was in " ".join(line.strip() for line in TOY.splitlines())
    assert mutants_made.mutant("toy.py", TOY, made.line, made.operator, made.number) == made


def test_every_mutant_of_the_record_is_killed_or_explained():
  record = mutants.rows()
  assert {module for module, _ in record} == mutants.MODULES.keys()
  for (module, _), row in record.items():
    assert row["drawn"] == row["killed"] + len(row["survived"]) <= mutants.MOST_MUTANTS, module
    for each in row["survived"]:
      killer = each.get("killed_by", "")
      assert each["reason"] or killer, each
      if "::" in killer:
        file, _, test = killer.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), killer
  page = mutants.PAGE.read_text()
  assert mutants.fill(page, mutants.tables()) == page
