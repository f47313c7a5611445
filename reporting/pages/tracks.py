"""What several units do over the same time: a row for each, and pieces in it from one time to another."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from reporting.pages.axes import Scale, svg
from reporting.pages.element import at, colour, figure, legend, numbers, tag

WIDTH, LEFT, ROW, BAR = 1080.0, 62.0, 30.0, 24.0


class Piece(NamedTuple):
  """What a unit does for some time.

  Attributes:
    group: its colour's name in the legend.
    about: shown on pointing.
    name: written in it, if any.
  """

  row: str
  begin: float
  end: float
  group: str
  about: str
  name: str = ""


def tracks(
  title: str, pieces: Sequence[Piece], groups: Sequence[str], length: float, says: str, form: Callable[[float], str]
) -> str:
  """The rows below one another, with a time axis; later pieces are drawn over earlier ones.

  Args:
    groups: all names of the legend, in order, so that pictures of one page agree.
    length: the time that the whole width stands for, so that several pictures can have one scale.
    form: writes a time as text.
  """
  rows = list(dict.fromkeys(piece.row for piece in pieces))
  across, bottom = Scale(0.0, length, LEFT, WIDTH - 30), ROW * len(rows)
  drawn = [tag("text", escape(name), x=0, y=at(ROW * i + 16)) for i, name in enumerate(rows)]
  drawn += [tag("path", d=f"M{at(across(t))} 0V{at(bottom)}", class_="grid") for t in across.ticks()]
  for piece in pieces:
    x = across(piece.begin)
    shape = {"x": at(x), "y": at(ROW * rows.index(piece.row)), "width": at(max(across(piece.end) - x, 0.4))}
    label = f"{piece.about}: {form(piece.end - piece.begin)} from {form(piece.begin)}"
    drawn.append(tag("rect", height=at(BAR), class_=f"f{colour(groups.index(piece.group))}", data_label=label, **shape))
    if piece.name:
      centre, below = across((piece.begin + piece.end) / 2), ROW * rows.index(piece.row) + 16
      drawn.append(tag("text", escape(piece.name), x=at(centre), y=at(below), class_="on"))
  drawn += [
    tag("text", escape(form(t)), x=at(across(t)), y=at(bottom + 12), text_anchor="middle") for t in across.ticks()
  ]
  picture = svg(
    *drawn, label=title, width=WIDTH, height=bottom + 16, tabindex=0, class_="marks ticks", style=f"width:{WIDTH:.0f}px"
  )
  table = [[p.row, form(p.begin), form(p.end), p.group, p.about] for p in pieces]
  return figure(
    title,
    tag("div", picture, class_="scroll", tabindex=0),
    says,
    tag("output", "Point at a piece, or use the arrow keys.", class_="script"),
    legend(groups),
    numbers(["row", "from", "to", "", "what"], table),
    wide=True,
  )
