"""PipelinedProgram: runs a Program by a schedule, in a `shard_map` over `stage` and the axes of the batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models.attention import Cache
from models.dimensions import UNSHARDED, Sharding
from models.generate import Writer
from models.parameters import bind
from models.sampling import Sampling
from strategies.pipeline.regroup import regroup
from strategies.pipeline.stage import Stage, once
from strategies.pipeline.table import Schedule
from strategies.sharding import MeshSharding, sum_in_dtype
from strategies.sums import summed_once
from training.program import Batch, Params, Program, Sums, split


@dataclasses.dataclass(frozen=True)
class PipelinedProgram(Program):
  """The same program, with the blocks run by a schedule. Its `sharding` must have `layers` over `stage`.

  A stage holds its own weights whole for the step, also those that `embed` splits over the devices of the batch.
  """

  training: Schedule
  evaluation: Schedule

  def gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    return self._apart(super().gradient_sums, self.training, params, batch, step, sharding)

  def microbatch_gradient_sums(
    self, params: Params, batch: Batch, step: jax.Array, sharding: Sharding = UNSHARDED
  ) -> tuple[Sums, Params]:
    """Called on a stage, with its own layers."""
    return self._run(self.training, params, batch, step, sharding)

  def eval_step(self, params: Params, batch: Batch, sharding: Sharding = UNSHARDED) -> Sums:
    run = functools.partial(self._run, self.evaluation)
    return self._apart(run, self.evaluation, params, batch, None, sharding)[0]

  def _apart(
    self, work: Any, schedule: Schedule, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding
  ) -> tuple[Sums, Params]:
    assert isinstance(sharding, MeshSharding)
    chunk = functools.partial(jax.tree.map, functools.partial(regroup, stages=schedule.stages, chunks=schedule.chunks))
    axes = ("stage", *sharding.layout.axes_by_hand(gathers_once=True))
    return summed_once(self, work, params, batch, step, sharding, axes, arrange=chunk)

  def _run(
    self, schedule: Schedule, params: Params, batch: Batch, step: jax.Array | None, sharding: Sharding
  ) -> tuple[Sums, Params]:
    """Sums over a stage's rows and, in training (`step` is given), the gradient of the summed loss."""
    assert isinstance(sharding, MeshSharding)
    edges = {name: weights for name, weights in params.items() if name != "blocks"}
    microbatches = split(batch, schedule.microbatches, sharding)
    index = jax.lax.axis_index("stage")
    end = Stage(self, schedule, sharding, index, params["blocks"], edges, microbatches, step).run()
    blocks, of_edges = end.gradients
    return end.sums, {"blocks": blocks, **of_edges}

  def writer(self, params: Params, sampling: Sampling, sharding: Sharding = UNSHARDED) -> Writer:
    """Writes texts. With a single microbatch nothing can overlap: the stages take turns, each with its own cache."""
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
        # The last stage sent its output to the first.
        return sum_in_dtype(lambda x: jax.lax.psum(x, "stage"), jnp.where(index == 0, x, 0)), cache

      return jax.shard_map(
        stage,
        in_specs=(P("stage"), P(), P("stage"), P()),
        out_specs=(P(), P("stage")),
        axis_names={"stage"},
        check_vma=False,
      )(params["blocks"], x, cache, jnp.asarray(start))

    return Writer(bind(self.model, params), sampling, sharding, in_turn)
