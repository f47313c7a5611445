"""Compiles a training step without running it, and keeps what the compiler says of it."""

import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from analysis import calls, communication, hlo, work
from runtime.stderr import silenced
from strategies.base import Strategy


@dataclasses.dataclass(frozen=True)
class Step:
  """A compiled training step, of one device.

  Attributes:
    arguments: bytes of state and batch.
    temporary: bytes that it needs besides at the worst moment.
    seconds: that compiling took.
  """

  module: hlo.Module
  arguments: int
  temporary: int
  seconds: float
  mesh: Mapping[str, int]
  rounds: Mapping[str, int]

  @property
  def bytes(self) -> int:
    return self.arguments + self.temporary

  def collectives(self) -> list[communication.Collective]:
    return communication.collectives(self.module, self.mesh, self.rounds)

  def flops(self) -> float:
    return work.flops(self.module, self.rounds)

  def traffic(self) -> float:
    return work.traffic(self.module, self.rounds)

  def left_out(self) -> list[str]:
    """What flops and traffic leave out: calls that may compute anything, loops that run nobody knows how often."""
    called = [f"custom call {name}" for name in calls.unknown(self.module, self.rounds)]
    return called + [f"loop {name}" for name in self.module.unknown_loops(self.rounds)]


class DoesNotFit(Exception):
  """The compiler refused a step because a device has too little memory.

  Attributes:
    needed: bytes in all, where it says so.
    temporary: bytes besides state and batch, where it says so.
  """

  def __init__(self, message: str):
    self.needed = _bytes_in(message, r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
    self.temporary = _bytes_in(message, r"HLO temporaries \(([\d.]+)([KMGT])\)")
    super().__init__(message.splitlines()[0])


def _bytes_in(message: str, pattern: str) -> float | None:
  found = re.search(pattern, message)
  return float(found.group(1)) * 1024 ** (" KMGT".index(found.group(2))) if found else None


def compile_step(strategy: Strategy, batch_size: int) -> Step:
  """The strategy's training step for a global batch, compiled for its devices, which need not be there.

  Raises DoesNotFit where the compiler knows the devices' memory, as libtpu does, and the step needs more.
  """
  lowered = strategy.lower_train_step(batch_size)
  start = time.perf_counter()
  try:
    with silenced(), _scopes_kept():
      compiled, text = _compile(lowered)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error):
      raise DoesNotFit(str(error)) from error
    raise
  seconds = time.perf_counter() - start
  sizes = planned(compiled)
  return Step(
    hlo.parse(text),
    arguments=sizes["argument"],
    temporary=sizes["total"] - sizes["argument"],
    seconds=seconds,
    mesh=strategy.layout.mesh,
    rounds=loop_rounds(strategy),
  )


def loop_rounds(strategy: Strategy) -> dict[str, int]:
  """How often each optional loop of a pipeline's step runs on the busiest device, by its scope's name."""
  if not strategy.schedule:
    return {}
  units = {"forward": strategy.schedule.chunks, "backward": strategy.schedule.chunks, "finish": 1, "embed_backward": 1}
  each = strategy.schedule.microbatches * strategy.program.accumulation
  return {name: n * each for name, n in units.items()}


def planned(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes of a device that a program needs: `argument`, `output`, `temp`, `alias` (donated: in both), and `total`."""
  said = compiled.memory_analysis()
  sizes = {name: getattr(said, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")}
  return sizes | {"total": sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]}


@contextlib.contextmanager
def _scopes_kept() -> Iterator[None]:
  """Else a program from the compilation cache may be an equal one that had other scopes' names in it."""
  name = "jax_compilation_cache_include_metadata_in_key"
  before = getattr(jax.config, name)
  jax.config.update(name, True)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
  compiled = lowered.compile()
  try:
    return compiled, compiled.as_text()
  except Exception:  # some of libtpu's asynchronous collectives cannot be printed from here, but the compiler can
    with tempfile.TemporaryDirectory() as folder:
      lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
      (text,) = Path(folder).glob("*after_optimizations.txt")
      return compiled, text.read_text()
