"""Strategy: the interface that train.py, the tools and the tests use.

training/program.py holds the mathematics, without devices, and a runner (runner.py) runs it under a layout. Here each
function of a step becomes a jitted program over the mesh. The layout gives the shardings of inputs and outputs.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from errors import ConfigError
from models.dimensions import map_dims
from strategies.execution.mesh import OnMesh, on_mesh
from strategies.execution.padding import Stored
from strategies.execution.runner import Runner
from strategies.execution.writing import Writing
from strategies.layout import Layout
from training.program import Batch, Metrics, Params, Sums, TrainState


class Strategy:
  """A Program laid out on a mesh.

  Attributes:
    runner: who runs the program's parts.
    mesh: the devices, or an AbstractMesh to lower without devices.
    layout: resolved; `layout.mesh` holds the size of every mesh axis.
    shapes: the state's shapes without padding (padding.py). The states that methods take and return have padding.
    stored: how parameters are stored.
    transfers: what moves between devices in a step.
    schedule: the pipeline's schedule; None without a pipeline.
    compiler_options: the compiler's options for the training step (options.py).
  """

  def __init__(self, runner: Runner, mesh: Mesh | AbstractMesh, compiler_options: dict[str, Any] | None = None):
    """Compiles nothing yet. The options are for the training step (options.py)."""
    self.runner, self.mesh = runner, mesh
    self.program, self.layout, self.transfers = runner.program, runner.layout, runner.transfers
    self.schedule, self.compiler_options = runner.schedule, compiler_options or {}
    program, layout, sharding = self.program, self.layout, runner.sharding
    replicated, self.shapes = NamedSharding(mesh, P()), program.abstract_state()
    # Adam's moments are sharded like their weights, or into more pieces. The compiler then updates the pieces, and
    # gathers the new weights because the step's output has them whole.
    stored = Stored(layout, program.dims(), self.shapes.params)
    stored_state = Stored(layout.stored_as("state"), program.rule.dims, self.shapes.opt_state)
    stored_gradients = Stored(layout, *map(program.trained, (stored.dims, stored.shapes)))
    params = self._shardings(layout, stored.dims)
    self.state_sharding = TrainState(
      step=replicated,  # type: ignore[arg-type]  # the same tree, with shardings for arrays
      params=params,
      opt_state=self._shardings(stored_state.layout, stored_state.dims, program.optimizer.on_host),
    )
    self.batch_sharding = NamedSharding(mesh, layout.spec(("batch",)))
    self._abstract_state = jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      TrainState(self.shapes.step, stored.abstract(), stored_state.abstract()),
      self.state_sharding,
    )
    self.stored = stored

    def pad(state: TrainState) -> TrainState:
      return TrainState(state.step, stored.pad(state.params), stored_state.pad(state.opt_state))

    def init(seed: jax.Array) -> TrainState:
      return pad(program.init(jax.random.key(seed)))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
      state = TrainState(state.step, stored.cut(state.params), stored_state.cut(state.opt_state))
      sums, gradients = runner.gradient_sums(state.params, batch, state.step)
      state, metrics = program.apply_gradients(state, sums, gradients, sharding)
      return pad(state), metrics

    def gradients(state: TrainState, batch: Batch) -> tuple[Metrics, Params]:
      metrics, found = program.mean(*runner.gradient_sums(stored.cut(state.params), batch, state.step))
      return metrics, stored_gradients.pad(found)

    def eval_step(params: Params, batch: Batch) -> Sums:
      return runner.eval_sums(stored.cut(params), batch)

    def averaged(state: TrainState) -> Params:
      state = TrainState(state.step, stored.cut(state.params), stored_state.cut(state.opt_state))
      return stored.pad(program.averaged(jax.device_put(state, jax.memory.Space.Device)))

    self._init = jax.jit(init, out_shardings=self.state_sharding)
    self._averaged = jax.jit(averaged, in_shardings=(self.state_sharding,), out_shardings=params)
    self._train_step = runner.jit(
      train_step,
      in_shardings=(self.state_sharding, self.batch_sharding),
      out_shardings=(self.state_sharding, replicated),
      donate_argnums=0,
      compiler_options=self.compiler_options or None,
    )
    self._gradients = runner.jit(
      gradients,
      in_shardings=(self.state_sharding, self.batch_sharding),
      out_shardings=(replicated, program.trained(params)),
    )
    self._eval_step = runner.jit(eval_step, in_shardings=(params, self.batch_sharding), out_shardings=replicated)

  def _shardings(self, layout: Layout, dims: Any, on_host: bool = False) -> Any:
    """The shardings of arrays with these dimensions, placed as in this layout. Numbers are always on the device."""
    sharding = lambda names: NamedSharding(self.mesh, layout.spec(names))
    return map_dims(lambda names: _on_host(sharding(names)) if on_host and names else sharding(names), dims)

  @functools.cached_property
  def writing(self) -> Writing:
    """The programs that write and score texts."""
    return Writing(self.runner, self.mesh, self.stored)

  def init(self, seed: int) -> TrainState:
    """The state at step 0. It is created sharded: no device ever holds more than its part."""
    with on_mesh(self.mesh):
      return self._init(np.int64(seed))

  def abstract_state(self) -> TrainState:
    """The state's shapes, dtypes and shardings, for restoring and ahead-of-time compilation."""
    return self._abstract_state

  def abstract_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, dtypes and shardings of a global training batch."""
    rows = OnMesh(self.batch_sharding).padded(batch_size)
    return {
      name: jax.ShapeDtypeStruct((rows, *field.shape), field.dtype, sharding=self.batch_sharding)
      for name, field in self.program.example_shapes().items()
    }

  def rows(self, batch_size: int) -> np.ndarray:
    """The rows of a global batch that this process supplies."""
    return OnMesh(self.batch_sharding).rows(batch_size)

  def shard(self, host_batch: dict[str, np.ndarray], batch_size: int) -> Batch:
    """Makes a global batch from the rows that this process supplies."""
    return OnMesh(self.batch_sharding).shard(host_batch, batch_size)

  def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Runs one update. Donates `state`; use the returned one. The metrics are replicated, and not awaited yet."""
    with on_mesh(self.mesh):
      return self._train_step(state, batch)

  def eval_step(self, state: TrainState, batch: Batch) -> Sums:
    """Sums of loss, correct predictions and count over the batch. Padding does not count."""
    with on_mesh(self.mesh):
      return self._eval_step(state.params, batch)

  def averaged(self, state: TrainState) -> TrainState:
    """The state with the average of the weights, if the optimizer keeps it, in place of the weights; else the same."""
    if not self.program.optimizer.ema:
      return state
    with on_mesh(self.mesh):
      return dataclasses.replace(state, params=self._averaged(state))

  def gradients(self, state: TrainState, batch: Batch) -> tuple[Metrics, Params]:
    """The mean loss and its gradient in the trained parameters, before clipping, sharded like the parameters."""
    with on_mesh(self.mesh):
      return self._gradients(state, batch)

  def lower_train_step(self, batch_size: int, **options: Any) -> jax.stages.Lowered:
    """The training step, lowered but not compiled. `options` are those of `jax.stages.Traced.lower`."""
    with on_mesh(self.mesh):
      return self._train_step.trace(self._abstract_state, self.abstract_batch(batch_size)).lower(**options)

  def describe(self, name: str, batch_size: int = 0) -> str:
    """One line: the strategy, its mesh, and the mesh axes of each logical dimension. Axes of size 1 are left out.

    Args:
      batch_size: if given, the line says whether rows are added to a batch.
    """
    if self.layout.device_count == 1:
      return name if name == "single" else f"{name} on one device: nothing to split, so this is the single-device run"
    line = f"{name} on mesh {self.layout.mesh_in_words}; {', '.join(self.layout.compact.placed(' × '))}"
    line += "".join(f"; {way}" for way in self.program.ways(self.layout.shards))
    if self.runner.described:
      line += f"; {self.runner.described}"
    rows = self.rows_computed(batch_size, self.program.accumulation) if batch_size else 0
    if rows > batch_size:
      line += f"; {rows} rows for {batch_size} examples, because devices do not divide them"
    return line

  def check_batch(self, field: str, batch_size: int, accumulation: int = 1) -> None:
    """Raises ConfigError unless a global batch splits into its parts, and fills half of the rows that devices compute.

    Devices need not divide the batch: rows that are not examples are added, and do not count.
    """
    parts = {"accumulation": accumulation, "pipeline.microbatches": self.runner.microbatches}
    unit, devices = math.prod(parts.values()), self.layout.shards("batch")
    shown = lambda parts: " × ".join(f"{n} ({name})" for name, n in parts.items() if n > 1)
    if batch_size < 1 or batch_size % unit:
      fix = max(1, round(batch_size / unit)) * unit
      rows = self.rows_computed(fix, accumulation)
      fix = rows if 2 * fix < rows else fix
      raise ConfigError(f"{field}={batch_size} is not a multiple of {shown(parts) or 1}; use {fix}")
    rows = self.rows_computed(batch_size, accumulation)
    if field == "batch_size" and rows > batch_size and self.program.traits.keeps_statistics:
      raise ConfigError(
        f"{field}={batch_size} is not a multiple of {shown(parts | {'devices': devices})}, and the rows that are added "
        f"would count in the model's statistics of a batch; use {rows}"
      )
    if 2 * batch_size < rows:
      all_parts = {"devices that split the batch": devices} | parts
      raise ConfigError(
        f"{field}={batch_size} is less than half of the {rows} rows that {shown(all_parts)} compute; use {rows}"
      )

  def rows_computed(self, batch_size: int, accumulation: int = 1) -> int:
    """How many rows all devices compute for a batch; more than its examples if the devices do not divide these."""
    parts, devices = accumulation * self.runner.microbatches, self.layout.shards("batch")
    return -(-batch_size // (devices * parts)) * devices * parts


def _on_host(sharding: NamedSharding) -> NamedSharding:
  """The same sharding, in the host's memory.

  Devices that only a compiler describes may not know their kinds of memory. Then the sharding has an abstract mesh.
  """
  found = sharding.with_memory_kind("pinned_host")
  return (
    found if found.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind="pinned_host")
  )
