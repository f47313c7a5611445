"""Writes docs/index.html: one page to browse, with every strategy in pictures, a calculator and the guide.

    make site
    python -m tools.site [--html=FILE]

The page is one file that needs no network, and git does not keep it. Its numbers come from formulas, so nothing is
compiled: it takes less than a minute, most of it for the table that the calculator looks up.
"""

import argparse
import ast
import functools
import gc
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import strategies
from lab.analysis import explanation
from lab.benchmarks import guide
from lab.benchmarks.pages import RESULTS
from lab.views import calculator, guide_pages, search_index, step_moves, step_timeline, strategy_page
from reporting import pages
from reporting.pages.document import HERE
from reporting.pages.element import card, tag, text, tiles
from runtime import command_line
from runtime.folders import writable_file
from tools import explain

FILE = guide_pages.DOCS / "index.html"
ABOUT = "One Transformer, and a file for each way to shard it: a reference training repository in JAX"


def page(choices: calculator.Choices = calculator.ALL) -> str:
  """The whole page. `choices`: of the calculator."""
  guides, names = guide_pages.pages(), guide_pages.in_order(strategies.names())
  views = [
    view("start", "Start", start()),
    view("strategies", "Strategies", comparison(names)),
    *(view(f"strategy-{name}", name, strategy(name), group="strategies") for name in names),
    view("calculator", "Calculator", calculator.view(choices)),
    view("timeline", "Timeline of a step", timeline()),
    view("guide", "Guide", guide_pages.contents()),
    *(view(found.id, found.title, found.content, group="guide") for found in guides),
  ]
  scripts = (HERE / "search.js", HERE / "site.js")
  return pages.document(
    "Meshwright",
    ABOUT,
    *views,
    tag("script", search_index.index(views), type="text/plain", id="search-index"),
    navigation=navigation(
      [(f"strategy-{name}", name) for name in names],
      [(found.id, found.title.partition(":")[0]) for found in guides],
    ),
    style=(HERE / "site.css").read_text(),
    script=calculator.script() + "".join(file.read_text() for file in scripts),
  )


def navigation(of_strategies: Sequence[tuple[str, str]], of_guide: Sequence[tuple[str, str]]) -> str:
  """The search, and links to all views. On narrow screens, a button shows the links."""
  listed = lambda found: tag("ul", *(tag("li", link) for link in links(found)))
  found = tag("ol", id="found", class_="found", hidden=True, aria_label="Results")
  field = tag("input", type="search", id="search", placeholder="Search: /", aria_label="Search all pages",
              aria_controls="found", aria_expanded="false", autocomplete="off")  # fmt: skip
  button = tag("button", "Pages", type="button", class_="menu", aria_expanded="false", aria_controls="pages")
  shown = [*links([("start", "Start"), ("strategies", "Strategies")]), listed(of_strategies)]
  shown += [*links([("calculator", "Calculator"), ("timeline", "Timeline"), ("guide", "Guide")]), listed(of_guide)]
  return tag("a", "Skip to the content", href="#main", class_="skip") + tag(
    "nav",
    tag("search", field, button, found, class_="script"),
    tag("div", *shown, class_="pages", id="pages"),
    class_="navigation",
    aria_label="Views",
  )


def view(name: str, title: str, *content: str, group: str = "") -> str:
  """A part of the site that is shown alone; `group` is the view that it belongs to."""
  heading = tag("h2", guide_pages.rendered_line(title))
  return tag("section", heading, *content, id=name, class_="view", data_group=group or name)


def links(found: Iterable[tuple[str, str]]) -> list[str]:
  """Links to views, from pairs of an id and a text."""
  return [tag("a", guide_pages.rendered_line(name), href=f"#{target}") for target, name in found]


def start() -> str:
  """What Meshwright is, how to begin, which strategy to take, and where to go."""
  readme = (guide_pages.ROOT / "README.md").read_text()
  begin = readme[readme.index("Clone this repository") : readme.index("- **Which strategy?**")]
  (chart,) = re.findall(
    r"^```mermaid\n.*?^```\n", (guide_pages.DOCS / "explain.md").read_text(), re.DOTALL | re.MULTILINE
  )
  write = lambda source: guide_pages.rendered(source, guide_pages.ROOT, links=START_LINKS)
  return write(f"{START}\n## Try it\n\n{begin}\n## Which strategy?\n\n{chart}\n## My problem is…\n") + (
    guide_pages.problems() + write(PLACES)
  )


START_LINKS = {name: f"#{name}" for name in ("strategies", "calculator", "timeline", "guide")}
START = """
Meshwright trains one Transformer in every common way to use many devices: data parallelism, ZeRO, FSDP, tensor
parallelism, pipelines and their combinations. Each way is a *strategy*, a short file that says which dimension of the
model is split over which axis of the device mesh. Tests show that every strategy computes the same losses and gradients
as a single device, and that it sends what the formulas here say.
"""
PLACES = """
## What is here

- [Strategies](strategies): which device holds which piece of each array, how much memory that takes, what is sent, and
  when each stage of a pipeline works
- [Calculator](calculator): the same numbers for large models on TPUs and GPUs, and the time of a step
- [Timeline](timeline): when the kernels and links of a step work on 64 TPUs, with the recommended compiler options and
  without
- [Guide](guide): all pages of the documentation, beginning with a [tour](docs/tour.md) of sharding in JAX
- [Map of the code](WORKSPACE.md): what to read first
"""


def timeline() -> str:
  """The recorded timeline: what it shows, and its pictures."""
  record = _recorded("timeline")
  name, topology, model, length, batch_size, _, _ = record["case"]
  versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
  about = TIMELINE.format(**locals(), command=record["command"])
  return guide_pages.rendered(about, guide_pages.DOCS) + step_timeline.view(record)


TIMELINE = """
What one device does in a step of `{name}` with {model} parameters on `{topology}`: batches of {batch_size} sequences of
{length} tokens. The first picture of each pair is compiled with the compiler's default options, the second with the
recommended ones ([what a thousand chips do](thousand-chips.md)). Both have one scale. The upper row shows kernels, and
the lower row shows what is on the links. Where kernels wait for the links, the upper row is empty.

The times come from the compiled program, at the peaks of the device. Nothing has run. `{command}` makes the record
({versions}).
"""


def comparison(names: Sequence[str]) -> str:
  """All strategies: the first line of each file, and what its layout splits."""
  about = (
    f"The pictures are of the preset `{guide.PRESET}`, for mixtures with {guide.EXPERTS} experts, on {guide.DEVICES} "
  )
  about += (
    f"simulated devices, with batches of {guide.BATCH} sequences. Their numbers are predicted by formula, for XLA's "
  )
  about += "CPU backend, as in the [guide](docs/strategies.md)."
  lines = [f"{about}\n", "| Strategy | What it is | What is split |", "|---|---|---|"]
  for name in names:
    says = (inspect.getdoc(_module(name)) or "").partition("\n")[0]
    placed = ", ".join(strategies.layout_of(name).placed(" and ", mark="`")) or "nothing"
    lines.append(f"| [`{name}`](strategies/{name}.py) | {says} | {placed} |")
  links = {f"strategies/{name}.py": f"#strategy-{name}" for name in names}
  return guide_pages.rendered("\n".join(lines), guide_pages.ROOT, links=links)


@functools.cache
def _recorded(name: str) -> dict[str, Any]:
  """A record of the benchmarks."""
  record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
  return record


def _module(name: str) -> ModuleType:
  return importlib.import_module(f"strategies.{name}")


def strategy(name: str) -> str:
  """A strategy: what its file says, and its pictures."""
  module = _module(name)
  config = guide.shown(name)
  made = explain.create(config, None)
  found = explanation.explain(name, made, config.batch_size, compiled=False)
  source = Path(inspect.getfile(module))
  address = os.path.relpath(source, guide_pages.DOCS)
  lies = tag("p", "From ", tag("a", escape(address.removeprefix("../")), href=address), class_="about")
  return "".join(
    (
      tiles(strategy_page.headline(found)),
      guide_pages.rendered(inspect.getdoc(module) or "", source.parent),
      tag(
        "div",
        card("Its layout", text(layout_source(source)), tag("p", escape(found["about"]), class_="about"), lies),
        class_="cards",
      ),
      *strategy_page.sections(found, made),
      step_moves.view(_recorded("moves"), name),
    )
  )


def layout_source(file: Path) -> str:
  """The statement of a strategy's file that defines its layout, or imports it."""
  source = file.read_text()
  for node in ast.parse(source).body:
    named = (
      [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
    )
    imported = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
    if "LAYOUT" in (*named, *imported):
      return ast.get_source_segment(source, node) or ""
  raise ValueError(f"{file} defines no LAYOUT")


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--html", type=Path, default=FILE, help="the file to write (default: docs/index.html)")
  file = parser.parse_args(arguments).html
  writable_file(file, "html")
  jax.config.update("jax_platforms", "cpu")
  gc.disable()  # JAX's traces are many objects and little garbage: a tenth of the time
  pages.write(file, page())
  print(f"wrote {file}")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
