"""A mixture of experts: MLPs of which a router chooses a few for each token.

ops/routing.py says how experts are chosen, and ops/experts.py how devices share them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.dimensions import Sharding
from models.lora import Adapters
from models.mlps import MLPS
from models.ops.experts import mix
from models.ops.grouped import Weights
from models.ops.layers import weight
from models.ops.loss import Sums
from models.ops.routing import TOKENS, Counted, one_hot, route, sums
from models.sizes import ModelSizes


class Experts(nnx.Module):
  """Each token's output: the sum of its chosen experts' outputs, each times its scale, plus the shared experts'."""

  def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs):
    assert sizes.experts is not None
    e, d, f, dtype = sizes.experts.count, sizes.width, sizes.experts.width, sizes.param_dtype
    out_std = (2 * sizes.depth * f) ** -0.5
    # Used in float32, because rounded scores would choose other experts.
    self.router = weight(rngs.weights, (d, e), ("embed", None), std=d**-0.5, dtype=dtype, used="float32")
    self.gate = weight(rngs.weights, (e, d, f), ("experts", "embed", "mlp"), std=d**-0.5, dtype=dtype)
    self.up = weight(rngs.weights, (e, d, f), ("experts", "embed", "mlp"), std=d**-0.5, dtype=dtype)
    self.down = weight(rngs.weights, (e, f, d), ("experts", "mlp", "embed"), std=out_std, dtype=dtype)
    self.lora = Adapters(sizes, rngs, gate=(self.gate, 1), up=(self.up, 1), down=(self.down, 1))
    if sizes.mlp_bias:
      self.router_bias = nnx.Param(jnp.zeros(e, dtype), dims=(None,))
      self.gate_bias, self.up_bias = (nnx.Param(jnp.zeros((e, f), dtype), dims=("experts", "mlp")) for _ in range(2))
      self.down_bias = nnx.Param(jnp.zeros((e, d), dtype), dims=(None, "embed"))
    if sizes.experts.has_bias:
      self.bias = nnx.Param(jnp.zeros(e, jnp.float32), dims=(None,))  # steps of `router_bias_rate` are small
    if sizes.experts.shared:
      self.shared = MLPS[sizes.mlp](sizes, rngs, sizes.dense_width)  # one MLP with the hidden units of all of them
    self.sizes, self.has_adapters, self.has_biases = sizes.experts, sizes.lora is not None, sizes.mlp_bias
    self.gated = MLPS[sizes.mlp].gated

  @jax.named_scope("experts")
  def __call__(
    self, x: jax.Array, counted: Counted | None, sharding: Sharding, limit: int = 0
  ) -> tuple[jax.Array, Sums]:
    """[B, T, D] → [B, T, D], and the sums of the router; {} if nothing is counted.

    Args:
      limit: how many tokens of an example an expert takes at most; 0: all.
    """
    c, whole = self.sizes, sharding.whole_sequence(x)
    scores = jnp.einsum("btd,de->bte", whole.astype(jnp.float32), self.router[...], precision="highest")
    scores = scores + self.router_bias[...].astype(jnp.float32) if self.has_biases else scores
    scores = sharding.activation(scores, *TOKENS)  # or devices that share tokens share this product, too, and send more
    routes = route(scores, self.bias[...].astype(jnp.float32) if c.has_bias else None, c, sharding, limit)
    chosen = routes.chosen if routes.taken is None else jnp.where(routes.taken, routes.chosen, c.count)
    adapters = self.lora.halves() if self.has_adapters else None
    biases = (self.gate_bias[...], self.up_bias[...]) if self.has_biases else None
    weights = Weights(self.gate[...], self.up[...], self.down[...], self.gated, biases, adapters)
    out = mix(whole, chosen, routes.scales, weights, sharding, c.transport, limit)
    if self.has_biases:  # of all chosen experts at once: a small product, which needs no rows by expert
      share = jnp.sum(jnp.where(one_hot(chosen, c.count), routes.scales[..., None], 0), axis=-2)  # [B, T, E]
      out += sharding.activation(share, *TOKENS).astype(x.dtype) @ self.down_bias[...]
    out = sharding.split_sequence(out)
    if c.shared:
      out += self.shared(x, sharding)
    return out, sums(routes, counted, c, sharding) if counted else {}
