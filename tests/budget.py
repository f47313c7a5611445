"""A pytest plugin that counts what the tests compile, prints it, and fails `make test` if it is too much.

A budget in seconds would depend on the machine. So the budget is a number of programs: `test_programs` in
pyproject.toml. A program counts whether XLA compiles it or the persistent cache has it. Programs of the processes that
a test starts are not counted. The number varies by a few, because workers share no memory. Add programs only for a new
promise; otherwise mark the test with `full`, which leaves it to `make test-all`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"  # also if the persistent cache had it
TRACED = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")


class Cost(NamedTuple):
  """What one test, or all, compiled: the number of programs, and seconds of tracing and of compiling."""

  programs: int = 0
  traced: float = 0.0
  compiled: float = 0.0

  def plus(self, other: "Cost") -> "Cost":
    return Cost(*(a + b for a, b in zip(self, other, strict=True)))

  def __str__(self) -> str:
    return f"{self.programs:5} programs, {self.traced:6.1f} s of tracing, {self.compiled:6.1f} s of compiling"


class Budget:
  """Counts by test in this process and, in the process that starts the workers, adds up theirs."""

  def __init__(self, config: pytest.Config) -> None:
    self.config = config
    self.limit = int(config.getini("test_programs"))
    self.costs: dict[str, Cost] = {}
    self.test = ""
    self.inner: list[tuple[float, float]] = []  # start and seconds of traces that may be within the next one
    jax.monitoring.register_event_time_span_listener(self.listen)

  def listen(self, event: str, start: float, end: float, **_: object) -> None:
    """Adds an event to the current test. A trace within another one ends before it, and counts once."""
    if event == COMPILED:
      self.add(self.test, Cost(1, 0.0, end - start))
    elif event in TRACED:
      within = sum(seconds for began, seconds in self.inner if began >= start)
      self.inner = [*((began, seconds) for began, seconds in self.inner if began < start), (start, end - start)][-50:]
      self.add(self.test, Cost(0, end - start - within, 0.0))

  def add(self, test: str, cost: Cost) -> None:
    self.costs[test] = self.costs.get(test, Cost()).plus(cost)

  @property
  def total(self) -> Cost:
    total = Cost()
    for cost in self.costs.values():
      total = total.plus(cost)
    return total

  @property
  def exceeded(self) -> bool:
    """Whether the selection of `make test` compiled too much. Other selections have no budget."""
    return "not full" in self.config.option.markexpr and self.total.programs > self.limit

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
    self.test = item.nodeid
    return (yield)

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node: object) -> None:
    """Called with each worker of pytest-xdist at its end."""
    for test, cost in getattr(node, "workeroutput", {}).get("budget", {}).items():
      self.add(test, Cost(*cost))

  @pytest.hookimpl(trylast=True)
  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if hasattr(self.config, "workeroutput"):
      self.config.workeroutput["budget"] = {test: tuple(cost) for test, cost in self.costs.items()}
    elif self.exceeded and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("compiled programs")
    costliest = sorted(self.costs.items(), key=lambda item: -item[1].traced - item[1].compiled)
    for test, cost in costliest[:10]:
      terminalreporter.line(f"{cost}  {test}")
    terminalreporter.line(f"{self.total}  all")
    if self.exceeded:
      terminalreporter.line(
        f"FAILED: {self.total.programs} programs are more than test_programs={self.limit} in pyproject.toml; "
        "share a program, or mark a test with `full`",
        red=True,
      )


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addini("test_programs", "how many programs `make test` may compile", default="0")


def pytest_configure(config: pytest.Config) -> None:
  config.pluginmanager.register(Budget(config), "budget of programs")
