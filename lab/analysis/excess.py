"""Where a compiled step sends more than theory says, in words: which weights, and what to do.

Compilers may write a gather or a scatter as an all-reduce, which sends twice the bytes. Nothing fails then, but the
step is slower than it should be.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from lab.analysis.case import Case
from lab.analysis.communication import Collective
from lab.analysis.sent import Sent
from lab.analysis.weights import weights
from reporting.pages.units import amount

SHARE = 0.1  # of what theory says of a kind of collective and its mesh axes
LEAST = 0.01  # of all that theory says; less does not matter


def excess(
  case: Case, compiled: Sequence[Collective], theory: Sequence[Sent], default_options: bool
) -> list[dict[str, Any]]:
  """The kinds of collectives and mesh axes whose compiled bytes exceed theory by a tenth, the largest first.

  Each has its bytes, the names of the weights, and a sentence, `said`.

  Args:
    default_options: whether the step was compiled without the recommended options, although there are some.
  """
  ours, wanted = collections.Counter[tuple[str, tuple[str, ...]]](), collections.Counter[tuple[str, tuple[str, ...]]]()
  for one in compiled:
    ours[one.kind, one.axes] += one.sent_in_step
  for row in theory:
    wanted[row.kind, row.axes] += row.bytes
  least = LEAST * sum(wanted.values())
  found = []
  for what, sent in ours.items():
    more = sent - wanted[what]
    if more > max(SHARE * wanted[what], least):
      kind, axes = what
      names = _weights(case, (one for one in compiled if (one.kind, one.axes) == what))
      said = f"More than theory: {kind}s over {'+'.join(axes)} send {amount(sent)} a step, and theory says "
      said += f"{amount(wanted[what])}. " + (f"Their arrays have the size of {', '.join(names)}. " if names else "")
      said += f"To send less, {_fix(case, default_options)}."
      found.append({"kind": kind, "axes": axes, "sent": sent, "theory": wanted[what], "weights": names, "said": said})
  return sorted(found, key=lambda row: row["theory"] - row["sent"])


def _weights(case: Case, collectives: Iterable[Collective]) -> list[str]:
  """The weights whose arrays, or whose gradients, these collectives may send: those of the same size."""
  sizes = {shape.size for one in collectives for shape in one.operands}
  names = []
  for weight in weights(case.sizes):
    layers = -(-weight.layers // (case.layout.shards("layers") if weight.in_stages else 1))
    if weight.is_matrix and {case.used(weight) / layers, case.held(weight) / layers, case.used(weight)} & sizes:
      names.append(weight.name)
  return names


def _fix(case: Case, default_options: bool) -> str:
  if default_options:
    return "use compiler_options='recommended'"
  if case.layout.shards("state") > 1:
    return "split weights over fewer devices, as hsdp does with a larger mesh.replica, or compare another strategy"
  return "compare another strategy or mesh"
