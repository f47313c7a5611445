"""Points of two values, in series."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from reporting.pages.axes import frame, scales, svg
from reporting.pages.element import at, figure, legend, point, tag
from reporting.pages.units import short

SPAN = 8  # the ratio of the largest to the smallest x from which on the axis is logarithmic


class Point(NamedTuple):
  """A point of a series. `about` is shown when one points at it."""

  x: float
  y: float
  series: str
  about: str


def scatter(
  title: str,
  points: Sequence[Point],
  x: str,
  y: str,
  says: str,
  *more: str,
  limit: tuple[str, float] | None = None,
  x_form: Callable[[float], str] = short,
  y_form: Callable[[float], str] = short,
) -> str:
  """The points on a y from 0, and an x that is logarithmic if it spans much. `limit`: a line's name and its y.

  Args:
    says: the sentence that says what the picture shows.
    more: what stands below it.
  """
  names = list(dict.fromkeys(p.series for p in points))
  heights = [p.y for p in points] + ([limit[1]] if limit else [])
  widths = [p.x for p in points]
  across, up = scales(widths, heights, zero=True, log=max(widths) > SPAN * min(widths) > 0, pad=0.04)
  drawn = [point(across(p.x), up(p.y), names.index(p.series), 3.2, data_label=f"{p.series}: {p.about}") for p in points]
  if limit:
    drawn.append(tag("path", d=f"M{at(across.start)} {at(up(limit[1]))}H{at(across.end)}", class_="limit"))
    where = {"x": at(across.end), "y": at(up(limit[1]) - 3), "text_anchor": "end"}
    drawn.append(tag("text", escape(limit[0]), **where))
  picture = svg(frame(across, up, x, y, y_form), *drawn, label=title, tabindex=0, class_="marks")
  output = tag("output", "Point at a mark, or use the arrow keys.", class_="script")
  return figure(title, picture, says, output, legend(names, shapes=True), *more)
