"""What a step sends, as tables of text."""

from collections import Counter
from typing import Any

from lab.analysis.communication import Collective
from lab.analysis.origins import Origin


def table(rows: list[tuple[str, ...]]) -> str:
  """Rows as text with aligned columns. The first row is the heading. Numbers are aligned to the right."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  is_number = [all(row[i][:1].isdigit() or not row[i] for row in rows[1:]) for i in range(len(widths))]
  align = lambda cell, i: cell.rjust(widths[i]) if is_number[i] else cell.ljust(widths[i])
  lines = ["  ".join(align(cell, i) for i, cell in enumerate(row)).rstrip() for row in rows]
  return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def communication(found: dict[str, Any]) -> str:
  """The table of the compiled collectives, and the table of what theory says each device must send."""
  if found["communication"] == found["theory"] == []:
    return "sends nothing"
  theory = [("by theory", "over", "bytes a step")]
  theory += [
    (f"{row['kind']}: {row['what']}", "+".join(row["axes"]), f"{row['bytes']:,.0f}") for row in found["theory"]
  ]
  if found["communication"] is None:
    return f"The compiler refused the step, so its collectives are not known.\n\n{table(theory)}"
  rows = [("sent in a step by each device", "over", "how many", "times", "bytes each time", "bytes a step")]
  for row in found["communication"]:
    numbers = (str(row["count"]), str(row["times"]), f"{row['sent']:,.0f}", f"{row['sent_in_step']:,.0f}")
    rows.append((row["kind"], "+".join(row["axes"]), *numbers))
  rows.append(("total", "", "", "", "", f"{sum(row['sent_in_step'] for row in found['communication']):,.0f}"))
  theory.append(("total", "", f"{sum(row['bytes'] for row in found['theory']):,.0f}"))
  return "\n\n".join([table(rows), table(theory), *(row["said"] for row in found["excess"])])


def with_lines(one: Origin) -> list[str]:
  """A collective as text, and the lines of source that make its operand and use its result, if they are known."""
  places = ("made by", one.made), ("used by", one.used)
  return [f"sends: {sentence(one.collective)}", *(f"  {how}: {line}" for how, line in places if line)]


def sentence(one: Collective) -> str:
  """One collective as text."""
  shapes = Counter(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in one.operands)
  given = ", ".join(shape if n == 1 else f"{n} × {shape}" for shape, n in shapes.items())
  given = given if len(shapes) <= 2 else f"{len(one.operands)} arrays"
  often = "" if one.times == 1 else f", {one.times} times"
  # A permutation is always between pairs of devices.
  together = "" if one.kind == "collective-permute" else f", {one.devices} devices together"
  return (
    f"{one.kind} over {' and '.join(one.axes)}{together}: each puts in {given} and sends {one.sent:,.0f} bytes{often}"
  )
