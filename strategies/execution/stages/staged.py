"""Staged: runs a program by a schedule, in a `shard_map` over `stage` and the axes of the batch."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from errors import ConfigError, not_negative, one_of, positive
from models import windows
from models.generate import Sampling, TextWriter, run_cached
from models.ops.cache import AnyCache, split
from models.ops.workarounds import sum_in_dtype
from models.parameters import bind, in_float8
from models.sizes import ModelSizes
from models.stacks import Loop, by_period, loops
from strategies.execution.by_hand import ByHand
from strategies.execution.constraints import Constraints
from strategies.execution.padding import Stored
from strategies.execution.runner import Asked, Limit
from strategies.execution.stages import orders
from strategies.execution.stages.schedule import Schedule
from strategies.execution.stages.stage import Stage, once
from strategies.execution.transfers import Transfers
from strategies.layout import Layout, divisor_of, either
from training.program import Batch, Params, Program, Sums, split_batch
from training.transformer import TransformerProgram

UNEVEN = ("gpipe", "1f1b")  # the schedules under which the last stage may have fewer layers


@dataclasses.dataclass(frozen=True)
class Staged(ByHand):
  """Runs the blocks by a schedule. The layout must have `layers` over `stage`, on several devices.

  A stage holds its own weights whole for the step, also those that `embed` splits over the devices of the batch.
  """

  program: TransformerProgram
  schedule: Schedule = dataclasses.field(kw_only=True)
  evaluation: Schedule = dataclasses.field(kw_only=True)

  @staticmethod
  def make(
    program: Program, layout: Layout, fallbacks: tuple[Limit, ...], *, schedule: str, microbatches: int, chunks: int
  ) -> "Staged":
    """The runner for a config's section `pipeline` (configs/base.py)."""
    if not isinstance(program, TransformerProgram):
      raise ConfigError(
        f"model.name={program.traits.name!r} has no equal blocks for the stages of a pipeline; use a strategy without "
        "mesh.stage"
      )
    stages = layout.shards("layers")
    ((_, named, depth),) = [size for size in program.shardable() if size[0] == "layers"]
    if schedule != "interleaved":
      chunks = 1
    elif not chunks:
      chunks = 2 if depth % (2 * stages) == 0 else 1
      if chunks == 1:
        warnings.warn(
          f"pipeline.schedule='interleaved' has nothing to interleave: {named}={depth} gives each of "
          f"mesh.stage={stages} stages a single chunk, so it runs as '1f1b'; use a depth that is a multiple of "
          f"{2 * stages}",
          stacklevel=2,
        )
    check_depth(schedule, stages, chunks, named, depth, layout.fitting(layout.axes("layers")))
    check_periods(program.sizes, stages * chunks, named, depth)
    if not orders.fills_groups(stages, microbatches, chunks):
      raise ConfigError(
        f"pipeline.microbatches={microbatches} is not a multiple of mesh.stage={stages}, as the interleaved "
        f"schedule needs; use {max(1, round(microbatches / stages)) * stages}"
      )
    training = orders.build(orders.ORDERS[schedule], stages, microbatches, chunks)
    if microbatches < stages:
      warnings.warn(
        f"pipeline.microbatches={microbatches} is fewer than mesh.stage={stages}, so stages are idle in "
        f"{training.idle_time():.0%} of the time; use {4 * stages} if the batch allows",
        stacklevel=2,
      )
    return Staged(
      program,
      layout,
      Transfers.of(layout, parts=program.accumulation * microbatches),
      fallbacks,
      schedule=training,
      evaluation=orders.build(orders.forward_only, stages, microbatches),
      microbatches=microbatches,
      described=f"schedule {schedule}, {microbatches} microbatches: bubble {training.idle_time():.0%}",
    )

  @staticmethod
  def limits(layout: Layout, program: Asked) -> list[Limit]:
    found, sizes = list[Limit](), program.sizes
    if sizes.remat == "offload":  # the TPU compiler fails on slots in the host's memory (libtpu 0.0.42)
      why = "the stages of a pipeline keep what they save in slots on the device"
      found.append(Limit("model.remat", "offload", why, "'full'"))
    if sizes.unroll == "all":
      why = "the stages of a pipeline run their blocks in a loop"
      found.append(Limit("model.unroll", "all", why, "'scan'", instead="scan"))
    layers = sizes.depth - sizes.first_layers
    if program.optimizer.on_host and layers % layout.shards("layers"):
      why = f"stages then need equally many of the {layers} layers"
      fits = layout.sizes_in_words(layout.axes("layers"), divisor_of(layers))
      found.append(Limit("optimizer.on_host", True, why, f"False, or mesh.stage={fits}"))
    shared = shared_axes(layout)
    if sizes.attention == "splash" and shared and jax.__version_info__ < (0, 12):
      why = f"the TPU compiler of jax {jax.__version__} aborts on kernels in a stage that mesh.{shared[0]} splits"
      found.append(Limit("model.attention", "splash", why, "Python 3.12 or later", instead="plain"))
    if sizes.attention_context == "ring" and layout.shards("positions") > 1:
      why = "stages run different units at the same time, and XLA's permutes wait for all devices"
      found.append(Limit("model.attention_context", "ring", why, "'gather'", instead="gather"))
    return found

  def gradient_sums(self, params: Params, batch: Batch, step: jax.Array) -> tuple[Sums, Params]:
    return self.summed(functools.partial(self.program.gradient_sums, of_part=self._run), params, batch, step)

  def eval_sums(self, params: Params, batch: Batch) -> Sums:
    return self.summed(self._run, params, batch, None)[0]

  def _schedule_of(self, step: jax.Array | None) -> Schedule:
    return self.evaluation if step is None else self.schedule

  def arranged(self, weights: Params, step: jax.Array | None) -> Params:
    schedule, loop = self._schedule_of(step), self._loop(step)
    regrouped = lambda w: by_period(loop, regroup(w, schedule.stages, schedule.chunks), at=1)
    return weights | jax.tree.map(regrouped, {name: weights[name] for name in loop.stacks})

  def _loop(self, step: jax.Array | None) -> Loop:
    """The blocks of a chunk: those of the first. It begins as each of the others does (`check_periods`)."""
    schedule, sizes = self._schedule_of(step), self.program.sizes
    period = windows.period_of(sizes.kinds[sizes.first_layers :])
    layers = -(-(sizes.depth - sizes.first_layers) // (schedule.stages * schedule.chunks))
    return Loop(period, layers // len(period))

  def _run(self, params: Params, batch: Batch, step: jax.Array | None, sharding: Constraints) -> tuple[Sums, Params]:
    """Sums over a stage's rows and, in training (`step` is given), the gradient of the summed loss."""
    schedule = self._schedule_of(step)
    microbatches = split_batch(batch, schedule.microbatches, sharding)
    # Once, or each unit would do it again, and keep the results until its backward pass.
    loop, stage = self._loop(step), jax.lax.axis_index("stage")
    held = {name: params[name] for name in loop.stacks}
    params = params | jax.vmap(lambda weights: in_float8(self.program.sizes, weights, sharding))(held)
    end = Stage(self.program, schedule, sharding, stage, loop, params, microbatches, step).run()
    return end.sums, end.gradients

  def text_writer(self, params: Params, sampling: Sampling, sharding: Constraints) -> TextWriter:
    """Writes texts. With a single microbatch nothing can overlap: the stages take turns, each with its own cache.

    Padding is blocks of zeros, which change nothing.
    """
    loop, sizes = self._loop(None), self.program.sizes
    held, dims = ({name: tree[name] for name in loop.stacks} for tree in (params, self.program.dims()))
    blocks = Stored(sharding.layout, dims, held, ["stage"])

    def in_turn(x: jax.Array, cache: AnyCache, start: jax.Array | int) -> tuple[jax.Array, AnyCache]:
      def stage(blocks: Params, x: jax.Array, cache: AnyCache, start: jax.Array) -> tuple[jax.Array, AnyCache]:
        stages, index = sharding.layout.mesh["stage"], jax.lax.axis_index("stage")
        model = bind(sizes, params | blocks)

        def work(start: jax.Array, carry: tuple) -> tuple:
          x, cache = carry
          return run_cached(model, x, cache, start, sharding.place(layers=None), [loop])

        def turn(i: jax.Array, carry: tuple) -> tuple:
          x, cache = once("turn", index == i, work, start, carry)
          return jax.lax.ppermute(x, "stage", [(s, (s + 1) % stages) for s in range(stages)]), cache

        x, cache = jax.lax.fori_loop(0, stages, turn, (x, cache))
        # The last stage sent its output to the first.
        return sum_in_dtype(lambda x: jax.lax.psum(x, "stage"), jnp.where(index == 0, x, 0)), cache

      of_layers = Stored(
        sharding.layout, jax.tree.map(lambda x: ("layers", *(None,) * (x.ndim - 1)), cache), cache, ["stage"]
      )
      x, new = jax.shard_map(
        stage,
        in_specs=(P("stage"), P(), P("stage"), P()),
        out_specs=(P(), P("stage")),
        axis_names={"stage"},
        check_vma=False,
      )(blocks.pad(held), x, of_layers.pad(cache), jnp.asarray(start))
      return x, of_layers.cut(new)

    model, first = bind(sizes, params), sizes.first_layers

    def run(x: jax.Array, cache: AnyCache, start: jax.Array | int) -> tuple[jax.Array, AnyCache]:
      """All stages run the blocks that come before those of the stages. This copies the cache for each token."""
      before, own = split(cache, model.sizes.windowed[:first])
      x, new = run_cached(model, x, before, start, sharding, loops(sizes.kinds[:first]))
      x, own = in_turn(x, own, start)
      return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), new, own)

    return TextWriter(model, sampling, sharding, run if first else in_turn)


def shared_axes(layout: Layout) -> list[str]:
  """The mesh axes along which devices share a stage and an example. They are left to the compiler."""
  by_hand = ("stage", *layout.axes("batch"), *layout.axes("positions"))
  return [axis for axis, size in layout.mesh.items() if size > 1 and axis not in by_hand]


def check_periods(sizes: ModelSizes, chunks: int, named: str, depth: int) -> None:
  """Raises ConfigError unless each of so many chunks of the layers begins with a period of kinds (stacks.py)."""
  period = len(windows.period_of(sizes.kinds[sizes.first_layers :]))
  held, experts = -(-depth // chunks), sizes.experts
  if period > 1 and held % period:
    fields = [f"model.layers_pattern={sizes.layers_pattern!r}"] * (len({kind.sees for kind in sizes.kinds}) > 1)
    if experts and experts.every > 1:
      first = f" and model.dense_layers={experts.dense_layers}" * (experts.dense_layers > 0)
      fields.append(f"model.experts_every={experts.every}{first}")
    raise ConfigError(
      f"{' with '.join(fields)} repeats after {period} layers, but {named}={depth} gives each "
      f"part of the pipeline {held}, which are not whole periods; use a depth that is a multiple of {chunks * period}, "
      "or fewer stages"
    )


def check_compiler(layout: Layout, sizes: ModelSizes, platform: str) -> None:
  """Raises ConfigError if the compiler of this platform is known to fail on such stages."""
  shared = shared_axes(layout)
  if platform == "tpu" and sizes.experts and shared and jax.__version_info__ < (0, 12):
    # In a function with several calls, the compiler's partitioner forgets which axes are manual around a call.
    axis = shared[0]
    raise ConfigError(
      f"model.experts={sizes.experts.count} is not possible in stages that mesh.{axis}={layout.mesh[axis]} splits, "
      f"because the TPU compiler of jax {jax.__version__} fails on them; use Python 3.12 or later, or mesh.{axis}=1"
    )


def each_has_layers(stages: int, depth: int) -> bool:
  """Whether no stage is empty if each but the last has equally many layers, and the last one the rest."""
  return -(-depth // -(-depth // stages)) == stages


def check_depth(schedule: str, stages: int, chunks: int, named: str, depth: int, devices: int = 0) -> None:
  """Raises ConfigError if a stage has no layer, or fewer than others under a schedule that needs equally many.

  Args:
    named: the field of the config that gives the depth.
    devices: the error names numbers of stages that divide it (`Layout.fitting`).
  """
  each, shown = -(-depth // stages), f" × pipeline.chunks={chunks}" if chunks > 1 else ""
  has_layers = lambda stages: each_has_layers(stages, depth)
  works = has_layers if schedule in UNEVEN else lambda stages: depth % (stages * chunks) == 0
  if works(stages):
    return
  possible = [n for n in range(1, depth + 1) if works(n) and devices % n == 0]
  fits = sorted(sorted(possible, key=lambda n: abs(n - stages))[:2])
  fix = f"mesh.stage={either(map(str, fits))}" if fits else "pipeline.chunks=0"
  if schedule in UNEVEN:
    raise ConfigError(
      f"mesh.stage={stages} leaves a stage without layers, because {named}={depth} gives {each} to each before it; use "
      f"{fix}"
    )
  if has_layers(stages) and chunks == 1:
    fix += ", or pipeline.schedule='1f1b'"
  raise ConfigError(
    f"mesh.stage={stages}{shown} does not divide {named}={depth}, as pipeline.schedule={schedule!r} needs; use {fix}"
  )


def check_fields(schedule: str, microbatches: int, chunks: int) -> None:
  """Raises ConfigError unless the fields of a config's section `pipeline` are valid, whatever the model."""
  one_of("pipeline.schedule", schedule, orders.ORDERS)
  positive("pipeline.microbatches", microbatches)
  not_negative("pipeline.chunks", chunks, "use 0 for two if the depth allows")
  if chunks > 1 and schedule != "interleaved":
    raise ConfigError(
      f"pipeline.chunks={chunks} does nothing with pipeline.schedule={schedule!r}; use 0, or the schedule 'interleaved'"
    )


def regroup(w: jax.Array, stages: int, chunks: int) -> jax.Array:
  """This stage's stored, consecutive layers [L/S, ...] → the chunks that it runs [chunks, L/(S · chunks), ...].

  The layers form S · chunks groups. Group q is stored on stage q // chunks and used by stage q % S as chunk q // S. One
  ppermute for each chunk moves the groups; in each, a stage sends one group and receives one.
  """
  w = w.reshape(chunks, -1, *w.shape[1:])
  if chunks == 1 or stages == 1:
    return w
  stage, period = jax.lax.axis_index("stage"), math.lcm(stages, chunks)
  moved = jnp.zeros_like(w)
  for turn in range(chunks):
    groups = [q for q in range(stages * chunks) if (q + q // period) % chunks == turn]
    send = jnp.array([q % chunks for q in sorted(groups, key=lambda q: q // chunks)])
    keep = jnp.array([q // stages for q in sorted(groups, key=lambda q: q % stages)])
    group = jax.lax.ppermute(w[send[stage]], "stage", [(q // chunks, q % stages) for q in groups])
    moved = jax.lax.dynamic_update_index_in_dim(moved, group, keep[stage], axis=0)
  return moved
