"""The page that `tools.plan --html` writes: every plan that fits by step time and memory, and the best as a table."""

import collections
from collections.abc import Iterable, Sequence

from lab.analysis.search import Candidate
from lab.analysis.topology import Machine
from reporting import pages
from reporting.pages.bars import grouped
from reporting.pages.element import card, section, table, text
from reporting.pages.scatter import Point, scatter
from reporting.pages.units import amount, duration

OF_EACH, DRAWN = 25, 400  # plans of each strategy that are always drawn, and how many are drawn in all


def page(
  about: str, found: Sequence[Candidate], chosen: Sequence[Candidate], rows: Sequence[Sequence[str]], doubts: str,
  commands: Iterable[str], where: Machine,
) -> str:  # fmt: skip
  """The page.

  Args:
    about: what is planned, in a sentence.
    found: every plan that fits, the fastest first.
    chosen: the plans of the table.
    rows: the table that the command prints; the first row is its heading.
    doubts: what the command prints below it: why some times are uncertain.
    commands: those that train the chosen plans.
  """
  return pages.document(
    "Plans",
    about,
    section("Step time and memory", chart(found, where), times(chosen)),
    section(
      "The best",
      card("", table(rows[0], rows[1:]), *([text(doubts)] if doubts else [])),
      card("Commands", text("\n".join(commands))),
    ),
  )


def chart(found: Sequence[Candidate], where: Machine) -> str:
  """Each plan as a point; the fastest of every strategy are there, however slow they are."""
  seen: collections.Counter[str] = collections.Counter()
  drawn = []
  for number, plan in enumerate(found):
    seen[plan.strategy] += 1
    if number < DRAWN or seen[plan.strategy] <= OF_EACH:
      drawn.append(plan)
  points = [Point(plan.expected, plan.memory, plan.strategy, describe(plan)) for plan in drawn]
  first = drawn[0]
  return scatter(
    "Every plan that fits",
    points,
    "expected seconds a step",
    "bytes a device",
    f"{len(drawn):,} of {len(found):,} plans. The first is {first.strategy}: {describe(first)}.",
    limit=("what a program may use", where.chip.memory),
    y_form=lambda size: f"{size / 1e9:g} GB",
  )


def describe(plan: Candidate) -> str:
  """A plan in a line: its mesh and other fields, step time and memory."""
  others = [f"{name.split('.')[-1]}={value}" for name, value in plan.fields.items() if not name.startswith("mesh.")]
  fields = "; ".join((plan.case.layout.mesh_in_words, ", ".join(others)))
  return f"{fields}; {duration(plan.expected)} a step, {amount(plan.memory)}"


def times(chosen: Sequence[Candidate]) -> str:
  """How long the units and links of the best plans are busy in a step, at the peaks. They work at the same time."""
  rows = []
  for number, plan in enumerate(chosen[:5], 1):
    found = plan.times
    parts = {"arithmetic": found.compute, "memory": found.memory, "communication": found.communication}
    parts |= {"of it exposed": found.exposed}
    rows.append((f"{number} {plan.strategy}: {duration(found.seconds)} a step at best", parts))
  return grouped("What the best are busy with in a step", rows, duration)
