"""Pipeline parallelism: a device runs a few of the blocks, and microbatches move from device to device.

    stage 0   [blocks 0 1]    0   1   2   3   ·   ·   · (0) ...    time →
    stage 1   [blocks 2 3]    ·   0   1   2   ·   · (0)   3 ...    3: microbatch 3 forward, (3): backward
    stage 2   [blocks 4 5]    ·   ·   0   1   · (0)   2 (1) ...    · : the bubble, a stage with nothing to do
    stage 3   [blocks 6 7]    ·   ·   ·   0 (0)   1 (1)   2 ...

One jitted program. A `shard_map` over `stage` splits the stacked `layers` axis, each stage scans over the ticks of a
schedule (schedule.py, stage.py), and neighbours exchange activations and cotangents by ppermute. The blocks are the
model's own. The other mesh axes are the compiler's as everywhere, so other layouts join by `|` (three_d.py).
Embedding, final norm, head and loss run once, on the stage at their end of the model.

Communication: at each tick one activation [b, T, D] to the next stage and one cotangent to the one before, wanted or
not: 4 · (M + S − 1) · b·T·D numbers a step for M microbatches and S stages. At the end an all-reduce over `stage` of
the gradients of embedding, final norm and head. Over `data` each microbatch's gradient is reduced as it is made, M
times P/S numbers, where data_parallel sends P once. `interleaved` also moves each stage's weights to where they are
used and their gradients back, once a step, so that the state stays in the order of the layers.

Use it for deep models and slow links: between stages nothing else sends so little. Not with few microbatches: the
bubble is S − 1 of M + S − 1 ticks. All stages wait for the slowest at each tick, and a backward unit takes twice as
long as a forward unit, so on real devices gpipe wastes the least time and 1f1b the least memory (docs/pipeline.md).

Measured at 4 stages × 2 data, 16 microbatches, 8 simulated devices on 2 cores, against a single device at the same
global batch: gpipe 0.90 of its throughput, 1f1b 0.90, interleaved 0.93 (docs/pipeline.md).

Sources: Huang et al. 2018 (GPipe), arXiv:1811.06965; Narayanan et al. 2021 (1F1B, interleaved), arXiv:2104.04473.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from errors import ConfigError, one_of, positive
from models.attention import Cache
from models.axes import UNSHARDED
from models.generate import generate
from models.transformer import bind
from strategies import schedule as schedules
from strategies.base import Strategy
from strategies.data_parallel import LAYOUT as DATA_PARALLEL
from strategies.layout import Layout
from strategies.schedule import Schedule
from strategies.stage import Stage, once, regroup
from training.program import Batch, Params, Program, Sums, split

LAYOUT = (Layout(mesh={"stage": 4}, layers="stage") | DATA_PARALLEL).on(data=-1)


@dataclasses.dataclass(frozen=True)
class PipelinedProgram(Program):
  """The same program, with its blocks run by a schedule. Its `sharding` is always a Layout with `layers` on `stage`."""

  training: Schedule
  evaluation: Schedule

  def part_gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Any = UNSHARDED
  ) -> tuple[Sums, Params]:
    return self._run(self.training, params, batch, step, sharding)

  def eval_step(self, params: Params, batch: Batch, sharding: Any = UNSHARDED) -> Sums:
    return self._run(self.evaluation, params, batch, None, sharding)[0]

  def _run(
    self, schedule: Schedule, params: Params, batch: Batch, step: jax.Array | None, sharding: Layout
  ) -> tuple[Sums, Params]:
    """Sums over the batch and, if `step` is given, the gradient of the summed loss."""
    inside = sharding.place(layers=None)  # of what a stage sees: its own layers
    chunk = functools.partial(jax.tree.map, functools.partial(regroup, stages=schedule.stages, chunks=schedule.chunks))

    def stage(blocks: Params, edges: Params, batch: Batch, step: jax.Array | None) -> tuple[Sums, Params, Params]:
      index = jax.lax.axis_index("stage")
      end = Stage(self, schedule, inside, index, chunk(blocks), edges, batch, step).run()
      (of_blocks,) = jax.linear_transpose(chunk, blocks)(end.gradients[0])
      sums, of_edges = jax.tree.map(_sum_over_stages, (end.sums, end.gradients[1]))
      return sums, of_blocks, of_edges

    edges = {name: weights for name, weights in params.items() if name != "blocks"}
    sums, of_blocks, of_edges = jax.shard_map(
      stage,
      in_specs=(P("stage"), P(), P(), P()),
      out_specs=(P(), P("stage"), P()),
      axis_names={"stage"},
      check_vma=False,  # what leaves replicated is summed over the stages above
    )(params["blocks"], edges, split(batch, schedule.microbatches, sharding), step)
    return sums, {"blocks": of_blocks, **of_edges}

  def generate(self, params: Params, prompt: jax.Array, *, sharding: Any = UNSHARDED, **options: Any) -> jax.Array:
    """With one microbatch there is nothing to overlap: the stages take turns, each with its part of the cache."""

    def in_turn(x: jax.Array, cache: Cache, start: jax.Array | int) -> tuple[jax.Array, Cache]:
      def stage(blocks: Params, x: jax.Array, cache: Cache, start: jax.Array) -> tuple[jax.Array, Cache]:
        stages, index = sharding.mesh["stage"], jax.lax.axis_index("stage")
        model = bind(self.model, params | {"blocks": blocks})

        def work(start: jax.Array, carry: tuple) -> tuple:
          return model.run_blocks(carry[0], sharding=sharding.place(layers=None), cache=carry[1], start=start)

        def turn(i: jax.Array, carry: tuple) -> tuple:
          x, cache = once("turn", index == i, work, start, carry)
          return jax.lax.ppermute(x, "stage", [(s, (s + 1) % stages) for s in range(stages)]), cache

        x, cache = jax.lax.fori_loop(0, stages, turn, (x, cache))
        return _sum_over_stages(jnp.where(index == 0, x, 0)), cache  # the last stage sent it to the first

      return jax.shard_map(
        stage,
        in_specs=(P("stage"), P(), P("stage"), P()),
        out_specs=(P(), P("stage")),
        axis_names={"stage"},
        check_vma=False,
      )(params["blocks"], x, cache, jnp.asarray(start))

    return generate(self.model, params, prompt, sharding=sharding, run_blocks=in_turn, **options)


def _sum_over_stages(x: jax.Array) -> jax.Array:
  """In float32: XLA's CPU backend fails on a bfloat16 all-reduce over part of the mesh's axes (jax 0.10.2)."""
  if x.dtype != jnp.bfloat16:
    return jax.lax.psum(x, "stage")
  return jax.lax.psum(x.astype(jnp.float32), "stage").astype(x.dtype)


class Pipeline(Strategy):
  """A Strategy whose layout has `layers` on `stage`; `config.pipeline` (configs/base.py) holds its own fields."""

  section = "pipeline"

  def __init__(
    self, layout: Layout, program: Program, mesh: Mesh | AbstractMesh, *, schedule: str, microbatches: int, chunks: int
  ):
    one_of("pipeline.schedule", schedule, schedules.ORDERS)
    positive("pipeline.microbatches", microbatches)
    layout.check_divides(program.model.sizes())
    stages = layout.shards("layers")
    chunks = positive("pipeline.chunks", chunks) if schedule == "interleaved" else 1
    if stages > 1:
      self._check(stages, chunks, program.model.depth, microbatches)
      self.schedule = schedules.build(schedules.ORDERS[schedule], stages, microbatches, chunks)
      self.microbatches = microbatches
      units = {"forward": chunks, "backward": chunks, "finish": 1, "embed_backward": 1}
      self.rounds = {name: n * microbatches * program.accumulation for name, n in units.items()}
      evaluation = schedules.build(schedules.forward_only, stages, microbatches)
      program = PipelinedProgram(**vars(program), training=self.schedule, evaluation=evaluation)
      self._said = f"schedule {schedule}, {microbatches} microbatches: bubble {self.schedule.bubble:.0%}"
      if microbatches < stages:
        warnings.warn(
          f"pipeline.microbatches={microbatches} is fewer than mesh.stage={stages}, so stages have nothing to do in "
          f"{self.schedule.bubble:.0%} of the ticks; use {4 * stages} where the batch allows",
          stacklevel=2,
        )
    super().__init__(layout, program, mesh)

  def _check(self, stages: int, chunks: int, depth: int, microbatches: int) -> None:
    if depth % (stages * chunks):
      raise ConfigError(
        f"mesh.stage={stages} × pipeline.chunks={chunks} does not divide model.depth={depth}; "
        f"use a depth that is a multiple of {stages * chunks}, or fewer chunks"
      )
    if chunks > 1 and microbatches > stages and microbatches % stages:
      raise ConfigError(
        f"pipeline.microbatches={microbatches} is not a multiple of mesh.stage={stages}, as the interleaved "
        f"schedule needs; use {round(microbatches / stages) * stages}"
      )

  def describe(self, name: str) -> str:
    return super().describe(name) + (f"; {self._said}" if self.schedule else "")


STRATEGY = Pipeline
