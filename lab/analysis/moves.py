"""What a device computes, sends and holds in a step, one thing after another, with one round of each loop.

A loop over blocks runs one block a round, so this shows the gathers and scatters of one block. overlap.py notes what
runs when, and live.py what is in memory.
"""

from collections.abc import Iterable
from typing import NamedTuple

from lab.analysis.compiled import CompiledStep
from lab.analysis.live import live
from lab.analysis.overlap import Overlap, Span
from lab.analysis.profile import scope
from lab.analysis.spans import name_of

PARTS = ("attention", "mlp", "experts", "head", "embed", "optimizer")
LEAST = 0.001  # of the step's time: what takes less, with all its rounds, is left out


class Move(NamedTuple):
  """One thing that a device does.

  Attributes:
    loop: the scopes of the innermost loop around it; "" outside of loops.
    times: how often it runs in a step.
    kind: "compute", or that of a collective.
    what: parts of the model, or the arrays that each device puts in.
    over: the mesh axes over which it sends.
    count: the messages.
    sent: the bytes that a device sends each time.
    seconds: how long it takes each time.
    waits: for how many of them kernels wait.
    memory: bytes on the device at the worst moment, with the state and the batch.
  """

  loop: str
  times: int
  kind: str
  what: tuple[str, ...]
  over: tuple[str, ...] = ()
  count: int = 0
  sent: float = 0.0
  seconds: float = 0.0
  waits: float = 0.0
  memory: int = 0

  def then(self, other: "Move") -> "Move":
    """Both as one."""
    added = {name: getattr(self, name) + getattr(other, name) for name in ("count", "sent", "seconds", "waits")}
    what = tuple(dict.fromkeys(self.what + other.what))
    return self._replace(what=what, memory=max(self.memory, other.memory), **added)


def moves(step: CompiledStep, found: Overlap) -> list[Move]:
  """The moves of a step in the order in which they begin. Moves of one kind that follow one another are one."""
  loops = {span.name: name_of(span) for span in found.spans if span.kind == "loop"}
  memory = live(step.module)
  least = LEAST * max((span.end for span in found.spans), default=0.0)
  merged: list[Move] = []
  for span in sorted(found.spans, key=lambda span: span.begin):
    seconds = span.end - span.begin
    if span.kind not in ("kernel", "sent") or seconds * span.times < least * (span.kind == "sent"):
      continue
    one = Move(loops.get(span.loop, ""), span.times, "compute", (), seconds=seconds, memory=memory[span.name])
    if sends := span.collective:
      put_in = tuple(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in sends.operands)
      waits = min(seconds, _exposed(found.spans, span))
      one = one._replace(kind=sends.kind, what=put_in, over=sends.axes, count=1, sent=sends.sent, waits=waits)
    else:
      one = one._replace(what=tuple(part for part in PARTS if part in scope(span.op_name).split("/"))[:1])
    if merged and (merged[-1].loop, merged[-1].kind, merged[-1].over) == (one.loop, one.kind, one.over):
      merged[-1] = merged[-1].then(one)
    else:
      merged.append(one)
  return [move for move in merged if move.seconds * move.times >= least]


def _exposed(spans: Iterable[Span], sent: Span) -> float:
  """The seconds for which kernels wait for a message each time."""
  return sum(span.end - span.begin for span in spans if span.kind == "exposed" and span.name == sent.name)
