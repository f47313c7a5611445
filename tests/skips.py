"""A pytest plugin that records which tests were skipped, and why; or that fails the run because of them.

MESHWRIGHT_SKIPPED=FILE    # adds the skipped tests to FILE, one a line
MESHWRIGHT_NO_SKIPS=1      # a skipped test fails the run: for a machine that is meant to have everything
python tests/skips.py FILE...   # lists the tests that are in each FILE, which `.ci/run` does at its end
"""

import collections
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from shares import LEFT

FILE, STRICT = "MESHWRIGHT_SKIPPED", "MESHWRIGHT_NO_SKIPS"


class Skips:
  """What was skipped in this process and, in the process that starts the workers, what they skipped: test → reason."""

  def __init__(self, config: pytest.Config) -> None:
    self.config = config
    self.found: dict[str, str] = {}
    self.left: dict[str, str] = {}  # what this run leaves to another one (shares.py)

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self) -> Iterator[None]:
    return self.noted((yield))

  @pytest.hookimpl(wrapper=True)
  def pytest_make_collect_report(self) -> Iterator[None]:
    """Called with each file, which `importorskip` may skip as a whole."""
    return self.noted((yield))

  def noted(self, report: Any) -> Any:
    """Notes a report of something skipped. pytest also calls expected failures skipped; they do not count."""
    if report.skipped and not hasattr(report, "wasxfail"):
      self.found[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")
    return report

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node: object) -> None:
    """Called with each worker of pytest-xdist at its end."""
    found, left = getattr(node, "workeroutput", {}).get("skips", ({}, {}))
    self.found |= found
    self.left |= left

  @pytest.hookimpl(trylast=True)
  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if hasattr(self.config, "workeroutput"):
      self.config.workeroutput["skips"] = self.found, self.left
      return
    if file := os.environ.get(FILE):
      add(Path(file), self.left | self.found)
    if self.forbidden and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  @property
  def forbidden(self) -> bool:
    return bool(self.found and os.environ.get(STRICT))

  def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
    for test, reason in self.found.items() if self.forbidden else ():
      terminalreporter.line(f"FAILED: {test} was skipped, but {STRICT} is set: {reason}", red=True)


def pytest_configure(config: pytest.Config) -> None:
  config.pluginmanager.register(Skips(config), "skipped tests")


def add(file: Path, found: Mapping[str, str]) -> None:
  """Adds skipped tests to a file. Without any, the file says that all tests of a session ran."""
  with file.open("a") as to:
    to.writelines(json.dumps(test) + "\n" for test in found.items())


def read(file: Path) -> dict[str, str]:
  return dict(map(json.loads, file.read_text().splitlines()))


def main(files: Sequence[str]) -> None:
  """Lists the tests that every one of these runs skipped: how many for each reason, and in which files."""
  first, *others = (read(Path(file)) for file in files)
  nowhere = {test: reason for test, reason in first.items() if all(test in found for found in others)}
  for found in others:  # a run that left a test to another one says nothing about why that one skipped it
    nowhere |= {test: found[test] for test, reason in nowhere.items() if reason == LEFT}
  print(f"{len(nowhere)} tests ran nowhere:" if nowhere else "every test ran")
  for reason, count in sorted(collections.Counter(nowhere.values()).items(), key=lambda item: (-item[1], item[0])):
    print(f"{count:4}  {reason}")
    where = collections.Counter(test.partition("::")[0] for test, why in nowhere.items() if why == reason)
    for name, tests in sorted(where.items()):
      print(f"        {name}: {tests}")


if __name__ == "__main__":
  main(sys.argv[1:])
