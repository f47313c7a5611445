"""Pages that are made by running code: a tour of sharding, pmap, debugging. Each step is shown with what it prints.

    python -m tools.tour                                # all steps, in the terminal and as docs/tour*.md and tour.ipynb
    python -m tools.tour pmap                           # another page; lab/lessons lists them
    python -m tools.tour --steps=specs,resharding       # these steps, in the terminal only
    python -m tools.tour --page=FILE                    # all steps, with the page in another file, its parts beside it

The steps always run on eight simulated devices, so that they are the same on every machine.
"""

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import jax

from errors import ConfigError, one_of
from lab.lessons import PAGES
from lab.notebook import notebook
from lab.steps import Shown, file_of, heading, run, steps
from runtime import command_line
from runtime.folders import writable_file

DOCS = Path(__file__).parents[1] / "docs"
DEFAULT = "tour"
DEVICES = 8


def pages(name: str, shown: Sequence[tuple[ModuleType, Sequence[Shown]]]) -> dict[str, str]:
  """The text of a page by its file, from its lessons and what their steps printed.

  A page in parts has its introduction and its contents in NAME.md, and each lesson in a file of its own.
  """
  page, main = PAGES[name], f"{name}.md"
  command = f"python -m tools.tour{'' if name == DEFAULT else f' {name}'}"
  made = f"<!-- Written by {command} from lab/lessons: change it there. -->"
  titles = [heading(lesson)[0] for lesson, _ in shown]
  files = [_file(name, lesson) if page.in_parts else main for lesson, _ in shown]
  contents: list[str] = []
  texts = {main: [f"# {page.title}", made, page.introduction]}
  for number, (lesson, results) in enumerate(shown):
    title, subject, imports = heading(lesson)
    steps = ": " + "; ".join(one.step.title[0].lower() + one.step.title[1:] for one in results)
    target, mark = files[number] if page.in_parts else f"#{_anchor(title)}", "##" if page.in_parts else "###"
    contents.append(f"{number + 1}. [{title}]({target}){steps if page.in_parts else ''}")
    part = texts.setdefault(files[number], [])
    part += [f"{mark[1:]} {title}", *([made, f"Part {number + 1} of [the tour]({main})."] if page.in_parts else [])]
    link, has_code = f"[The code](../{file_of(lesson)}) prints:", any(one.step.code for one in results)
    part += [subject, *([f"```python\n{imports}\n```"] if has_code else [])]
    for one in results:
      code, output = f"```python\n{one.step.code}\n```" if one.step.code else link, f"```text\n{one.output}\n```"
      part += [f"{mark} {one.step.title}", one.step.text, code, output]
    if page.in_parts and number + 1 < len(files):
      part += ["---", f"Next: [{titles[number + 1]}]({files[number + 1]})"]
  texts[main].insert(3, "\n".join(contents))
  texts[files[-1] if files else main] += ["---", page.conclusion]
  return {file: "\n\n".join(text) + "\n" for file, text in texts.items()}


def terminal(one: Shown) -> str:
  """A step as the terminal shows it."""
  code, output = textwrap.indent(one.step.code, "    "), textwrap.indent(one.output, "  | ", lambda _: True)
  return "\n\n".join([_underlined(one.step.title, "-"), one.step.text, code, output])


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("name", nargs="?", default=DEFAULT, help=f"the page to make: {', '.join(PAGES)} (default: tour)")
  parser.add_argument("--page", type=Path, help="the file to write (default: docs/NAME.md)")
  parser.add_argument("--steps", default="", help="names of functions, separated by commas (default: all steps)")
  options = parser.parse_args(arguments)
  page = PAGES[one_of("name", options.name, PAGES)]
  lessons = [(lesson, steps(lesson)) for lesson in page.lessons]
  known = [step.run.__name__ for _, of_lesson in lessons for step in of_lesson]
  asked = {one_of("steps", name, known) for name in options.steps.split(",") if name}
  if asked and options.page:
    raise ConfigError(f"page={str(options.page)!r} needs all steps; leave out --steps={options.steps}")
  file = options.page or DOCS / f"{options.name}.md"
  if not asked:
    writable_file(file, "page")
  jax.config.update("jax_platforms", "cpu")
  if jax.config.jax_num_cpu_devices != DEVICES:  # once JAX is in use, setting it fails, even to the same number
    jax.config.update("jax_num_cpu_devices", DEVICES)
  shown: list[tuple[ModuleType, list[Shown]]] = []
  if not asked:
    print(_underlined(page.title, "="), page.introduction, sep="\n\n")
  for lesson, of_lesson in lessons:
    wanted = [step for step in of_lesson if not asked or step.run.__name__ in asked]
    if wanted:
      title, subject, imports = heading(lesson)
      print("\n", _underlined(title, "="), f"\n{subject}\n", textwrap.indent(imports, "    "), sep="\n")
    shown.append((lesson, []))
    for step in wanted:
      shown[-1][1].append(run(step))
      print("\n" + terminal(shown[-1][1][-1]), flush=True)
  if not asked:
    for made, content in pages(options.name, shown).items():
      (file if made == f"{options.name}.md" else file.with_name(made)).write_text(content, encoding="utf-8")
    print(f"\n\n{page.conclusion}\n\nThis page is also in {file}.")
    if page.tries and not importlib.util.find_spec("nbformat"):
      print("It is not written as a notebook, which needs nbformat: pip install '.[dev]'.")
    elif page.tries:
      made = file.with_suffix(".ipynb")
      made.write_text(notebook(options.name, page, shown, DEVICES), encoding="utf-8")
      print(f"As a notebook it is in {made}.")


def _file(name: str, lesson: ModuleType) -> str:
  """The file of a lesson's own page."""
  return f"{name}-{lesson.__name__.rpartition('.')[2].replace('_', '-')}.md"


def _anchor(title: str) -> str:
  """The link to a heading, as Markdown viewers make it."""
  return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _underlined(title: str, line: str) -> str:
  return f"{title}\n{line * len(title)}"


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
