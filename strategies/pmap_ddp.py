"""Data parallelism with `jax.pmap`, the legacy API that much existing code still uses.

    state   [ W ] [ W ] [ W ] [ W ]     replicated; psum of the gradients, then every device makes the same update
    batch   [ 0 ] [ 1 ] [ 2 ] [ 3 ]     a leading dimension of devices, one slice each

Since jax 0.8, pmap is a `jit` of a fully manual `shard_map`. The state is replicated (`None` in `in_axes`) over a
process's own devices, and `train_step` makes it global. Communication: as in data_parallel, but once a step even with
`accumulation`. Use it to understand old code. Migrate to data_parallel, or to a `jax.shard_map` over "data".
Source: https://docs.jax.dev/en/latest/migrate_pmap.html; Li et al. 2020 (PyTorch DDP), arXiv:2006.15704.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from errors import ConfigError
from strategies.base import Strategy
from strategies.data_parallel import LAYOUT as LAYOUT
from strategies.layout import Layout
from strategies.mesh import from_local_copies
from strategies.sharding import MeshSharding
from training.program import Batch, Metrics, Program, TrainState


class PmapDDP(Strategy):
  """Runs every function of a batch with pmap."""

  def __init__(self, layout: Layout, program: Program, mesh: Mesh | AbstractMesh, **fields: Any):
    if program.optimizer.on_host:  # pmap does not take arrays in the host's memory
      raise ConfigError("optimizer.on_host=True does not fit strategy='pmap_ddp'; use strategy='data_parallel'")
    super().__init__(layout, program, mesh, **fields)
    self.axes_by_hand = layout.axes("batch")
    if not isinstance(mesh, Mesh) or not set(mesh.devices.flat) <= set(jax.devices()):
      raise ConfigError("strategy='pmap_ddp' needs devices of this machine; use 'data_parallel', which does the same")
    update = functools.partial(program.apply_gradients, sharding=MeshSharding(layout))
    sums = lambda s, b: jax.lax.psum(program.gradient_sums(s.params, b, s.step), "data")
    run = functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0), out_axes=None, devices=[*mesh.devices.flat])
    self._train_step = run(lambda s, b: update(s, *sums(s, b)), donate_argnums=0)
    self._gradients = run(lambda s, b: program.mean(*sums(s, b)))
    self._eval_step = run(lambda p, b: jax.lax.psum(program.eval_step(p, b), "data"))

  def shard(self, host_batch: dict[str, np.ndarray], batch_size: int) -> Batch:
    """The batch with a leading dimension of devices: [n, B/n, ...]."""
    n = self.layout.device_count
    return super().shard({k: x.reshape(-1, batch_size // n, *x.shape[1:]) for k, x in host_batch.items()}, n)

  def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    state, metrics = super().train_step(state, batch)
    return jax.tree.map(from_local_copies, state, self.state_sharding), metrics

  def lower_train_step(self, batch_size: int, **options: Any) -> jax.stages.Lowered:
    n = self.layout.device_count
    shape = lambda x: jax.ShapeDtypeStruct((n, x.shape[0] // n, *x.shape[1:]), x.dtype)
    return self._train_step.lower(self.abstract_state(), jax.tree.map(shape, self.abstract_batch(batch_size)))


STRATEGY = PmapDDP
