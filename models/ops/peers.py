"""The devices that share a dimension: the positions of a text (context.py), or experts (transports.py)."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from models.dimensions import Sharding
from models.ops.workarounds import sum_in_dtype


@dataclasses.dataclass(frozen=True)
class Peers:
  """The devices that share a dimension, as one of them sees them. Subclasses have the methods that send."""

  sharding: Sharding
  DIM: ClassVar[str]

  @property
  def count(self) -> int:
    return self.sharding.shards(self.DIM)

  @property
  def index(self) -> jax.Array:
    return self.sharding.index(self.DIM)

  def _send(self, collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    return self.sharding.across(collective, x, self.DIM)

  def _scatter_rows(self, x: jax.Array) -> jax.Array:
    """[devices · n, columns], what a device has for every other → [n, columns], the sum of what all have for this one.

    It stands between barriers: the TPU compiler all-reduces what it can join with other operations (libtpu 0.0.42).
    """
    barrier = jax.lax.optimization_barrier
    scatter = lambda x, axes: sum_in_dtype(lambda x: jax.lax.psum_scatter(x, axes, tiled=True), barrier(x))
    return self._send(lambda x, axes: barrier(scatter(x, axes)), x)
