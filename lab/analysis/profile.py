"""Computes from a trace where the time of a training step went. tools/profile.py prints it.

Times are seconds of one device in one step: means over the steps and the devices.
"""

import collections
import dataclasses
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from lab.analysis.communication import KINDS
from lab.analysis.trace import Device, Event, Origin, Trace, operation

Key = TypeVar("Key", bound=Hashable)
Interval = tuple[float, float]
Axes = tuple[str, ...]

# Names of NCCL's kernels, such as ncclDevKernel_AllGather_RING_LL.
_NCCL = {
  "AllGather": "all-gather",
  "AllReduce": "all-reduce",
  "ReduceScatter": "reduce-scatter",
  "AllToAll": "all-to-all",
  "SendRecv": "collective-permute",
}


class Unreadable(ValueError):
  """A trace that does not hold whole steps."""


@dataclasses.dataclass(frozen=True)
class Cost:
  """How often a device ran something in a step, and the seconds that this took."""

  count: float
  seconds: float


@dataclasses.dataclass(frozen=True)
class Spread:
  """A share of the steps' time: the mean over the devices, the smallest and the largest."""

  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Profile:
  """The figures of a trace.

  Attributes:
    median, mean: seconds from the start of a step to the start of the next, or to its own end if it is the last.
    origins: the instructions of the training step by name; empty if the trace does not hold its program.
    operations: by the name of their instruction or kernel, the longest first. Other programs' names have a prefix.
    idle: the share of time in which a device runs nothing.
    exposed: the share in which a device runs nothing but collectives.
  """

  median: float
  mean: float
  origins: Mapping[str, Origin]
  operations: dict[str, Cost]
  idle: Spread
  exposed: Spread


def profile(trace: Trace) -> Profile:
  """The figures of a trace. Raises Unreadable if it does not hold whole steps."""
  if not trace.steps or not trace.devices:
    raise Unreadable("it holds no steps" if trace.devices else "it holds nothing that a device ran")
  spans = [_steps(device, len(trace.steps)) for device in trace.devices]
  seconds = [end - start for found in spans for start, end in found]
  windows = [(found[0][0], found[-1][1]) for found in spans]
  idle, exposed = zip(*(_waiting(*pair) for pair in zip(trace.devices, windows, strict=True)), strict=True)
  training = {id(device): _training_program(device, len(trace.steps)) for device in trace.devices}

  def name(event: Event, device: Device) -> str:
    """The event's name, with its program's if that is not the training step."""
    return event.name if event.program in ("", training[id(device)]) else f"{event.program}/{event.name}"

  costs = measure(trace, name, sum_of=lambda spans: sum(end - start for start, end in spans))
  longest_first = dict(sorted(costs.items(), key=lambda item: -item[1].seconds))
  first = trace.devices[0]
  origins = first.programs[training[id(first)]]
  median, mean = statistics.median(seconds), statistics.fmean(seconds)
  return Profile(median, mean, origins, longest_first, _spread(idle), _spread(exposed))


def collectives(trace: Trace, axes: Callable[[str], Axes]) -> dict[tuple[str, Axes], Cost]:
  """The cost of the collectives, by kind and by `axes` of their instruction's name.

  If two of a kind run at a time, that time counts once. A collective in two parts takes the time of both parts, and of
  what the trace says is in flight between them. It includes waiting for the devices that come last.
  """

  def key(event: Event, device: Device) -> tuple[str, Axes] | None:
    kind = kind_of(event, device)
    return (kind, axes(event.name.replace("-done", "-start"))) if kind else None

  return measure(trace, key, sum_of=lambda spans: sum(end - start for start, end in union(spans)), transfers=True)


def measure(
  trace: Trace,
  key: Callable[[Event, Device], Key | None],
  sum_of: Callable[[list[Interval]], float],
  transfers: bool = False,
) -> dict[Key, Cost]:
  """The cost of events by key, without those whose key is None. `sum_of` gives the seconds that intervals take."""
  counts: dict[Key, int] = collections.Counter()
  seconds: dict[Key, float] = collections.defaultdict(float)
  for device in trace.devices:
    spans = collections.defaultdict(list)
    for events in (device.ran, device.sent if transfers else ()):
      for event in events:
        if (found := key(event, device)) is not None:
          spans[found].append((event.start, event.end))
          counts[found] += events is device.ran and "-done" not in event.name
    for found, intervals in spans.items():
      seconds[found] += sum_of(intervals)
  number = len(trace.devices) * len(trace.steps)
  return {found: Cost(counts[found] / number, total / number) for found, total in seconds.items()}


def kind_of(event: Event, device: Device) -> str | None:
  """The kind of collective that an event belongs to, one of `communication.KINDS`; None if it is none."""
  name = re.sub(r"-(start|done)\b.*", "", operation(event, device.programs))
  if name in KINDS:
    return name
  if event.name.startswith("all-reduce-scatter"):  # TPU: an all-reduce fused with a slice of its result
    return "reduce-scatter"
  if event.name.startswith("nccl"):
    return next((kind for part, kind in _NCCL.items() if part in event.name), None)
  return next((kind for kind in KINDS if event.name.startswith(kind)), None)  # an asynchronous call of one


def scope(op_name: str) -> str:
  """The origin of an instruction in short: its direction, the model's own scopes, and the primitive.

  jit(train_step)/transpose(jvp(blocks))/while/body/closed_call/mlp/dot_general becomes backward/blocks/mlp/dot_general.
  An instruction that the compiler joined from several has the origins of all: backward/reduce_sum + dot_general.
  """
  outer, _, joined = op_name.partition("/(")
  if joined:
    inner = dict.fromkeys(scope(name) for name in joined.removesuffix(")").split(":"))
    return "/".join(filter(None, (scope(outer), " + ".join(inner))))
  machinery = {"while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "remat", "branch", "", "shard_map"}
  parts = []
  for part in re.sub(r"\b(transpose\(jvp|jvp)\(([^()]*)\)+", _direction, op_name).split("/"):
    if part not in machinery and not re.fullmatch(r"(jit|pmap|pjit|vmap)\(.*\)", part):
      parts.append("recompute" if part == "rematted_computation" else part)
  return "/".join(parts)


def _direction(found: re.Match) -> str:
  return ("forward" if found[1] == "jvp" else "backward") + "/" + found[2]


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """The same times in order, without overlaps."""
  merged: list[Interval] = []
  for start, end in sorted(intervals):
    if merged and start <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
    else:
      merged.append((start, end))
  return merged


def _training_program(device: Device, steps: int) -> str:
  """The program that took the most time among those that ran once a step."""
  seconds: dict[str, float] = collections.defaultdict(float)
  for event in device.ran:
    seconds[event.program] += event.end - event.start
  for program in sorted(seconds, key=lambda name: -seconds[name]):
    if _once(device, program, steps):
      return program
  raise Unreadable(f"it does not hold {steps} whole steps of each device")


def _once(device: Device, program: str, steps: int) -> list[list[Event]]:
  """The events of each operation that a program runs once a step, in order of their start."""
  by_name = collections.defaultdict(list)
  for event in device.ran:
    if event.program == program:
      by_name[event.name].append(event)
  return [sorted(events, key=lambda e: e.start) for events in by_name.values() if len(events) == steps]


def _steps(device: Device, steps: int) -> list[Interval]:
  """From the start of each step to the start of the next; the last one ends with its last operation."""
  program = _training_program(device, steps)
  once = _once(device, program, steps)
  starts = [min(events[i].start for events in once) for i in range(steps)]
  last = max(event.end for event in device.ran if event.program == program)
  return list(zip(starts, [*starts[1:], last], strict=True))


def _waiting(device: Device, window: Interval) -> tuple[float, float]:
  """The shares of a window in which a device runs nothing, and nothing but collectives."""
  sent = [event for event in device.sent if kind_of(event, device)]
  computing = [event for event in device.ran if not kind_of(event, device)]
  busy, computes = (_length(events, window) for events in ([*device.ran, *sent], computing))
  whole = window[1] - window[0]
  return 1 - busy / whole, (busy - computes) / whole


def _length(events: Iterable[Event], window: Interval) -> float:
  """Seconds of a window in which any of the events runs."""
  clipped = [(max(e.start, window[0]), min(e.end, window[1])) for e in events]
  return sum(end - start for start, end in union(span for span in clipped if span[1] > span[0]))


def _spread(values: Sequence[float]) -> Spread:
  return Spread(statistics.fmean(values), min(values), max(values))
