"""Numbers as text that Prometheus reads: its text exposition format, version 0.0.4."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from errors import visible

PREFIX = "meshwright_"
Labels = Mapping[str, str]
Sample = tuple[Labels, float]


class Metric(NamedTuple):
  """One metric.

  Attributes:
    name: without PREFIX.
    about: one sentence, with the unit.
    samples: pairs of labels and a value.
    kind: "gauge", or "counter" for what never becomes less.
  """

  name: str
  about: str
  samples: Sequence[Sample]
  kind: str = "gauge"


def exposition(metrics: Iterable[Metric], labels: Labels) -> str:
  """The metrics that have samples, as text. `labels` are added to the labels of each sample."""
  lines = []
  for metric in metrics:
    if metric.samples:
      name = PREFIX + metric.name
      lines += [f"# HELP {name} {_escaped(metric.about)}", f"# TYPE {name} {metric.kind}"]
      lines += [f"{name}{_braced({**labels, **own})} {_number(value)}" for own, value in metric.samples]
  return "".join(f"{line}\n" for line in lines)


def _braced(labels: Labels) -> str:
  written = (f'{name}="{_escaped(value).replace(chr(34), chr(92) + chr(34))}"' for name, value in labels.items())
  return "{" + ",".join(written) + "}"


def _escaped(text: str) -> str:
  return visible(text, "\n").replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
  if math.isfinite(value):
    return repr(value)
  return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
