"""Pmapped: runs every function of a batch inside `jax.pmap`, the legacy API. pmap_ddp.py says when to use it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from errors import ConfigError
from models.dimensions import Sharding
from strategies.execution.mesh import OnMesh, from_local_copies
from strategies.execution.runner import Asked, Limit, Runner
from strategies.execution.strategy import Strategy
from strategies.layout import Layout
from training.program import Batch, Metrics, Params, Sums, TrainState


class Copies(Sharding):
  """Each device has all weights and its own rows, and sends nothing by itself."""

  def largest(self, x: jax.Array, *dims: str | None) -> jax.Array:
    return jax.lax.pmax(x, "data") if "batch" in dims else x


class Pmapped(Runner):
  """Runs every function of a batch with pmap."""

  @staticmethod
  def limits(layout: Layout, program: Asked) -> list[Limit]:
    why = "pmap takes no arrays in the host's memory"
    return [Limit("optimizer.on_host", True, why, "strategy='data_parallel'")] if program.optimizer.on_host else []

  def gradient_sums(self, params: Params, batch: Batch, step: jax.Array) -> tuple[Sums, Params]:
    # Gradients are summed before they are rounded to the dtype of the weights, as under other strategies.
    wide = lambda w, used: w.astype(jnp.promote_types(w.dtype, used))
    weights = jax.tree.map(wide, params, self.program.used_dtypes())
    sums, gradients = jax.lax.psum(self.program.gradient_sums(weights, batch, step, Copies()), "data")
    return sums, jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, self.program.trained(params))

  def eval_sums(self, params: Params, batch: Batch) -> Sums:
    return jax.lax.psum(self.program.loss_sums(params, batch, None, Copies())[1], "data")

  def jit(self, function: Callable[..., Any], **options: Any) -> Any:
    mesh, donated = options["in_shardings"][1].mesh, options.get("donate_argnums", ())
    if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= set(jax.devices()):
      raise ConfigError("strategy='pmap_ddp' needs devices of this machine; use 'data_parallel', which does the same")
    mapped = functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0), out_axes=None)
    return mapped(function, devices=[*mesh.devices.flat], donate_argnums=donated)


class PmapDDP(Strategy):
  """A Strategy whose batches have a leading dimension of devices."""

  def shard(self, host_batch: dict[str, np.ndarray], batch_size: int) -> Batch:
    """The batch with a leading dimension of devices: [n, B/n, ...]."""
    place, n = OnMesh(self.batch_sharding), self.layout.device_count
    own = place.padded(batch_size) // n
    filled = place.filled(host_batch, batch_size)
    return place.shard({name: rows.reshape(-1, own, *rows.shape[1:]) for name, rows in filled.items()}, n)

  def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    state, metrics = super().train_step(state, batch)
    return jax.tree.map(from_local_copies, state, self.state_sharding), metrics

  def lower_train_step(self, batch_size: int, **options: Any) -> jax.stages.Lowered:
    n = self.layout.device_count
    shape = lambda x: jax.ShapeDtypeStruct((n, x.shape[0] // n, *x.shape[1:]), x.dtype)
    return self._train_step.lower(self.abstract_state(), jax.tree.map(shape, self.abstract_batch(batch_size)))
