"""A page that is made by running code, as a Jupyter notebook: the same steps, and cells that are there to be changed.

tools/tour.py writes it beside the page. The notebook holds what the steps printed, so it can be read without running
it. It needs no file of its own to run, only this repository and its packages.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

from tools.lessons import Page
from tools.steps import Shown, heading, printed

# The kernel starts in the notebook's folder, which is docs/, or where Jupyter was started.
SET_UP = """\
import sys
from pathlib import Path

import jax

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "strategies").is_dir())
sys.path.insert(0, str(root))
jax.config.update("jax_platforms", "cpu")  # both before the first use of a device
jax.config.update("jax_num_cpu_devices", {devices})"""
FIRST = """\
This notebook needs no accelerator, because the cell below makes {devices} devices of one CPU. To run it, install
Jupyter beside the repository's packages, with `pip install jupyterlab`, and start `jupyter lab docs/{name}.ipynb`. The
cells after "Try it" are there to be changed."""


def notebook(name: str, page: Page, shown: Iterable[tuple[ModuleType, Sequence[Shown]]], devices: int) -> str:
  """The notebook as JSON, from the lessons of the page and what their steps printed. Runs the cells to try."""
  import nbformat  # of the development packages: only those who write the notebook need it
  from nbformat import v4

  made = v4.new_notebook(
    metadata={
      "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
      "language_info": {"name": "python"},
    }
  )
  for number, (kind, source, output) in enumerate(cells(name, page, shown, devices)):
    if kind == "text":
      cell = v4.new_markdown_cell(source, id=f"cell-{number}")
    else:
      outputs = [v4.new_output("stream", name="stdout", text=output + "\n")] if output else []
      cell = v4.new_code_cell(source, id=f"cell-{number}", outputs=outputs)
    made.cells.append(cell)
  nbformat.validate(made)
  return nbformat.writes(made, indent=1) + "\n"


def cells(
  name: str, page: Page, shown: Iterable[tuple[ModuleType, Sequence[Shown]]], devices: int
) -> Iterator[tuple[str, str, str]]:
  """The cells in order: "text" or "code", the source, and what it prints."""
  introduction = page.introduction.partition("\n\n")[0]
  yield "text", f"# {page.title}\n\n{introduction}\n\n{FIRST.format(name=name, devices=devices)}", ""
  yield "code", SET_UP.format(devices=devices), ""
  for lesson, steps in shown:
    title, subject, imports = heading(lesson)
    yield "text", f"## {title}\n\n{subject}", ""
    yield "code", imports, ""
    for one in steps:
      function = one.step.run.__name__
      yield "text", f"### {one.step.title}\n\n{one.step.text}", ""
      yield "code", f"{one.step.code}\n\n\nresult = {function}()", one.output
      if found := page.tries.get(function):
        yield "text", f"**Try it.** {found.text}", ""
        yield "code", found.code, printed(functools.partial(exec, found.code, dict(vars(lesson))))[0]
  yield "text", page.conclusion, ""
