"""Runs tests in a process of its own for mutants.py: to record which tests reach a line, or with a mutant in place.

The mutant replaces its module as Python imports it. No file changes, so programs that a test starts run the real code.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]  # of the repository


class Recorder:
  """A pytest plugin: the seconds of each test that passed, and with `coverage` which tests ran each line."""

  def __init__(self, coverage: Any) -> None:
    self.coverage, self.seconds = coverage, dict[str, float]()

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
    self.coverage.switch_context(item.nodeid)
    start = time.perf_counter()
    done = yield
    self.taken = time.perf_counter() - start
    if item.nodeid in self.seconds:
      self.seconds[item.nodeid] = self.taken
    self.coverage.switch_context("")
    return done

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
      self.seconds[report.nodeid] = 0.0
    elif report.failed:
      self.seconds.pop(report.nodeid, None)


class Chosen:
  """A pytest plugin: runs the named tests in this order, and says which one failed first."""

  def __init__(self, tests: Sequence[str]) -> None:
    self.place = {test: number for number, test in enumerate(tests)}
    self.failed: list[str] = []

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
    items[:] = sorted((item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid])

  def pytest_collectreport(self, report: pytest.CollectReport) -> None:
    if report.failed:
      self.failed.append(f"the import of {report.nodeid}")

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.failed:
      self.failed.append(report.nodeid)


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
  """Finds and loads one module, from other code than its file has."""

  def __init__(self, name: str, file: Path, code: str) -> None:
    super().__init__(name, str(file))
    self.code = code

  def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
    return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

  def get_code(self, fullname: str) -> CodeType:
    return compile(self.code, self.path, "exec", dont_inherit=True)


def pytest_with(plugin: object, *arguments: str) -> int:
  os.chdir(ROOT)
  return pytest.main(["-q", "-m", "not full", "-p", "no:cacheprovider", *arguments], plugins=[plugin])


def reach(answer: Connection, files: Sequence[str], tests: Sequence[str]) -> None:
  """Answers with {"seconds": {test: seconds}, "lines": {file: {line: tests}}}, of the tests that pass."""
  import coverage

  watched = coverage.Coverage(data_file=None, include=[str(ROOT / file) for file in files], config_file=False)
  recorder = Recorder(watched)
  watched.start()
  pytest_with(recorder, *tests)
  watched.stop()
  data, lines = watched.get_data(), {}
  for file in files:
    found = data.contexts_by_lineno(str(ROOT / file))
    lines[file] = {line: sorted(set(ran) & recorder.seconds.keys()) for line, ran in found.items()}
  answer.send({"seconds": recorder.seconds, "lines": lines})


def attempt(answer: Connection, file: str, code: str, tests: Sequence[str], log: str) -> None:
  """Runs the tests with this code in place of the file's, until one fails. Answers with the names of what failed."""
  os.setsid()  # what tests start can be ended with them
  output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(output, 1)
  os.dup2(output, 2)
  name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
  if name in sys.modules:
    raise RuntimeError(f"{name} was imported before its mutant")
  sys.meta_path.insert(0, Mutated(name, ROOT / file, code))
  chosen = Chosen(tests)
  status = pytest_with(chosen, "-x", *dict.fromkeys(test.partition("::")[0] for test in tests))
  answer.send(chosen.failed or (["the import of tests/conftest.py"] if status else []))
