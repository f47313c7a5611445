"""Reads traces of JAX's profiler: which operations each device ran, and when.

A trace has a file for each process: an XSpace, which holds planes (a device, or the host), which hold lines (a stream,
or a thread), which hold events. JAX reads the events. It does not read the compiled programs that the trace also holds,
so `_programs` does. Next: profile.py, which computes figures from what is read here.
"""

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.profiler import ProfileData


class Origin(NamedTuple):
  """Where an instruction comes from: its operation, such as "all-gather", and its `op_name` (`hlo.Instruction`)."""

  operation: str
  op_name: str


Instructions = Mapping[str, Origin]  # of a compiled program, by name


class Event(NamedTuple):
  """One operation that a device ran once.

  Attributes:
    name: of the instruction in the compiled program, or of the kernel if the trace does not know the instruction.
    program: the compiled program it belongs to, such as "jit_train_step(12)"; "" if unknown.
    start, end: seconds since the recording began.
  """

  name: str
  program: str
  start: float
  end: float


class Programs(dict[str, Instructions]):
  """The programs of a process's events: the name in the events → instructions by name.

  If a program came from the compilation cache, its events name it with the number that it had when it was compiled. The
  process may have given that number to another program, or to none. So the program of some events is the one of that
  name that knows most of their instructions; of several, the one with their number, then the largest.
  """

  def __init__(self, compiled: Mapping[str, Instructions]):
    self.compiled = compiled

  def identify(self, events: Iterable[Event]) -> None:
    """Adds the programs of these events."""
    names = collections.defaultdict(set)
    for event in events:
      names[event.program].add(event.name)
    for program, ran in names.items():
      module = program.partition("(")[0]
      same = [(known, found) for known, found in self.compiled.items() if known.partition("(")[0] == module]
      ranked = [(len(ran & found.keys()), known == program, len(found), known) for known, found in same]
      self[program] = self.compiled[max(ranked)[-1]] if ranked else {}


class Device(NamedTuple):
  """What a device did: operations that it ran, and transfers in flight beside them, from their start to their end.

  Only TPUs list transfers separately. On GPUs they are operations, on a stream of their own.

  Attributes:
    kind: such as "CPU", "TPU", or "NVIDIA H100 80GB HBM3".
    programs: those of its process. Two processes may number the same programs differently.
  """

  kind: str
  programs: Mapping[str, Instructions]
  ran: tuple[Event, ...]
  sent: tuple[Event, ...] = ()


class Trace(NamedTuple):
  """A recording by all processes.

  Attributes:
    steps: the numbers of the steps that were dispatched, in order.
  """

  steps: tuple[int, ...]
  devices: tuple[Device, ...]


def read(files: Sequence[bytes], annotation: str) -> Trace:
  """Reads the files of one recording, one of each process. `annotation` is the name under which steps were marked."""
  steps: set[int] = set()
  devices: list[Device] = []
  for file in files:
    data = ProfileData.from_serialized_xspace(file)
    steps |= _steps(data, annotation)
    devices += _devices(data, _programs(file))
  return Trace(tuple(sorted(steps)), tuple(devices))


def _steps(data: ProfileData, annotation: str) -> set[int]:
  events = (e for plane in data.planes if plane.name.startswith("/host:") for line in plane.lines for e in line.events)
  stats = (dict(event.stats) for event in events if event.name == annotation)
  return {int(found["step_num"]) for found in stats if "step_num" in found}


def _devices(data: ProfileData, programs: Programs) -> list[Device]:
  """The devices that ran something. Simulated devices are threads of the host, so they count only without others."""
  found: list[Device] = []
  planes = {plane.name: plane for plane in data.planes}
  for name, plane in planes.items():
    if re.fullmatch(r"/device:GPU:\d+", name):
      found.append(_gpu(plane, programs))
    elif re.fullmatch(r"/device:TPU:\d+", name):  # other planes of a TPU hold its cores for sparse arrays
      found.append(_tpu(plane, programs))
  found = [device for device in found if device.ran]
  return found or (list(_cpu(planes["/host:CPU"], programs)) if "/host:CPU" in planes else [])


def _gpu(plane: Any, programs: Programs) -> Device:
  """A stream's events are kernels and copies. XLA notes the instruction on those that it launched."""
  ran = []
  for line in plane.lines:
    if line.name.startswith("Stream #"):  # others are counters and the profiler's overhead
      for event in line.events:
        stats = dict(event.stats)
        name, program = str(stats.get("hlo_op", "")), _program(stats)
        # A kernel of a CUDA graph belongs to the call that runs the whole graph. The kernel's own name says more.
        called = not name or re.fullmatch(r"(call|command_buffer)([._]\d+)*", name)
        ran.append(_event(event.name if called else name, program, event))
  programs.identify(ran)
  return Device(str(dict(plane.stats).get("gpu_device_name", "GPU")), programs, tuple(ran))


def _tpu(plane: Any, programs: Programs) -> Device:
  """The line "XLA Ops" holds one operation at a time, named by its text: `%fusion.3 = f32[8]{0} fusion(...)`."""
  lines = {line.name: list(line.events) for line in plane.lines}
  modules = [_event(event.name, event.name, event) for event in lines.get("XLA Modules", [])]
  modules.sort(key=lambda module: module.start)

  def events(line: str) -> Iterator[Event]:
    waiting = collections.deque(modules)
    for event in sorted(lines.get(line, []), key=lambda event: event.start_ns):
      while len(waiting) > 1 and waiting[1].start <= event.start_ns * 1e-9:
        waiting.popleft()
      yield _event(event.name.partition(" = ")[0].lstrip("%"), waiting[0].program if waiting else "", event)

  ran, sent = (tuple(events(line)) for line in ("XLA Ops", "Async XLA Ops"))
  programs.identify(ran)
  return Device("TPU", programs, tuple(event for event in ran if not is_container(event, programs)), sent)


def _cpu(plane: Any, programs: Programs) -> Iterator[Device]:
  """XLA notes the device and the instruction on the events of its threads."""
  ran = collections.defaultdict(list)
  for line in plane.lines:
    for event in line.events:
      stats = dict(event.stats)
      if "hlo_op" in stats:
        ran[int(stats.get("device_ordinal", 0))].append(_event(str(stats["hlo_op"]), _program(stats), event))
  programs.identify(itertools.chain(*ran.values()))
  for _, events in sorted(ran.items()):
    yield Device("CPU", programs, tuple(event for event in events if not is_container(event, programs)))


def _event(name: str, program: str, event: Any) -> Event:
  return Event(name, program, event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)


def _program(stats: Mapping[str, Any]) -> str:
  module = str(stats.get("hlo_module", ""))
  return f"{module}({stats['program_id']})" if "program_id" in stats else module


def operation(event: Event, programs: Mapping[str, Instructions]) -> str:
  """The event's operation. If the trace does not hold its program: its name without the number."""
  origin = programs.get(event.program, {}).get(event.name)
  return origin.operation if origin else event.name.split(".")[0]


def is_container(event: Event, programs: Mapping[str, Instructions]) -> bool:
  """Whether an event only encloses others, which the trace lists too."""
  return operation(event, programs) in ("while", "call", "conditional")


def _programs(file: bytes) -> Programs:
  """The compiled programs of a trace, by name.

  The numbers are those of the fields in xplane.proto (XSpace, XPlane, XEventMetadata, XStat) and in hlo.proto
  (HloProto, HloModuleProto, HloComputationProto, HloInstructionProto, OpMetadata).
  """
  found = {}
  for plane in _fields(file, 1):
    if [bytes(name) for name in _fields(plane, 2)] == [b"/host:metadata"]:
      for metadata in _fields(plane, 4, 2):
        (name,) = _fields(metadata, 2)
        instructions = _fields(metadata, 5, 6, 1, 3, 2)
        found[_text(name)] = {
          _text(*_fields(i, 1)): Origin(_text(*_fields(i, 2)), _text(*_fields(i, 7, 2))) for i in instructions
        }
  return Programs(found)


def _text(value: Any = b"") -> str:
  return bytes(value).decode()


def _fields(message: Any, *path: int) -> Iterator[Any]:
  """The values at a path of field numbers, in a message in protobuf's wire format.

  The format: https://protobuf.dev/programming-guides/encoding
  """
  if not path:
    yield message
    return
  view, at = memoryview(message), 0

  def varint() -> int:
    nonlocal at
    number = shift = 0
    while True:
      byte = view[at]
      at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
      if byte < 128:
        return number

  while at < len(view):
    tag = varint()
    if tag & 7 == 0:  # a number, which no path here ends in
      varint()
      continue
    size = {1: 8, 5: 4}.get(tag & 7) or varint()
    at += size
    if tag >> 3 == path[0]:
      yield from _fields(view[at - size : at], *path[1:])
