"""A block of the Transformer: a mixer, such as attention, then an MLP or experts, each added to the residual stream.

The kinds of both are in mixers.py and mlps.py. How their products and cores are computed is in ops/.
"""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.experts import Experts
from models.mixers import MIXERS
from models.mlps import MLPS
from models.ops.layers import RMSNorm, dropout, fold_in
from models.ops.loss import Sums
from models.side_inputs import SideInputs
from models.sizes import ModelSizes

# The names of norms of a mixer or MLP, by `model.norms`.
PLACES = {"before": ("_norm",), "after": ("_norm_after",), "both": ("_norm", "_norm_after")}


class Block(nnx.Module):
  """Adds mixer(norm(x)) to x, then mlp(norm(x)). The weights of a mixer are under the name of its kind.

  With `model.norms` "after" it adds norm(mixer(x)) and norm(mlp(x)), and with "both" norm(mixer(norm(x))).
  """

  def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs):
    self.mixer = sizes.mixer
    self.norms = tuple(part + place for part in (self.mixer, "mlp") for place in PLACES[sizes.norms])
    for name in self.norms:
      setattr(self, name, RMSNorm(sizes.width, sizes))
    setattr(self, self.mixer, MIXERS[self.mixer](sizes, rngs))
    self.mlp = Experts(sizes, rngs) if sizes.experts else MLPS[sizes.mlp](sizes, rngs)
    self.dropout, self.limit = sizes.dropout, sizes.expert_limit

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    side: SideInputs,  # with the keys of this block
    sharding: Sharding,
    cache: Any = None,
    start: jax.Array | int = 0,
  ) -> tuple[jax.Array, Any, Sums]:
    """Returns the residual stream [B, T, D], the second result of the mixer, and the sums of the block's router."""
    mixed, new = getattr(self, self.mixer)(self._norm(f"{self.mixer}_norm", x), side, sharding, cache, start)
    mixed = self._norm(f"{self.mixer}_norm_after", checkpoint_name(mixed, "attention_output"))
    # Pinned, so that a gradient that goes both to a sum and into a product is gathered for the product alone. XLA's GPU
    # compiler turns a gather that is sliced again into a permute without pairs, which returns zeros (jax 0.10.2).
    stream = lambda x: sharding.activation(x, "batch", "sequence", None)
    x = stream(x + dropout(mixed, self.dropout, fold_in(side.keys, 0), sharding))
    normed = self._norm("mlp_norm", x)
    routed: Sums = {}
    if isinstance(self.mlp, Experts):
      # When a text is written or scored, no token is dropped: the tokens before it may not be at hand.
      out, routed = self.mlp(normed, side.counted, sharding, self.limit if cache is None else 0)
    else:
      out = self.mlp(normed, sharding)
    out = self._norm("mlp_norm_after", out)
    return stream(x + dropout(out, self.dropout, fold_in(side.keys, 1), sharding)), new, routed

  def _norm(self, name: str, x: jax.Array) -> jax.Array:
    """x after this norm, if the block has it."""
    return getattr(self, name)(x) if name in self.norms else x
