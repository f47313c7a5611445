"""Line charts: values by step, with a cross-hair that reads them, and a strip of what happened when."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from reporting.pages.axes import LEFT, RIGHT, TOP, WIDTH, Scale, frame, scales, svg
from reporting.pages.element import at, colour, figure, json_of, numbers, point, tag
from reporting.pages.units import short

POINTS = 400  # the most that are drawn of a line
ROWS = 40  # the most in the table below a chart
Event = tuple[float, str, float | None]  # the step, a text, and a value; None if that was not finite
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "10 4", "4 2 1 2", "3 5")


class Line(NamedTuple):
  """Values by step, in order. None is a value that was not finite. `dots` marks each point, for the rare ones."""

  name: str
  points: Sequence[tuple[float, float | None]]
  dots: bool = False


def thinned(points: Sequence[tuple[float, float | None]], most: int = POINTS) -> list[tuple[float, float | None]]:
  """At most about `most` of the points, all of them real (`telling`)."""
  return [points[i] for i in telling([y for _, y in points], most)]


def telling(values: Sequence[float | None], most: int = POINTS) -> list[int]:
  """The numbers of at most about `most` values that show all: the lowest and the highest of each of equal parts.

  The first and the last value stay, and so does one that is not finite in each part.
  """
  if len(values) <= most:
    return list(range(len(values)))
  size = math.ceil(2 * len(values) / most)
  kept = {0, len(values) - 1}
  for start in range(0, len(values), size):
    part = range(start, min(start + size, len(values)))
    finite = [(y, i) for i in part if (y := values[i]) is not None]
    kept |= {min(finite)[1], max(finite)[1]} if finite else set()
    kept |= set(itertools.islice((i for i in part if values[i] is None), 1))
  return sorted(kept)


def lines(
  title: str,
  series: Sequence[Line],
  unit: str = "",
  x: str = "step",
  form: Callable[[float], str] = short,
  log: bool = False,
) -> str:
  """A chart of lines; "" if none has a value. `form` writes a value as text. `log`: x is logarithmic."""
  drawn = [line._replace(points=thinned(line.points)) for line in series if any(y is not None for _, y in line.points)]
  if not drawn:
    return ""
  finite = [(px, py) for line in drawn for px, py in line.points if py is not None]
  across, up = scales((px for line in drawn for px, _ in line.points), (py for _, py in finite), log=log)
  paths = [_path(line, i, across, up) for i, line in enumerate(drawn)]
  hair = tag("path", d=f"M0 {at(up.end)}V{at(up.start)}", class_="hair", visibility="hidden")
  data = {
    "x": x,
    "box": [across.low, across.high, across.start, across.end],
    "log": log,
    "series": [{"name": line.name, "points": line.points} for line in drawn],
    "unit": unit,
  }
  picture = svg(frame(across, up, x, unit, form), *paths, hair, label=title, tabindex=0, class_="chart")
  return figure(
    title,
    picture,
    "; ".join(_says(line, form) for line in drawn) + ".",
    tag("output", "Point at the picture, or use the arrow keys, to read values.", class_="script"),
    _names(drawn) if len(drawn) > 1 else "",
    numbers([x, *(line.name for line in drawn)], _rows(drawn)),
    data_chart=json_of(data),
  )


def _path(line: Line, index: int, across: Scale, up: Scale) -> str:
  parts, draws = [], False
  for px, py in line.points:
    if py is None:
      draws = False
      continue
    parts.append(f"{'L' if draws else 'M'}{at(across(px))} {at(up(py))}")
    draws = True
  dash = DASHES[index % len(DASHES)]
  path = tag("path", d="".join(parts), class_=f"line l{colour(index)}", stroke_dasharray=dash or None)
  few = line.dots or len(line.points) == 1
  dots = [point(across(px), up(py), index, 2.6) for px, py in line.points if py is not None] if few else []
  return tag("g", path, *dots, data_series=index)


def _says(line: Line, form: Callable[[float], str]) -> str:
  """A line in words: where it starts, its lowest and highest value, and where it ends."""
  values = [y for _, y in line.points if y is not None]
  lost = sum(y is None for _, y in line.points)
  first, last = form(values[0]), form(values[-1])
  if len(values) == 1:
    says = f"{line.name}: {last}"
  else:
    says = f"{line.name}: {first} at first, {last} at last, between {form(min(values))} and {form(max(values))}"
  return says + (f", and {lost} not finite" if lost else "")


def _names(drawn: Sequence[Line]) -> str:
  """A box to tick for each line, which shows or hides it, with a sample of how it is drawn."""
  items = []
  for i, line in enumerate(drawn):
    dash = DASHES[i % len(DASHES)] or None
    sample = tag("path", d="M0 6H26", class_=f"line l{colour(i)}", stroke_dasharray=dash)
    sample += point(13, 6, i, 2.6) if line.dots else ""
    box = tag("input", type="checkbox", checked=True, data_shows=i)
    drawing = tag("svg", sample, viewBox="0 0 26 12", width=26, aria_hidden="true")
    items.append(tag("li", tag("label", box, drawing, escape(line.name))))
  return tag("ul", *items, class_="legend")


def _rows(drawn: Sequence[Line]) -> list[list[object]]:
  """At most ROWS rows: a step, and the value that each line has there."""
  at_step: list[dict[float, float | None]] = [dict(line.points) for line in drawn]
  steps = sorted({step for found in at_step for step in found})
  every = math.ceil(len(steps) / ROWS)
  chosen = [*steps[:-1:every], steps[-1]]
  text = lambda found, step: "" if step not in found else "not finite" if found[step] is None else found[step]
  return [[f"{step:g}", *(text(found, step) for found in at_step)] for step in chosen]


def strip(title: str, last: float, events: Mapping[str, Sequence[Event]], x: str = "step") -> str:
  """A row for each kind of event, with a mark at each one's step; "" if nothing happened.

  Of very many events of a kind, some are shown (`telling`).

  Args:
    events: kind → the step, a text about it, and its value, in order of time.
  """
  counts = {kind: len(found) for kind, found in events.items() if found}
  if not counts:
    return ""
  rows = {kind: [events[kind][i] for i in telling([value for _, _, value in events[kind]])] for kind in counts}
  height = TOP + 24 * len(rows)
  place = lambda step: LEFT + 40 + (WIDTH - RIGHT - LEFT - 46) * step / max(last, 1)
  drawn = []
  for i, (kind, found) in enumerate(rows.items()):
    y = TOP + 24 * i + 8
    drawn.append(tag("text", escape(kind), x=0, y=at(y + 3.5)))
    drawn.append(tag("path", d=f"M{at(place(0))} {at(y)}H{at(place(last))}", class_="grid"))
    drawn += [point(place(step), y, i, 4.2, data_label=f"{x} {step:g}: {says}") for step, says, _ in found]
  ends = [tag("text", short(n), x=at(place(n)), y=at(height + 8), text_anchor="middle") for n in (0, last)]
  shown = lambda kind: f", of which {len(rows[kind]):,} are shown" if len(rows[kind]) < counts[kind] else ""
  says = "; ".join(f"{kind}: {count}{shown(kind)}" for kind, count in counts.items()) + "."
  table = [[f"{step:g}", kind, text] for kind, found in rows.items() for step, text, _ in found]
  return figure(
    title,
    svg(*drawn, *ends, label=title, height=height + 12, tabindex=0, class_="marks"),
    says,
    tag("output", "Point at a mark, or use the arrow keys.", class_="script"),
    numbers([x, "what", ""], sorted(table, key=lambda row: float(row[0]))),
  )
