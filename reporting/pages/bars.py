"""Horizontal bars: parts of a whole beside a limit, and values side by side."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from reporting.pages.axes import WIDTH, svg
from reporting.pages.element import at, colour, figure, legend, numbers, tag
from reporting.pages.units import short

ROW, BAR = 34.0, 14.0  # the height of a row with its name, and of the bar in it
ROOM = 68.0  # for the number behind a bar


def stacked(
  title: str,
  rows: Sequence[tuple[str, Mapping[str, float]]],
  form: Callable[[float], str] = short,
  limit: tuple[str, float] | None = None,
) -> str:
  """A bar for each row, made of its parts, from left to right; "" without rows.

  Args:
    rows: a name, and its parts' values by their names.
    limit: the name and value of a line across all bars, such as a device's memory.
  """
  names = list(dict.fromkeys(part for _, parts in rows for part in parts))
  totals = [sum(parts.values()) for _, parts in rows]
  if not rows or not max(totals):
    return ""
  longest = max([*totals, *([limit[1]] if limit else [])])
  wide = lambda value: value / longest * (WIDTH - ROOM)
  drawn = []
  for i, ((name, parts), total) in enumerate(zip(rows, totals, strict=True)):
    y, x = ROW * i + 14, 0.0
    drawn.append(tag("text", escape(name), x=0, y=at(y - 4)))
    for part, value in parts.items():
      shape = {"x": at(x), "y": at(y), "width": at(wide(value)), "height": at(BAR)}
      drawn.append(
        tag("rect", class_=f"f{colour(names.index(part))}", data_label=f"{name}: {part} {form(value)}", **shape)
      )
      x += wide(value)
    drawn.append(tag("text", escape(form(total)), x=at(x + 4), y=at(y + 11)))
  height = ROW * len(rows)
  if limit:
    drawn.append(tag("path", d=f"M{at(wide(limit[1]))} 4V{at(height)}", class_="limit"))
    drawn.append(tag("text", escape(limit[0]), x=at(wide(limit[1])), y=at(height + 11), text_anchor="end"))
  says = "; ".join(f"{name}: {form(total)}" for (name, _), total in zip(rows, totals, strict=True))
  if limit:
    says += f"; {limit[0]}: {form(limit[1])}"
  table = [[name, *(form(parts[part]) if part in parts else "" for part in names)] for name, parts in rows]
  return figure(
    title,
    svg(*drawn, label=title, height=height + 16, tabindex=0, class_="marks"),
    says + ".",
    tag("output", "Point at a part, or use the arrow keys.", class_="script"),
    legend(names),
    numbers(["", *names], table),
  )


def grouped(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], form: Callable[[float], str] = short) -> str:
  """Bars below one another for each row, one for each name; "" without rows."""
  names = list(dict.fromkeys(name for _, values in rows for name in values))
  longest = max((value for _, values in rows for value in values.values()), default=0)
  if not longest:
    return ""
  drawn, y = [], 0.0
  for row, values in rows:
    drawn.append(tag("text", escape(row), x=0, y=at(y + 11)))
    y += 16
    for name, value in values.items():
      wide = value / longest * (WIDTH - ROOM)
      shape = {"x": 0, "y": at(y), "width": at(wide), "height": 10}
      drawn.append(
        tag("rect", class_=f"f{colour(names.index(name))}", data_label=f"{row}: {name} {form(value)}", **shape)
      )
      drawn.append(tag("text", escape(form(value)), x=at(wide + 4), y=at(y + 9)))
      y += 13
    y += 7
  table = [[row, *(form(values[name]) if name in values else "" for name in names)] for row, values in rows]
  said = [f"{row}: " + ", ".join(f"{name} {form(value)}" for name, value in values.items()) for row, values in rows]
  return figure(
    title,
    svg(*drawn, label=title, height=y, tabindex=0, class_="marks"),
    "; ".join(said) + ".",
    tag("output", "Point at a bar, or use the arrow keys.", class_="script"),
    legend(names),
    numbers(["", *names], table),
  )
