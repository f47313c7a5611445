"""Runs the steps of a page that is made by running code, and compares the page with what they print."""

from tools import steps, tour
from tools.lessons import PAGES

Shown = dict[str, steps.Shown]


def run_steps(name: str) -> Shown:
  """All steps of a page, after they ran, by name."""
  return {step.run.__name__: steps.run(step) for lesson in PAGES[name].lessons for step in steps.steps(lesson)}


def check_page(name: str, shown: Shown) -> None:
  """Asserts that a page shows what its steps print, and that every step is short and has a text."""
  lessons = [(lesson, [shown[step.__name__] for step in lesson.STEPS]) for lesson in PAGES[name].lessons]
  assert (tour.DOCS / f"{name}.md").read_text() == tour.markdown(name, lessons)
  for name, one in shown.items():
    assert min(len(one.step.title), len(one.output)) > 0, name
    assert len(one.step.text) > 200, name
    assert len(one.step.code.splitlines()) <= 50, name
    assert max(map(len, [*one.step.code.splitlines(), *one.output.splitlines()])) <= 130, name
