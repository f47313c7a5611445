"""Pipeline: the Strategy that checks the sizes, builds the schedules and wraps the program."""

import dataclasses
import warnings

import jax
from jax.sharding import AbstractMesh, Mesh

from errors import ConfigError, not_negative, one_of, positive
from models.config import ModelConfig
from strategies.base import Strategy
from strategies.layout import Layout
from strategies.pipeline import schedule as schedules
from strategies.pipeline.program import PipelinedProgram
from training.program import Program


class Pipeline(Strategy):
  """A Strategy whose layout shards `layers` over `stage`. Its own fields are `config.pipeline` (configs/base.py)."""

  section = "pipeline"

  def __init__(
    self,
    layout: Layout,
    program: Program,
    mesh: Mesh | AbstractMesh,
    *,
    schedule: str,
    microbatches: int,
    chunks: int,
    gather: str = "auto",
  ):
    one_of("pipeline.schedule", schedule, schedules.ORDERS)
    positive("pipeline.microbatches", microbatches)
    not_negative("pipeline.chunks", chunks, "use 0 for two if the depth allows")
    layout.check_divides(program.model.sizes())
    stages, depth = layout.shards("layers"), program.model.depth
    if stages > 1:
      if program.model.remat == "offload":  # the TPU compiler fails on such slots in the host's memory (libtpu 0.0.42)
        raise ConfigError(
          "model.remat='offload' does not fit a pipeline, whose stages keep what they save in slots on the device; "
          "use 'full'"
        )
      chunks = _chunks(schedule, chunks, stages, depth)
      _check(stages, chunks, depth, microbatches)
      if gather == "part":
        raise ConfigError(
          "gather='part' does not fit a pipeline, whose stages gather their weights once a step; use 'auto'"
        )
      gather = "step"
      self.microbatches = microbatches
      self.schedule = schedules.build(schedules.ORDERS[schedule], stages, microbatches, chunks)
      evaluation = schedules.build(schedules.forward_only, stages, microbatches)
      program = dataclasses.replace(program, model=_with_attention(program.model, layout))
      program = PipelinedProgram(**vars(program), training=self.schedule, evaluation=evaluation)
      self._described = f"schedule {schedule}, {microbatches} microbatches: bubble {self.schedule.idle_time():.0%}"
      if microbatches < stages:
        warnings.warn(
          f"pipeline.microbatches={microbatches} is fewer than mesh.stage={stages}, so stages are idle in "
          f"{self.schedule.idle_time():.0%} of the time; use {4 * stages} if the batch allows",
          stacklevel=2,
        )
    super().__init__(layout, program, mesh, gather=gather)
    if stages > 1:
      self.axes_by_hand = layout.axes_by_hand(gathers_once=True)

  def describe(self, name: str) -> str:
    return super().describe(name) + (f"; {self._described}" if self.schedule else "")


def attention_in_stages(model: ModelConfig, layout: Layout) -> str:
  """The implementation of attention: plain if devices share a stage on TPUs, where jax 0.10's compiler aborts."""
  is_bad = model.attention == "splash" and jax.__version_info__ < (0, 12) and _shared(layout)
  return "plain" if is_bad else model.attention


def _shared(layout: Layout) -> list[str]:
  """The mesh axes along which devices share a stage and an example."""
  return [axis for axis, size in layout.mesh.items() if size > 1 and axis not in ("stage", *layout.axes("batch"))]


def _with_attention(model: ModelConfig, layout: Layout) -> ModelConfig:
  """The model with the implementation of attention that works in stages. Warns if it is another one."""
  attention = attention_in_stages(model, layout)
  if attention == model.attention:
    return model
  axis = _shared(layout)[0]
  warnings.warn(
    f"model.attention={model.attention!r} runs as {attention!r}, because the TPU compiler of jax {jax.__version__} "
    f"aborts on kernels in a stage that mesh.{axis}={layout.mesh[axis]} splits; use Python 3.12 or later",
    stacklevel=3,
  )
  return dataclasses.replace(model, attention=attention)


def _chunks(schedule: str, chunks: int, stages: int, depth: int) -> int:
  """How many chunks a stage has: 1, or as many as asked for with interleaved. 0 means 2 if the depth allows."""
  if schedule != "interleaved":
    return 1
  if not chunks:
    chunks = 2 if depth % (2 * stages) == 0 else 1
    if chunks == 1:
      warnings.warn(
        f"pipeline.schedule='interleaved' has nothing to interleave: model.depth={depth} gives each of "
        f"mesh.stage={stages} stages a single chunk, so it runs as '1f1b'; use a depth that is a multiple of "
        f"{2 * stages}",
        stacklevel=3,
      )
  return chunks


def _check(stages: int, chunks: int, depth: int, microbatches: int) -> None:
  if depth % (stages * chunks):
    raise ConfigError(
      f"mesh.stage={stages} × pipeline.chunks={chunks} does not divide model.depth={depth}; "
      f"use a depth that is a multiple of {stages * chunks}, or fewer chunks"
    )
  if not schedules.fills_groups(stages, microbatches, chunks):
    raise ConfigError(
      f"pipeline.microbatches={microbatches} is not a multiple of mesh.stage={stages}, as the interleaved "
      f"schedule needs; use {round(microbatches / stages) * stages}"
    )
