"""HTML and SVG elements as text, and the parts that every page has: sections, figures, tables, tiles."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

COLOURS = 8  # that page.css defines, as --c1 to --c8
SHAPES = (  # the corners of marks, around their centre
  [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
  [(-1, -1), (1, -1), (1, 1), (-1, 1)],
  [(0, -1.3), (1.2, 0.9), (-1.2, 0.9)],
  [(0, 1.3), (1.2, -0.9), (-1.2, -0.9)],
  [(-1.3, -0.5), (1.3, -0.5), (1.3, 0.5), (-1.3, 0.5)],
  [(-0.5, -1.3), (0.5, -1.3), (0.5, 1.3), (-0.5, 1.3)],
  [(-1.2, -1.2), (1.2, 0), (-1.2, 1.2)],
  [(1.2, -1.2), (-1.2, 0), (1.2, 1.2)],
)


def tag(name: str, *content: str, **attributes: Any) -> str:
  """An element. Content is markup already; the values of attributes are escaped here.

  A trailing underscore of an attribute's name is dropped (class_), other underscores become hyphens, and None and False
  leave the attribute out.
  """
  written = "".join(
    f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
    for key, value in attributes.items()
    if value is not None and value is not False
  )
  return f"<{name}{written}>{''.join(content)}</{name}>"


def json_of(value: Any) -> str:
  """A value as JSON for a script of the page, in an attribute or in a script element.

  A script element takes its content as it is, so `<` is written as \\u003c: no text in the value can end the element.
  """
  return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def at(number: float) -> str:
  """A coordinate in a picture, to a tenth of a unit."""
  return f"{number:.1f}".removesuffix(".0")


def section(title: str, *parts: str, about: str = "") -> str:
  """A heading, a sentence about what is shown, and the parts side by side where there is room."""
  content = "".join(parts)
  intro = tag("p", escape(about), class_="about") if about else ""
  return tag("section", tag("h2", escape(title)), intro, tag("div", content, class_="cards")) if content else ""


def figure(title: str, picture: str, says: str, *more: str, wide: bool = False, **attributes: Any) -> str:
  """A picture with its title, the sentence that says the same, and more below, such as a legend or `numbers`."""
  caption = tag("figcaption", escape(says))
  classes = "card wide" if wide else "card"
  return tag("figure", tag("h3", escape(title)), picture, caption, *more, class_=classes, **attributes)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """A table that scrolls sideways where it does not fit. The first cell of a row is its heading."""
  cell = lambda value, i: tag("td" if i else "th", escape(str(value)), scope=None if i else "row")
  body = "".join(tag("tr", *(cell(value, i) for i, value in enumerate(row))) for row in rows)
  heads = tag("thead", tag("tr", *(tag("th", escape(name), scope="col") for name in head)))
  return tag("div", tag("table", heads, tag("tbody", body)), class_="scroll", tabindex=0)


def numbers(head: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "Numbers") -> str:
  """The numbers of a picture as a table that is closed at first."""
  return tag("details", tag("summary", escape(title)), table(head, rows)) if rows else ""


def card(title: str, *content: str, wide: bool = True) -> str:
  """Something other than a picture: a table, a text."""
  return tag("div", tag("h3", escape(title)) if title else "", *content, class_="card wide" if wide else "card")


def text(content: str) -> str:
  """Text as it is, with its line breaks."""
  return tag("pre", escape(content), tabindex=0)


def tiles(figures: Iterable[tuple[str, str]]) -> str:
  """The most important figures: pairs of a name and a value."""
  each = "".join(tag("div", tag("dt", escape(name)), tag("dd", escape(value))) for name, value in figures)
  return tag("dl", each, class_="tiles")


def legend(names: Sequence[str], shapes: bool = False, classes: Sequence[str] = ()) -> str:
  """The names of the colours, in order. With `shapes`, the samples are points of different shapes.

  Args:
    classes: the samples' classes in page.css, if they are not its numbered colours.
  """
  kinds = classes or [f"f{colour(i)}" for i in range(len(names))]
  sample = lambda i: point(7, 6, i) if shapes else tag("rect", x=0, y=1, width=14, height=10, class_=kinds[i])
  items = (
    tag("li", tag("svg", sample(i), viewBox="0 0 14 12", aria_hidden="true"), escape(name))
    for i, name in enumerate(names)
  )
  return tag("ul", *items, class_="legend")


def colour(index: int) -> int:
  """The number of a colour in page.css, from 1."""
  return index % COLOURS + 1


def point(x: float, y: float, index: int, size: float = 3.6, **attributes: Any) -> str:
  """A small mark. Every series has a shape of its own, so that colour is not the only difference."""
  corners = SHAPES[index % len(SHAPES)]
  points = " ".join(f"{at(x + size * dx)},{at(y + size * dy)}" for dx, dy in corners)
  return tag("polygon", points=points, class_=f"f{colour(index)}", **attributes)
