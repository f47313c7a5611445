"""Runs the steps of a page that is made by running code, and compares the page with what they print."""

import jax

from lab import steps
from lab.lessons import PAGES
from tools import tour

Shown = dict[str, steps.Shown]


def run_steps(name: str) -> Shown:
  """All steps of a page, after they ran, by name. Their programs name lines of code, which conftest.py leaves out."""
  limit = "jax_traceback_in_locations_limit"
  left_out = getattr(jax.config, limit)
  jax.config.update(limit, 10)
  try:
    return {step.run.__name__: steps.run(step) for lesson in PAGES[name].lessons for step in steps.steps(lesson)}
  finally:
    jax.config.update(limit, left_out)


def check_page(name: str, shown: Shown) -> None:
  """Asserts that a page shows what its steps print, and that every step is short and has a text."""
  lessons = [(lesson, [shown[step.__name__] for step in lesson.STEPS]) for lesson in PAGES[name].lessons]
  for file, text in tour.pages(name, lessons).items():
    assert (tour.DOCS / file).read_text() == text, file
  for name, one in shown.items():
    assert min(len(one.step.title), len(one.output)) > 0, name
    assert len(one.step.text) > 200, name
    assert len(one.step.code.splitlines()) <= 50, name
    assert max(map(len, [*one.step.code.splitlines(), *one.output.splitlines()])) <= 130, name
