"""PipelinedProgram: a Program that runs its blocks by a pipeline schedule, in a `shard_map` over `stage`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models.attention import Cache
from models.dimensions import UNSHARDED, Sharding
from models.generate import generate
from models.transformer import bind
from strategies.pipeline.schedule import Schedule
from strategies.pipeline.stage import Stage, once, regroup
from strategies.sharding import MeshSharding
from training.program import Batch, Params, Program, Sums, split


@dataclasses.dataclass(frozen=True)
class PipelinedProgram(Program):
  """The same program, with the blocks run by a schedule. Its `sharding` must have `layers` over `stage`."""

  training: Schedule
  evaluation: Schedule

  def microbatch_gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    return self._run(self.training, params, batch, step, sharding)

  def eval_step(self, params: Params, batch: Batch, sharding: Sharding = UNSHARDED) -> Sums:
    return self._run(self.evaluation, params, batch, None, sharding)[0]

  def _run(
    self, schedule: Schedule, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding
  ) -> tuple[Sums, Params]:
    """Sums over the batch and, in training (`step` is given), the gradient of the summed loss."""
    assert isinstance(sharding, MeshSharding)
    inside = sharding.place(layers=None)  # a stage sees its own layers only
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
      check_vma=False,  # outputs with P() are replicated: they are summed over the stages above
    )(params["blocks"], edges, split(batch, schedule.microbatches, sharding), step)
    return sums, {"blocks": of_blocks, **of_edges}

  def generate(self, params: Params, prompt: jax.Array, *, sharding: Sharding = UNSHARDED, **options: Any) -> jax.Array:
    """Generates text. With a single microbatch nothing can overlap: the stages take turns, each with its own cache."""
    assert isinstance(sharding, MeshSharding)

    def in_turn(x: jax.Array, cache: Cache, start: jax.Array | int) -> tuple[jax.Array, Cache]:
      def stage(blocks: Params, x: jax.Array, cache: Cache, start: jax.Array) -> tuple[jax.Array, Cache]:
        stages, index = sharding.layout.mesh["stage"], jax.lax.axis_index("stage")
        model = bind(self.model, params | {"blocks": blocks})

        def work(start: jax.Array, carry: tuple) -> tuple:
          return model.run_blocks(carry[0], sharding=sharding.place(layers=None), cache=carry[1], start=start)

        def turn(i: jax.Array, carry: tuple) -> tuple:
          x, cache = once("turn", index == i, work, start, carry)
          return jax.lax.ppermute(x, "stage", [(s, (s + 1) % stages) for s in range(stages)]), cache

        x, cache = jax.lax.fori_loop(0, stages, turn, (x, cache))
        return _sum_over_stages(jnp.where(index == 0, x, 0)), cache  # the last stage sent its output to the first

      return jax.shard_map(
        stage,
        in_specs=(P("stage"), P(), P("stage"), P()),
        out_specs=(P(), P("stage")),
        axis_names={"stage"},
        check_vma=False,
      )(params["blocks"], x, cache, jnp.asarray(start))

    return generate(self.model, params, prompt, sharding=sharding, run_blocks=in_turn, **options)


def _sum_over_stages(x: jax.Array) -> jax.Array:
  """Sums in float32: XLA's CPU backend fails on a bfloat16 all-reduce over some of the mesh axes (jax 0.10.2)."""
  if x.dtype != jnp.bfloat16:
    return jax.lax.psum(x, "stage")
  return jax.lax.psum(x.astype(jnp.float32), "stage").astype(x.dtype)
