"""A page that is made by running code, as a Jupyter notebook: the same steps, and cells that are there to be changed.

tools/tour.py writes it beside the page. The notebook holds what the steps printed, so it can be read without running
it. It needs no file of its own to run, only this repository and its packages.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

from lab.lessons import Page
from lab.steps import Shown, heading, printed

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
This notebook shows how JAX spreads an array, a layer and a training step over many devices. It starts with a mesh and
ends with the memory of a large model. Each step is a short function, followed by what it printed. The cells after "Try
it" are there to be changed.

It needs no accelerator, because the cell below makes {devices} devices of one CPU. To run it, install Jupyter beside
the repository's packages, with `pip install jupyterlab`, and start `jupyter lab docs/{name}.ipynb`. The same steps are
a page: [{name}.md]({name}.md)."""


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
  for key, kind, source, output in cells(name, page, shown, devices):
    if kind == "text":
      cell = v4.new_markdown_cell(source, id=key)
    else:
      outputs = [v4.new_output("stream", name="stdout", text=output + "\n")] if output else []
      cell = v4.new_code_cell(source, id=key, outputs=outputs)
    made.cells.append(cell)
  nbformat.validate(made)
  return nbformat.writes(made, indent=1) + "\n"


def cells(
  name: str, page: Page, shown: Iterable[tuple[ModuleType, Sequence[Shown]]], devices: int
) -> Iterator[tuple[str, str, str, str]]:
  """The cells in order: an id, "text" or "code", the source, and what it prints."""
  yield "start", "text", f"# {page.title}\n\n{FIRST.format(name=name, devices=devices)}", ""
  yield "set-up", "code", SET_UP.format(devices=devices), ""
  for lesson, steps in shown:
    title, subject, imports = heading(lesson)
    module = lesson.__name__.rpartition(".")[2]
    yield module, "text", f"## {title}\n\n{subject}", ""
    yield f"{module}-imports", "code", imports, ""
    for one in steps:
      function = one.step.run.__name__
      yield function, "text", f"### {one.step.title}\n\n{one.step.text}", ""
      yield f"{function}-run", "code", f"{one.step.code}\n\n\nresult = {function}()", one.output
      if found := page.tries.get(function):
        yield f"{function}-try", "text", f"**Try it.** {found.text}", ""
        output, _ = printed(functools.partial(exec, found.code, dict(vars(lesson))))
        yield f"{function}-change", "code", found.code, output
  yield "end", "text", page.conclusion, ""
