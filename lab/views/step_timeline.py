"""A step's timeline as pictures: kernels and links side by side, for the whole step and a round of each long loop.

The site shows the recorded ones (lab/benchmarks/timeline.py), and `tools.explain --html` those of its step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.analysis.spans import seconds
from reporting.pages.element import card, section, table
from reporting.pages.tracks import Piece, tracks
from reporting.pages.units import duration

Panel = Mapping[str, Any]
LEAST = 0.05  # of the step: loops that take less are not drawn
PARTS = {"attention": "attention", "mlp": "MLP", "weights": "weights, before and after they are sent"}
SENT = {"sent": "sent beside kernels", "exposed": "sent while kernels wait"}
LOOP, OTHER = "a loop", "other kernels"
GROUPS = (*PARTS.values(), OTHER, LOOP, *SENT.values())


def view(record: Mapping[str, Any]) -> str:
  """The pictures of a record of lab/benchmarks/timeline.py, with what its step takes in all."""
  choices = {f"{choice} options": found["panels"] for choice, found in record["choices"].items()}
  figures_of = lambda found: [duration(found[what]) for what in ("kernels", "sent", "exposed")]
  rows = [(f"{choice} options", *figures_of(found)) for choice, found in record["choices"].items()]
  head = ("", "kernels run", "links are busy", "of it, kernels wait")
  return section("", card("In a step", table(head, rows))) + section("When", figures(choices))


def figures(choices: Mapping[str, Sequence[Panel]]) -> str:
  """The pictures of `spans.panels`, by the name of how the step was compiled. Those of one panel have one scale."""
  names = dict.fromkeys(panel["name"] for drawn in choices.values() for panel in drawn if _is_long(panel, drawn))
  found = ""
  for name in names:
    of = {choice: next((p for p in drawn if p["name"] == name), None) for choice, drawn in choices.items()}
    longest = max(1e-6 * panel["length"] for panel in of.values() if panel)
    found += "".join(_figure(choice, panel, longest) for choice, panel in of.items() if panel)
  return found


def _is_long(panel: Panel, drawn: Sequence[Panel]) -> bool:
  return panel["times"] * panel["length"] >= LEAST * drawn[0]["length"]


def _figure(choice: str, panel: Panel, longest: float) -> str:
  what = "The whole step" if panel["times"] == 1 else f"One of {panel['times']} rounds of {panel['name']}"
  kernels, sent, exposed = (seconds([panel], kind) / panel["times"] for kind in ("kernel", "sent", "exposed"))
  says = f"{what} takes {duration(1e-6 * panel['length'])}: " + ("outside of loops, " if panel["times"] == 1 else "")
  says += f"kernels run for {duration(kernels)}, links for {duration(sent)}, and kernels wait for {duration(exposed)}."
  return tracks(f"{what}, {choice}", pieces(panel), GROUPS, longest, says, duration)


def pieces(panel: Panel) -> list[Piece]:
  """The spans of a panel as pieces: loops below kernels, and what is exposed over what is sent."""
  order = ("loop", "kernel", "sent", "exposed")
  found = []
  for kind, begin, end, times, text in sorted(panel["spans"], key=lambda span: order.index(span[0])):
    row = "links" if kind in SENT else "kernels"
    is_wide = kind == "loop" and end - begin > LEAST * panel["length"]
    name = f"{text}, {times // panel['times']} rounds" if is_wide else ""
    found.append(Piece(row, 1e-6 * begin, 1e-6 * end, _group(kind, text), text, name))
  return found


def _group(kind: str, text: str) -> str:
  if kind == "loop":
    return LOOP
  return SENT.get(kind) or next((group for part, group in PARTS.items() if part in text.split("/")), OTHER)
