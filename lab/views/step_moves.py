"""A step's moves as a picture: a column for each thing that a device does, as high as its memory is full.

The site draws the record of lab/benchmarks/moves.py. Buttons and arrow keys go from column to column.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import strategies
from lab.analysis.moves import Move
from reporting.pages.axes import Scale, svg
from reporting.pages.element import at, colour, figure, legend, numbers, section, tag
from reporting.pages.units import amount, duration

KINDS = {
  "compute": "computes",
  "all-gather": "gathers",
  "reduce-scatter": "scatters",
  "all-reduce": "all-reduces",
  "all-to-all": "exchanges",
  "collective-permute": "sends to a neighbour",
  "ragged-all-to-all": "exchanges",
}
NAMES = list(dict.fromkeys(KINDS.values()))
WIDTH, LEFT, TOP, HEIGHT = 1080.0, 62.0, 20.0, 150.0


def view(record: Mapping[str, Any], name: str) -> str:
  """The picture of a strategy, as a section; "" if it is not in the record."""
  if name not in record["strategies"]:
    return ""
  row = record["strategies"][name]
  found = [Move(*fields)._replace(seconds=1e-6 * fields[7], waits=1e-6 * fields[8]) for fields in row["moves"]]
  topology, model, length, batch, remat, experts = record["case"]
  model += f" parameters and {experts} experts" if strategies.layout_of(name).axes("experts") else " parameters"
  about = (
    f"With {model} on {topology}, batches of {batch} sequences of {length} tokens and remat {remat}, as compiled; "
  )
  about += "nothing has run. A loop over blocks is shown by one round, that is by one block. "
  about += f"{record['command']} makes the record."
  return section("What moves in a step, one thing after another", picture(found, row["memory"]), about=about)


def picture(moves: Sequence[Move], compiled: int) -> str:
  """The columns, with buttons. `compiled`: the memory of a device by the compiler."""
  most = max(move.memory for move in moves)
  up, wide = Scale(0.0, 1.05 * most, TOP + HEIGHT, TOP), (WIDTH - LEFT) / len(moves)
  lines = [tag("path", d=f"M{at(LEFT)} {at(up(size))}H{at(WIDTH)}", class_="grid") for size in up.ticks()]
  lines += [tag("text", amount(size), x=at(LEFT - 4), y=at(up(size) + 4), text_anchor="end") for size in up.ticks()]
  for i, move in enumerate(moves):
    x = LEFT + i * wide
    if i and moves[i - 1].loop != move.loop:
      lines.append(tag("path", d=f"M{at(x)} 2V{at(TOP + HEIGHT)}", class_="grid"))
    if move.loop and (i == 0 or moves[i - 1].loop != move.loop):
      name = f"{move.loop}, {move.times} times"
      columns = next((n for n, other in enumerate(moves[i:]) if other.loop != move.loop), len(moves) - i)
      lines += [tag("text", escape(name), x=at(x + 2), y=12, class_="name")] if 6 * len(name) < wide * columns else []
    shape = {"x": at(x + 0.5), "width": at(wide - 1), "y": at(up(move.memory)), "height": at(up(0) - up(move.memory))}
    group = NAMES.index(KINDS[move.kind])
    lines.append(tag("rect", class_=f"f{colour(group)}", data_label="", **shape))
  drawn = svg(
    *lines, label="moves of a step", width=WIDTH, height=TOP + HEIGHT + 4, tabindex=0, class_="marks ticks",
    style=f"width:{WIDTH:.0f}px",
  )  # fmt: skip
  button = lambda text, by: tag("button", text, type="button", data_move=by)
  says = f"A column is as high as the memory that is in use, at most {amount(most)}. The compiler's own figure is "
  says += f"{amount(compiled)}, because it also decides where each array is."
  rows = [[f"{i} of {len(moves)}", where(move), sentence(move)] for i, move in enumerate(moves, 1)]
  used = [i for i, name in enumerate(NAMES) if any(KINDS[move.kind] == name for move in moves)]
  return figure(
    "From the first kernel to the last",
    tag("div", drawn, class_="scroll", tabindex=0),
    says,
    tag("p", button("◀ previous", -1), " ", button("next ▶", 1), class_="script"),
    tag("output", "Use the buttons, point at a column, or use the arrow keys.", class_="script"),
    legend([NAMES[i] for i in used], classes=[f"f{colour(i)}" for i in used]),
    numbers(["", "where", "what"], rows, title="As a list"),
    wide=True,
  )


def where(move: Move) -> str:
  """The part of the step."""
  return f"{move.loop} (one of {move.times} rounds)" if move.loop else "outside of loops"


def sentence(move: Move) -> str:
  """A move in words."""
  if move.kind == "compute":
    did = f"computes {', '.join(move.what) or 'other parts'} for {duration(move.seconds)}"
  else:
    kind = move.kind if move.count == 1 else f"{move.count} times {move.kind}"
    did = f"{kind} over {' and '.join(move.over)} of {', '.join(move.what[:3])}{', …' if len(move.what) > 3 else ''}: "
    did += f"sends {amount(move.sent)} in {duration(move.seconds)}, and kernels wait for {duration(move.waits)}"
  return f"{did}. {amount(move.memory)} in memory"
