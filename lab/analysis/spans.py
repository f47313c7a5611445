"""A step's kernels and links side by side, as rows to draw: the whole step, and one round of each of its loops.

overlap.py notes what runs when. Here neighbours are joined until a picture has room for them, and no second is lost.
"""

from collections.abc import Iterable
from typing import Any

from lab.analysis.overlap import Overlap, Span
from lab.analysis.profile import scope
from reporting.pages.units import amount

LEAST = 0.004  # of what is drawn; what takes less joins its neighbour
DEPTH = 3  # how many scopes of a name are written


def panels(found: Overlap) -> list[dict[str, Any]]:
  """The whole step, then each loop, with times in microseconds.

  Each has a `name`, how often it runs (`times`), how long it takes each time (`length`), and its `spans`: kind, begin,
  end, how often in a step, and a text. In the whole step, a loop is one span with all of its rounds. A panel of a loop
  begins with its first round.
  """
  loops = [span for span in found.spans if span.kind == "loop"]
  end = max((span.end for span in found.spans), default=0.0)
  whole = [_panel("step", 1, 0.0, end, (span for span in found.spans if not span.loop))]
  return whole + [
    _panel(name_of(loop), loop.times, loop.begin, loop.round, (s for s in found.spans if s.loop == loop.name))
    for loop in loops
  ]


def seconds(drawn: Iterable[dict[str, Any]], kind: str) -> float:
  """The seconds in a step that the spans of a kind take in all panels."""
  return sum(1e-6 * (end - begin) * times for p in drawn for of, begin, end, times, _ in p["spans"] if of == kind)


def _panel(name: str, times: int, start: float, length: float, spans: Iterable[Span]) -> dict[str, Any]:
  rows: dict[str, list[list[Any]]] = {"kernel": [], "sent": [], "exposed": [], "loop": []}
  for span in spans:
    row = [span.kind, span.begin - start, span.end - start, span.times, name_of(span)]
    before = rows[span.kind][-1] if rows[span.kind] else None
    if span.kind != "loop" and before and _joins(before, row, LEAST * length):
      longer = max(before, row, key=lambda one: one[2] - one[1])
      before[2:] = [row[2], row[3], longer[4]]
    else:
      rows[span.kind].append(row)
  written = [
    [kind, round(1e6 * begin, 2), round(1e6 * end, 2), often, text]
    for found in rows.values()
    for kind, begin, end, often, text in found
  ]
  return {"name": name, "times": times, "length": round(1e6 * length, 2), "spans": written}


def _joins(before: list[Any], row: list[Any], least: float) -> bool:
  """Whether a span follows another without a gap, and is the same or one of them is short."""
  gap, short = row[1] - before[2], min(one[2] - one[1] for one in (before, row))
  return abs(gap) < 1e-9 and row[3] == before[3] and (row[4] == before[4] or short < least)


def name_of(span: Span) -> str:
  """Of a collective: kind, axes and bytes each time. Then the scopes, or else an instruction's name without numbers."""
  named, one = "/".join(scope(span.op_name).split("/")[:DEPTH]), span.collective
  if one:
    return ", ".join(filter(None, (f"{one.label} over {'+'.join(one.axes)}", amount(one.sent), named)))
  return named or span.name.split(".")[0]
