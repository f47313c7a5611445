"""SideInputs: what every block reads beside the residual stream: angles, documents, dropout keys, its window."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from models.dimensions import UNSHARDED, Sharding
from models.ops import rotary
from models.ops.layers import fold_in
from models.ops.positions import own
from models.ops.routing import Counted
from models.windows import LOCAL, NOPE

if TYPE_CHECKING:
  from models.sizes import ModelSizes


class SideInputs(NamedTuple):
  """What every block reads beside the residual stream. `of` makes it.

  Attributes:
    angles: [T, H/2] or [B, T, H/2], the angles of rotary embedding; after `of_layer` None if the layer has none.
    local_angles: those of local layers, if these have others.
    scale: what queries and keys are multiplied by when they are rotated by `angles`.
    window: how many positions local layers see, and after `of_layer` those that this layer sees; 0: all.
    segments: [B, T], the document of each token, for all positions, even if a device has only some of them; or None.
    keys: [B], the dropout keys of the examples, or None.
    counted: the tokens and predictions that count in the sums of routers; None: there are no sums.
  """

  angles: jax.Array | None
  segments: jax.Array | None = None
  keys: jax.Array | None = None
  counted: Counted | None = None
  local_angles: jax.Array | None = None
  scale: float = 1.0
  window: int = 0

  def of_layer(self, number: jax.Array, kind: str) -> "SideInputs":
    """What one block reads, with its dropout keys, and with the window and the angles of its kind (windows.py)."""
    found = self._replace(keys=fold_in(self.keys, number), window=self.window if kind == LOCAL else 0)
    if kind == NOPE:
      return found._replace(angles=None)
    has_own = kind == LOCAL and self.local_angles is not None
    return found._replace(angles=self.local_angles, scale=1.0) if has_own else found

  @staticmethod
  def of(
    sizes: "ModelSizes",
    length: int,
    *,
    start: jax.Array | int = 0,
    segments: jax.Array | None = None,  # [B, T]
    keys: jax.Array | None = None,  # [B]
    counted: Counted | None = None,
    sharding: Sharding = UNSHARDED,
  ) -> "SideInputs":
    """What every block reads beside the stream of `length` positions, which begin at `start`: a number, or [B].

    With segments, the positions in each segment begin at 0. If devices share positions, `length` counts all positions.
    """
    if segments is None:
      positions = jnp.expand_dims(start, -1) + own(jnp.arange(length)[None], sharding)[0]  # [T] or [B, T]
    else:
      # Whole: the compiler would split them in attention, and permutes inside a pipeline's units hang.
      segments = sharding.activation(segments, "batch", None)
      positions = own(sharding.activation(positions_in(segments), "batch", None), sharding)  # [B, T]
    c, located = sizes, sizes.reads.locate(positions)
    pairs, scaling = c.head_dim // 2 // located.shape[-1], (c.rope_scaling, c.rope_scaling_kind)
    angles = rotary.angles(located, rotary.frequencies(pairs, c.rope_base, *scaling))
    local = rotary.angles(located, rotary.frequencies(pairs, c.rope_base_local, ())) if c.rope_base_local else None
    return SideInputs(angles, segments, keys, counted, local, rotary.scale_of(*scaling), c.shown)


def positions_in(segments: jax.Array) -> jax.Array:
  """The position of each token in its segment: [1, 1, 1, 2, 2, 0] → [0, 1, 2, 0, 1, 0], for each row of [B, T]."""
  index = jnp.arange(segments.shape[1])
  is_first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
  return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)
