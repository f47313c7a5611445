"""What a step waits for: which collectives are hidden behind kernels, and which are exposed.

Follows a compiled program in the order in which the device runs it, with two clocks: one for the kernels and one for
the links. A kernel takes the time of its arithmetic or that of its memory traffic at the peak, whichever is longer. If
a program starts a collective at one place and awaits it at another, the kernels in between hide it. What is left of the
collective when they end is exposed, as are all other collectives. Collectives are sent one after another.

A real kernel is slower than its peak. It may then hide more communication, but never more than the extra time that it
takes. So the sum stays a lower bound.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lab.analysis import work
from lab.analysis.communication import BESIDE, KINDS, Collective, collective, is_called
from lab.analysis.hlo import Computation, Instruction, Module, Visit
from runtime.hardware import Chip


class Timed(NamedTuple):
  """A collective of a compiled program, with the seconds that it takes in a whole step.

  Attributes:
    sent: how long it occupies the links.
    exposed: how long kernels wait while it is sent.
  """

  collective: Collective
  sent: float
  exposed: float

  @property
  def hidden(self) -> float:
    return self.sent - self.exposed


class Span(NamedTuple):
  """What a device does from one time to another.

  In a loop, the first round is noted, and `times` says how often the span comes in a step.

  Attributes:
    kind: "kernel", "sent", "exposed" or "loop". While a collective is exposed, no kernel runs. A loop ends with its
      last round.
    begin, end: seconds since the step began.
    name: of the instruction.
    op_name: its origin in the Python program (`hlo.Instruction.op_name`).
    collective: what is sent.
    loop: the name of the innermost loop around it; "" outside of loops.
    round: of a loop: the seconds of one round.
  """

  kind: str
  begin: float
  end: float
  times: int
  name: str
  op_name: str = ""
  collective: Collective | None = None
  loop: str = ""
  round: float = 0.0


@dataclasses.dataclass(frozen=True)
class Overlap:
  """The collectives of a step, in the order in which they start, the seconds of all its kernels, and what runs when."""

  collectives: tuple[Timed, ...]
  kernels: float
  spans: tuple[Span, ...] = ()

  @property
  def sent(self) -> float:
    return sum(timed.sent for timed in self.collectives)

  @property
  def exposed(self) -> float:
    return sum(timed.exposed for timed in self.collectives)


def overlap(
  module: Module,
  mesh: Mapping[str, int],
  rounds: Mapping[str, int],
  chip: Chip,
  to_send: Callable[[Collective], float],
) -> Overlap:
  """Follows a step.

  Args:
    mesh, rounds: as for `communication.collectives`.
    to_send: the seconds that a collective takes each time.
  """
  follower = _Follower(module, mesh, rounds, chip, to_send)
  follower.run(module.entry, 1)
  exposed = lambda name: min(follower.exposed[name], follower.sent[name])  # the clocks' rounding can add a little
  timed = (Timed(found, follower.sent[name], exposed(name)) for name, found in follower.found.items())
  return Overlap(tuple(timed), follower.kernels, tuple(follower.spans))


class _Sending(NamedTuple):
  """A collective on the links, from one time to another; `times` is how often it is sent in the step."""

  name: str
  begin: float
  end: float
  times: int


@dataclasses.dataclass
class _Follower:
  """Follows a program. The body of a loop is followed once, and its times are multiplied.

  Attributes:
    module, mesh, rounds, chip, to_send: as in `overlap`.
    now: when the kernels so far have ended.
    kernels: the seconds of all kernels in the step.
    links: what is on the links, one collective after another.
    ends: when a started collective has been sent, by the instruction that started it.
    found, sent, exposed: each collective, and its seconds in the step, by name.
    spans: what ran when, so far.
    loop: the innermost loop that is being followed.
  """

  module: Module
  mesh: Mapping[str, int]
  rounds: Mapping[str, int]
  chip: Chip
  to_send: Callable[[Collective], float]
  now: float = 0.0
  kernels: float = 0.0
  links: list[_Sending] = dataclasses.field(default_factory=list)
  ends: dict[str, float] = dataclasses.field(default_factory=dict)
  found: dict[str, Collective] = dataclasses.field(default_factory=dict)
  sent: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  exposed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  spans: list[Span] = dataclasses.field(default_factory=list)
  loop: str = ""

  def run(self, name: str, times: int) -> None:
    """Follows a computation that runs `times` times in the step."""
    computation = self.module.computations[name]
    for instruction in computation.values():
      self._step(Visit(instruction, computation, name, times, fused=False))

  def _step(self, visit: Visit) -> None:
    instruction, times = visit.instruction, visit.times or 0
    if instruction.operation == "while":
      inside = self.module.rounds(instruction, visit.computation, times, self.rounds)
      if inside:
        self._loop(instruction, inside, inside / times)
    elif instruction.operation in ("call", "conditional"):
      for name in self.module.called(instruction):
        self.run(name, times)
    elif self._awaits(instruction):
      self._wait(self._end(instruction, visit.computation))
    elif sent := self._sends(visit):
      for found in sent:
        self._send(found, instruction.name, times)
      if not self._is_started(instruction):
        self._wait(self.ends[instruction.name])
    elif instruction.operation == "async-start":  # of a copy or a slice
      for name in self.module.called(instruction):
        self.run(name, times)
    else:
      done = work.kernel(self.module, instruction, visit.computation)
      seconds = max(self.chip.seconds(done.flops, done.float8), done.bytes / self.chip.bandwidth)
      if seconds:
        self._note("kernel", self.now, self.now + seconds, times, instruction)
      self.now += seconds
      self.kernels += times * seconds

  def _loop(self, loop: Instruction, times: int, trips: float) -> None:
    """Follows a loop's body once, and moves the clocks on by the other trips."""
    began, before, around = self.now, self.links, self.loop
    self.loop = loop.name
    self.run(loop.attribute("body"), times)
    self.loop, one = around, self.now - began
    later = (trips - 1) * one
    self.now += later
    self._note("loop", began, self.now, times, loop, round=one)
    self.links = [
      sending if sending in before else sending._replace(begin=sending.begin + later, end=sending.end + later)
      for sending in self.links
      if sending.end > self.now - later
    ]

  def _sends(self, visit: Visit) -> list[Collective]:
    """The collectives that an instruction starts or runs."""
    if visit.instruction.operation.removesuffix("-start") in KINDS:
      found = collective(visit, self.mesh)
      return [found] if found else []
    sent: list[Collective] = []
    for name in self.module.called(visit.instruction):
      computation = self.module.computations[name]
      for instruction in computation.values():
        sent += self._sends(Visit(instruction, computation, name, visit.times, fused=True))
    return sent

  def _is_started(self, instruction: Instruction) -> bool:
    """Whether an instruction only starts what it sends. A `call-start` runs on a core for communication.

    XLA:GPU of jax 0.10 marks starts that run to their end.
    """
    if '"is_sync":true' in instruction.attributes:
      return False
    inside = (self.module.computations[name] for name in self.module.called(instruction))
    return instruction.operation.endswith("-start") or any(is_called(part, "AsyncCollectiveStart") for part in inside)

  def _awaits(self, instruction: Instruction) -> bool:
    inside = (self.module.computations[name] for name in self.module.called(instruction))
    return instruction.operation.endswith("-done") or any(is_called(part, "AsyncCollectiveDone") for part in inside)

  def _end(self, awaits: Instruction, computation: Computation) -> float:
    """When the collective that an instruction waits for has been sent. Kernels that ran beside it pass it on."""
    seen, names = set(), list(awaits.operands)
    while names:
      name = names.pop()
      if name in self.ends:
        return self.ends[name]
      if name in computation and name not in seen and _passes_on(computation[name]):
        names += computation[name].operands
      seen.add(name)
    return self.now

  def _send(self, found: Collective, started_by: str, times: int) -> None:
    name, seconds = found.name, self.to_send(found)
    begin = max([self.now, *(sending.end for sending in self.links)])
    self.links = [sending for sending in self.links if sending.end > self.now]
    self.links.append(_Sending(name, begin, begin + seconds, times))
    self.ends[started_by] = begin + seconds
    self.found[name] = found
    self.sent[name] += times * seconds
    self._note("sent", begin, begin + seconds, times, found, collective=found)

  def _wait(self, until: float) -> None:
    """Moves the kernels' clock on, and notes what is sent meanwhile."""
    for name, begin, end, times in self.links:
      first, last = max(begin, self.now), min(end, until)
      if last > first:
        self.exposed[name] += times * (last - first)
        self._note("exposed", first, last, times, self.found[name], collective=self.found[name])
    self.now = max(self.now, until)

  def _note(
    self, kind: str, begin: float, end: float, times: int, of: Instruction | Collective,
    collective: Collective | None = None, round: float = 0.0,
  ) -> None:  # fmt: skip
    self.spans.append(Span(kind, begin, end, times, of.name, of.op_name, collective, self.loop, round))


def _passes_on(instruction: Instruction) -> bool:
  """Whether an instruction hands on the buffers of a collective under way."""
  return instruction.operation in ("get-tuple-element", "bitcast", "tuple") or instruction.attribute(
    "calls"
  ).startswith(BESIDE)
