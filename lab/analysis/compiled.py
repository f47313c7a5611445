"""Compiles a training step without running it, and collects the compiler's figures."""

import contextlib
import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lab.analysis import calls, communication, experts, gpus, hlo, origins, overlap, work
from lab.analysis.case import Case
from lab.analysis.links import Links
from lab.analysis.timeline import unit_rounds
from runtime.device_memory import is_too_little
from runtime.hardware import Chip
from runtime.stderr import silenced
from strategies.execution.strategy import Strategy
from training.transformer import TransformerProgram


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A compiled training step. All figures are those of one device.

  Attributes:
    arguments: bytes of the state and the batch.
    temporary: additional bytes at the worst moment.
    seconds: time that the compiler took.
    mesh: the size of each mesh axis.
    rounds: how often loops run whose trip count is not in the program: a pipeline's units (`timeline.unit_rounds`), and
      those of experts, if all have equal loads (`experts.loops`).
    host: bytes in the host's memory: of the state, and of activations at the worst moment. 0 for CPUs.
    warnings: what XLA says of involuntary full rematerialization (`origins.warnings`).
  """

  module: hlo.Module
  arguments: int
  temporary: int
  seconds: float
  mesh: Mapping[str, int]
  rounds: Mapping[str, int]
  host: int = 0
  warnings: tuple[str, ...] = ()

  @property
  def bytes(self) -> int:
    return self.arguments + self.temporary

  def collectives(self) -> list[communication.Collective]:
    return communication.collectives(self.module, self.mesh, self.rounds)

  def flops(self) -> float:
    return work.flops(self.module, self.rounds)

  def float8_flops(self) -> float:
    return work.float8_flops(self.module, self.rounds)

  def traffic(self) -> float:
    return work.traffic(self.module, self.rounds)

  def overlap(self, chip: Chip, links: Links) -> overlap.Overlap:
    """What the step's kernels and links do at the same time."""
    to_send = lambda one: one.sent / links.bandwidth(one.kind, one.axes)
    return overlap.overlap(self.module, self.mesh, self.rounds, chip, to_send)

  def left_out(self) -> list[str]:
    """What `flops` and `traffic` cannot count: unknown custom calls, and loops with an unknown number of rounds."""
    called = [f"custom call {name}" for name in calls.unknown(self.module, self.rounds)]
    return called + [f"loop {name}" for name in self.module.unknown_loops(self.rounds)]


class DoesNotFit(Exception):
  """The compiler rejected a step because it needs more memory than a device has.

  Attributes:
    needed: bytes in total; None if the message does not say.
    temporary: bytes besides the state and the batch; None if the message does not say.
  """

  def __init__(self, message: str):
    self.needed = _bytes_in(message, r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm")
    self.temporary = _bytes_in(message, r"HLO temporaries \(([\d.]+)([KMGT])\)")
    super().__init__(message.splitlines()[0])


def _bytes_in(message: str, pattern: str) -> float | None:
  found = re.search(pattern, message)
  return float(found.group(1)) * 1024 ** (" KMGT".index(found.group(2))) if found else None


def compile_step(strategy: Strategy, batch_size: int) -> CompiledStep:
  """Compiles the strategy's training step for a global batch. The devices need not exist (topology.py).

  Raises DoesNotFit if the step needs more memory than the devices have and the compiler knows it, as libtpu does.
  """
  lowered = strategy.lower_train_step(batch_size)
  start = time.perf_counter()
  compiled, text, warnings = compile_quietly(lowered, options_of(_device(strategy)), kept=True)
  seconds = time.perf_counter() - start
  sizes, rounds = planned(compiled), unit_rounds(strategy)
  if isinstance(strategy.program, TransformerProgram):
    rounds |= experts.loops(Case.of(strategy, batch_size, strategy.mesh.devices.flat[0].platform))
  return CompiledStep(
    hlo.parse(text),
    arguments=sizes["argument"],
    temporary=sizes["total"] - sizes["argument"],
    seconds=seconds,
    mesh=strategy.layout.mesh,
    rounds=rounds,
    host=sizes["host"],
    warnings=warnings,
  )


def compile_quietly(
  lowered: jax.stages.Lowered, options: dict[str, Any], kept: bool = False
) -> tuple[jax.stages.Compiled, str, tuple[str, ...]]:
  """Compiles a program. Returns it, its text, and XLA's warnings of involuntary full rematerialization.

  Raises DoesNotFit as `compile_step` does.

  Args:
    kept: whether the compilation cache may keep the program. XLA does not repeat its warnings for one from there.
  """
  least = jax.config.jax_persistent_cache_min_compile_time_secs if kept else math.inf
  try:
    with silenced() as said, metadata_in_cache_key(), _option("jax_persistent_cache_min_compile_time_secs", least):
      compiled, text = _compile(lowered, options)
  except jax.errors.JaxRuntimeError as error:
    if is_too_little(error):
      raise DoesNotFit(str(error)) from error
    raise
  return compiled, text, origins.warnings("".join(said), text)


def planned(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes that a program needs on a device: `argument`, `output`, `temp`, `alias` and `total`; `host` is not in it.

  `alias` is donated memory, which `argument` and `output` both include. For TPUs the total is the peak, because `temp`
  is too large there: of a 1B model on v5e it was 15.1 GB where the compiler reserved 12.2 GB, and the peak with the
  arguments 11.9 GB (libtpu 0.0.42). But the peak includes the host's memory. So if there is some, the total is the
  smaller of both figures, an upper bound.
  """
  found = compiled.memory_analysis()
  sizes = {name: getattr(found, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")}
  total = sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]
  on_host = {name: getattr(found, f"host_{name}_size_in_bytes") for name in sizes}
  host = on_host["argument"] + on_host["output"] + on_host["temp"] - on_host["alias"]
  devices = {device for leaf in jax.tree.leaves(compiled.input_shardings) for device in leaf.device_set}
  is_tpu = {device.platform for device in devices} == {"tpu"}
  peak = min(found.peak_memory_in_bytes, total) if host else found.peak_memory_in_bytes
  return sizes | {"total": peak if is_tpu else total, "host": host}


def metadata_in_cache_key() -> contextlib.AbstractContextManager[None]:
  """Includes metadata in the cache key; otherwise the cache may return an identical program with stale scope names."""
  return _option("jax_compilation_cache_include_metadata_in_key", True)


@contextlib.contextmanager
def _option(name: str, value: Any) -> Iterator[None]:
  """Sets an option of JAX while the body runs."""
  before = getattr(jax.config, name)
  jax.config.update(name, value)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _device(strategy: Strategy) -> jax.Device | None:
  return next(iter(strategy.mesh.devices.flat)) if isinstance(strategy.mesh, Mesh) else None


def options_of(device: jax.Device | None) -> dict[str, Any]:
  """Compiler options for devices that are not there, beside those of a strategy."""
  return gpus.OPTIONS if device and device.platform == "gpu" and jax.default_backend() != "gpu" else {}


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any]) -> tuple[jax.stages.Compiled, str]:
  compiled = lowered.compile(compiler_options=options)
  with contextlib.suppress(Exception):  # JAX cannot print some of libtpu's asynchronous collectives
    if text := compiled.as_text():
      return compiled, text
  with tempfile.TemporaryDirectory() as folder:  # but the compiler can dump them
    lowered.compile(compiler_options=options | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
    (file,) = Path(folder).glob("*after_optimizations.txt")
    return compiled, file.read_text()
