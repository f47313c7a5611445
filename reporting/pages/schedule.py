"""The schedule of a pipeline as a timeline: a row for each stage, a column for each tick."""

from collections.abc import Sequence
from html import escape

from reporting.pages.axes import svg
from reporting.pages.element import at, figure, legend, tag

KINDS = ("forward", "backward", "weights")
NAMES = ("forward", "backward", "gradients of weights", "waits")
ROW, LEFT = 24.0, 46.0
UNIT = 15.0  # the width of a unit


def schedule(title: str, stages: Sequence[Sequence[Sequence[tuple[str, str]]]], says: str) -> str:
  """The timeline.

  Args:
    stages: for each stage and tick, the units that run: their kind (one of KINDS) and the microbatch as text.
    says: the sentence with the figures, such as the time that stages wait.
  """
  widths = [UNIT * max(1, *(len(row[tick]) for row in stages)) for tick in range(len(stages[0]))]
  starts = [LEFT + sum(widths[:tick]) for tick in range(len(widths))]
  drawn = []
  for stage, row in enumerate(stages):
    y = ROW * stage
    drawn.append(tag("text", f"stage {stage}", x=0, y=at(y + 15)))
    for tick, units in enumerate(row):
      x, whole = starts[tick], widths[tick]
      wide = whole / max(1, len(units))
      if not units:
        label = f"stage {stage}, tick {tick}: waits"
        drawn.append(_cell(x, y, whole, "wait", label))
      for i, (kind, name) in enumerate(units):
        label = f"stage {stage}, tick {tick}: {NAMES[KINDS.index(kind)]}, microbatch {name}"
        drawn.append(_cell(x + i * wide, y, wide, kind, label))
        drawn.append(tag("text", escape(name), x=at(x + (i + 0.5) * wide - 0.5), y=at(y + 15), class_=f"on {kind}"))
  width, height = starts[-1] + widths[-1], ROW * len(stages)
  picture = svg(
    *drawn, label=title, width=width, height=height, tabindex=0, class_="marks ticks", style=f"width:{width:.0f}px"
  )
  return figure(
    title,
    tag("div", picture, class_="scroll", tabindex=0),
    says,
    tag("output", "Point at a unit, or use the arrow keys.", class_="script"),
    legend(NAMES, classes=(*KINDS, "wait")),
    wide=True,
  )


def _cell(x: float, y: float, width: float, kind: str, label: str) -> str:
  shape = {"x": at(x), "y": at(y + 1), "width": at(width - 1), "height": at(ROW - 3)}
  return tag("rect", class_=kind, data_label=label, **shape)
