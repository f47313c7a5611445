"""The axes of a picture: where a number is drawn, and which round numbers are written beside it."""

import math
from collections.abc import Callable, Iterable
from html import escape
from typing import NamedTuple

from reporting.pages.element import at, tag
from reporting.pages.units import short

WIDTH, HEIGHT = 360.0, 216.0  # of every picture, so that its letters have one size on every screen
LEFT, TOP, RIGHT, BOTTOM = 50.0, 10.0, 12.0, 34.0  # margins


class Scale(NamedTuple):
  """Maps numbers between `low` and `high` to coordinates between `start` and `end`."""

  low: float
  high: float
  start: float
  end: float
  log: bool = False

  def __call__(self, number: float) -> float:
    low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, number))
    return self.start + (value - low) / (high - low) * (self.end - self.start)

  def ticks(self) -> list[float]:
    """Round numbers in the range: about five, or on a logarithmic scale 1, 2 and 5 times powers of ten."""
    if self.log:
      powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
      found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
      inside = [number for number in found if self.low <= number <= self.high]
      return inside if 2 <= len(inside) <= 8 else [n for n in inside if f"{n:e}"[0] == "1"] or [self.low, self.high]
    step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (factor * step) <= 5)
    first = math.ceil(self.low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def scales(
  xs: Iterable[float], ys: Iterable[float], zero: bool = False, log: bool = False, pad: float = 0.0
) -> tuple[Scale, Scale]:
  """The scales of a picture that shows these numbers. `zero`: y starts at 0. `log`: x is logarithmic. `pad`: of x."""
  x0, x1 = _range(xs, pad=0.04 if log else pad, log=log)
  y0, y1 = _range(ys, pad=0.06)
  return (
    Scale(x0, x1, LEFT, WIDTH - RIGHT, log),
    Scale(0.0 if zero else y0, y1, HEIGHT - BOTTOM, TOP),
  )


def _range(numbers: Iterable[float], pad: float, log: bool = False) -> tuple[float, float]:
  found = [n for n in numbers if math.isfinite(n)] or [0.0, 1.0]
  low, high = min(found), max(found)
  if log:
    ratio = max(high / low, 1.5) ** pad if high > low else 1.5
    return low / ratio, high * ratio
  extent = high - low or abs(high) or 1.0
  low, high = (low - extent * pad, high + extent * pad) if high > low else (low - extent / 2, high + extent / 2)
  return low, high


def frame(x: Scale, y: Scale, x_name: str, y_name: str, y_form: Callable[[float], str] = short) -> str:
  """Grid lines, round numbers, and the names of both axes."""
  left, right, bottom = x.start, x.end, y.start
  lines = [tag("path", d=f"M{at(left)} {at(y(n))}H{at(right)}", class_="grid") for n in y.ticks()]
  lines += [tag("path", d=f"M{at(left)} {at(bottom)}H{at(right)}", class_="axis")]
  lines += [tag("text", y_form(n), x=at(left - 5), y=at(y(n) + 3.5), text_anchor="end") for n in y.ticks()]
  lines += [tag("text", short(n), x=at(x(n)), y=at(bottom + 13), text_anchor="middle") for n in _apart(x)]
  lines += [tag("text", escape(x_name), x=at(right), y=at(bottom + 27), text_anchor="end", class_="name")]
  lines += [tag("text", escape(y_name), x=0, y=at(bottom + 27), class_="name")]
  return tag("g", *lines)


def _apart(x: Scale) -> list[float]:
  """The ticks of x that have room for their numbers."""
  kept: list[float] = []
  for number in x.ticks():
    if not kept or abs(x(number) - x(kept[-1])) >= 34:
      kept.append(number)
  return kept


def svg(*content: str, label: str, width: float = WIDTH, height: float = HEIGHT, **attributes: object) -> str:
  """A picture; `label` names it for those who do not see it."""
  box = f"0 0 {at(width)} {at(height)}"
  return tag("svg", *content, viewBox=box, role="img", aria_label=label, **attributes)
