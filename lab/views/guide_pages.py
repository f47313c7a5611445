"""Renders the pages of docs/ as parts of one HTML page: links between them lead to its parts.

A page becomes a view with the id guide-NAME, and its headings get the ids guide-NAME--HEADING. tools/site.py puts the
views together. A paragraph that begins with a name in bold is an entry, with the id guide-NAME---ENTRY.
"""

import base64
import collections
import functools
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

import strategies
from lab.views.chart import chart
from reporting.pages.element import tag, text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NO_HTML = {"html": False}  # markup in the source is shown as text
COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
ENTRY = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)  # the name with which a paragraph begins
BETWEEN_CELLS = re.compile(r"(</?(?:thead|tbody|tr|td|th)\b[^<>]*>)\n")  # line ends that only make the page larger


class Page(NamedTuple):
  """A page of the guide: its name, the title in its first line, and the HTML of the rest."""

  name: str
  title: str
  content: str

  @property
  def id(self) -> str:
    return f"guide-{self.name}"


def pages() -> list[Page]:
  """All pages of docs/, in the order in which README names them. The parts of a page follow it, as it links to them."""
  found = {file.stem for file in DOCS.glob("*.md")}
  named = [name for name in re.findall(r"\(docs/([\w-]+)\.md\)", "\n".join(_listed())) if name in found]
  parts = lambda name: re.findall(rf"\(({name}-[\w-]+)\.md\)", (DOCS / f"{name}.md").read_text())
  return [page(name) for name in dict.fromkeys([*(n for name in named for n in (name, *parts(name))), *sorted(found)])]


def page(name: str) -> Page:
  """One page of docs/."""
  title, _, rest = (DOCS / f"{name}.md").read_text().partition("\n")
  return Page(name, title.removeprefix("# "), rendered(rest, DOCS, f"guide-{name}"))


def in_order(names: Sequence[str]) -> list[str]:
  """Strategies in the order of README's table, and then those that are not in it."""
  listed = re.findall(r"^\| \[`(\w+)`\]\(strategies/", (ROOT / "README.md").read_text(), re.MULTILINE)
  return sorted(names, key=lambda name: listed.index(name) if name in listed else len(listed))


def contents() -> str:
  """README's list of the pages, without what is not in docs/."""
  head, line, *rows = _listed()
  return rendered("\n".join([head, line, *(row for row in rows if ".md)" in row and "docs/" in row)]), ROOT)


def problems() -> str:
  """The entries of docs/questions.md as links, by their headings. Each heading's are closed at first."""
  _, *groups = re.split(r"^## (.*)\n", (DOCS / "questions.md").read_text(), flags=re.MULTILINE)
  found = ""
  for heading, content in zip(groups[::2], groups[1::2], strict=True):
    names = [
      " ".join(named[1].split()).rstrip(".")
      for named in re.finditer(rf"(?<=\n\n){ENTRY.pattern}", "\n" + content, re.DOTALL)
    ]
    links = [tag("li", tag("a", rendered_line(name), href=f"#guide-questions---{slug(name)}")) for name in names]
    if links:
      found += tag("details", tag("summary", f"{escape(heading)} ({len(links)})"), tag("ul", *links), class_="problems")
  return found


def _listed() -> list[str]:
  """README's table of the pages, as lines."""
  tables = re.findall(r"^(?:\|.*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
  return max(tables, key=lambda table: table.count("](docs/")).splitlines()


def rendered(source: str, folder: Path, prefix: str = "", links: Mapping[str, str] | None = None) -> str:
  """Markdown as HTML.

  Args:
    folder: links in the source are relative to it.
    prefix: of the ids of headings, and of paragraphs that begin with a name; without one they have none.
    links: paths in the repository, each with the address to link to instead.
  """
  parser = MarkdownIt("commonmark", NO_HTML).enable("table")
  tokens = parser.parse(COMMENT.sub("", source))
  seen = collections.Counter[str]()
  for token, after in zip(tokens, [*tokens[1:], None], strict=True):
    if token.type in ("heading_open", "heading_close"):
      token.tag = f"h{int(token.tag[1]) + 1}"
    if token.type == "heading_open" and prefix and after:
      token.attrSet("id", f"{prefix}--{_unique(slug(after.content), seen)}")
    named = ENTRY.match(after.content) if token.type == "paragraph_open" and token.level == 0 and after else None
    if named and prefix:
      token.attrSet("id", f"{prefix}--{_unique('-' + slug(named[1]), seen)}")
    for inner in token.children or ():
      if inner.type == "link_open":
        inner.attrSet("href", _address(str(inner.attrs["href"]), folder, prefix, links or {}))
      if inner.type == "image":
        inner.attrSet("src", _inlined(folder / str(inner.attrs["src"])))
  for name, rule in RULES.items():
    parser.add_render_rule(name, rule)
  found = BETWEEN_CELLS.sub(r"\1", parser.renderer.render(tokens, parser.options, {}))
  return tag("div", found, class_="prose")


def rendered_line(source: str) -> str:
  """A line of Markdown, such as a title, as HTML without links."""
  return MarkdownIt("commonmark", NO_HTML).renderInline(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", source))


def slug(heading: str) -> str:
  """The link to a heading, as GitHub makes it."""
  return re.sub(r"[^\w\- ]", "", heading.lower().replace("\n", " ")).replace(" ", "-")


def _unique(anchor: str, seen: collections.Counter[str]) -> str:
  """An anchor, with a number if there is one of this name already, as GitHub numbers them."""
  seen[anchor] += 1
  return anchor + (f"-{seen[anchor] - 1}" if seen[anchor] > 1 else "")


def _code(renderer: Any, tokens: Sequence[Token], index: int, options: Any, environment: Any) -> str:
  if tokens[index].info == "mermaid":
    return chart(tokens[index].content, {name: f"#strategy-{name}" for name in strategies.names()})
  return text(tokens[index].content.rstrip("\n"))


def _as(markup: str) -> Any:
  return lambda renderer, tokens, index, options, environment: markup


RULES = {
  "fence": _code,
  "code_block": _code,
  "table_open": _as('<div class="scroll" tabindex="0"><table>'),
  "table_close": _as("</table></div>"),
}


def _address(link: str, folder: Path, prefix: str, links: Mapping[str, str]) -> str:
  """Where a link leads: to a part of this page, to a file relative to docs/, or out as it is."""
  if re.match(r"[a-z]+:", link):
    return link
  target, _, anchor = link.partition("#")
  if not target:
    return f"#{prefix}--{anchor}"
  path = Path(os.path.normpath(folder / target))
  if (given := links.get(path.relative_to(ROOT).as_posix())) is not None:
    return given
  if path.parent == DOCS and path.suffix == ".md":
    return f"#guide-{path.stem}" + (f"--{anchor}" if anchor else "")
  return os.path.relpath(path, DOCS) + (f"#{anchor}" if anchor else "")


@functools.cache
def _inlined(image: Path) -> str:
  """A picture as an address that holds it."""
  return f"data:image/{image.suffix[1:]};base64,{base64.b64encode(image.read_bytes()).decode()}"
