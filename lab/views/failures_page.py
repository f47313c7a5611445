"""The page that `tools.failures --html` writes: goodput by the number of devices, and where the time of a job goes."""

from collections.abc import Mapping, Sequence

from lab.failure_policies import HOSTS, Result
from reporting import pages
from reporting.pages.bars import stacked
from reporting.pages.element import card, section, table
from reporting.pages.lines import Line, lines

TITLES = {
  "wait": "Goodput of jobs that wait for repairs",
  "spares": "Goodput of jobs with spare hosts",
  "elastic": "Goodput of elastic jobs",
}


def page(
  about: str,
  results: Sequence[Result],
  curves: Mapping[str, Sequence[tuple[int, float]]],
  rows: Sequence[Sequence[str]],
  inputs: Sequence[Sequence[str]],
) -> str:
  """The page.

  Args:
    about: the job, in a sentence.
    results: of each policy.
    curves: for each policy, pairs of devices and goodput.
    rows, inputs: the tables that the command prints. Their first rows are their headings.
  """
  return pages.document(
    "Failures",
    about,
    section(
      "By the number of devices",
      *(chart(hosts, curves) for hosts in HOSTS),
      about="The same model and kinds of failures on 1,000 to 100,000 devices, at Daly's interval between saves.",
    ),
    section(
      "Where the time goes",
      stacked(
        "Time that does not train new steps, as shares of all devices' time",
        [lost(found) for found in results],
        percent,
      ),
      card("Policies", table(rows[0], rows[1:])),
      card("Inputs", table(inputs[0], inputs[1:])),
    ),
  )


def chart(hosts: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
  """The curves of the policies that replace lost hosts in one way; "" if there are none."""
  drawn = [Line(name, points) for name, points in curves.items() if name.endswith(f"+{hosts}")]
  return lines(TITLES[hosts], drawn, x="devices", unit="goodput", form=percent, log=True)


def lost(found: Result) -> tuple[str, dict[str, float]]:
  """The row of a policy in the picture of lost time."""
  return found.name, {kind: share for kind, share in found.shares.items() if kind != "training"}


def percent(share: float) -> str:
  return f"{share:.1%}"
