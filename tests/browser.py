"""Headless Chromium for tests of pages: opens a file, acts on it, and reports what went wrong."""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
  """The first browser that runs. Some systems have a command of this name that only says how to install one."""
  for path in filter(None, map(shutil.which, NAMES)):
    if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
      return path
  return None


class Seen(NamedTuple):
  """What a browser saw of a page.

  Attributes:
    value: what `act` returned.
    errors: of scripts, and what was printed on the console.
    requests: the addresses that were asked for, besides the page itself.
    overflow: how many pixels the page is wider than the window.
  """

  value: Any
  errors: list[str]
  requests: list[str]
  overflow: int


class Browser:
  """A browser in a thread of its own: Playwright keeps an event loop there, and checkpoints need one here."""

  def __init__(self, path: str) -> None:
    from playwright.sync_api import sync_playwright

    self.thread = ThreadPoolExecutor(1)
    self.playwright = self.thread.submit(lambda: sync_playwright().start()).result()
    start = lambda: self.playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    self.chromium = self.thread.submit(start).result()

  def look(self, file: Path, act: Callable[[Any], Any] = lambda page: None, width: int = 1440, **context: Any) -> Seen:
    """Opens a page in a window of this width and calls `act` with it. `context`: Playwright's settings of a context."""
    return self.thread.submit(self._look, file, act, width, context).result()

  def _look(self, file: Path, act: Callable[[Any], Any], width: int, context: dict[str, Any]) -> Seen:
    page = self.chromium.new_context(viewport={"width": width, "height": 900}, **context).new_page()
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.resolve().as_uri())
    value = act(page)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.context.close()
    return Seen(value, errors, requests[1:], overflow)

  def close(self) -> None:
    self.thread.submit(self.chromium.close).result()
    self.thread.submit(self.playwright.stop).result()
    self.thread.shutdown()


@pytest.fixture(scope="session")
def browser():
  """Imported by tests/conftest.py, so that all tests share one."""
  pytest.importorskip("playwright", reason="the tests of pages in a browser need playwright")
  path = find()
  if not path:
    pytest.skip(f"no browser found: {', '.join(NAMES)}")
  found = Browser(path)
  yield found
  found.close()
