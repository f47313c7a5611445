"""MLPs: what a block does with each position by itself. `model.mlp` names one; experts.py has mixtures of them.

To add one, write a class with the attributes and methods of `SwiGLU`, and add it to `MLPS`.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.dimensions import Sharding
from models.lora import Adapters
from models.ops.layers import linear, linears, weight

if TYPE_CHECKING:
  from models.sizes import ModelSizes


class SwiGLU(nnx.Module):
  """The gated MLP: down(silu(gate(x)) · up(x)) (arXiv:2002.05202).

  Attributes:
    products: a name for the result of each product of the width and the hidden units (remat.NAMES, if it has one); the
      last one makes what is added to the residual stream.
    adapted: the weights that may have adapters.
  """

  products = ("mlp_gate", "mlp_up", "mlp_output")
  adapted = ("gate", "up", "down")

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs, hidden: int = 0):
    """`hidden` is the number of hidden units; 0: `sizes.mlp_width`."""
    d, f = sizes.width, hidden or sizes.mlp_width
    drawn = functools.partial(weight, rngs.weights, dtype=sizes.param_dtype, product=True)
    self.gate = drawn((d, f), ("embed", "mlp"), std=d**-0.5)
    self.up = drawn((d, f), ("embed", "mlp"), std=d**-0.5)
    self.down = drawn((f, d), ("mlp", "embed"), std=(2 * sizes.depth * f) ** -0.5)
    self.lora = Adapters(sizes, rngs, gate=(self.gate, 1), up=(self.up, 1), down=(self.down, 1))
    if sizes.mlp_bias:
      bias = lambda size, dim: nnx.Param(jnp.zeros(size, sizes.param_dtype), dims=(dim,))
      self.gate_bias, self.up_bias, self.down_bias = bias(f, "mlp"), bias(f, "mlp"), bias(d, None)
    self.has_bias = sizes.mlp_bias

  @staticmethod
  def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The hidden units, from the results of both products, in their shape."""
    return jax.nn.silu(gate) * up

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array, sharding: Sharding) -> jax.Array:  # [B, T, D] → [B, T, D]
    whole = sharding.whole_sequence(x)
    gate, up = linears(whole, (self.gate[...], self.up[...]), functools.partial(jnp.stack, axis=-2), sharding)
    gate, up = self.lora.after_stream({"gate": gate, "up": up}, x, sharding)
    if self.has_bias:
      gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
    gate, up = checkpoint_name(gate, "mlp_gate"), checkpoint_name(up, "mlp_up")
    h = self.gated(gate, up)
    h = checkpoint_name(sharding.activation(h, "batch", None, "mlp"), "mlp_hidden")  # [B, T, F]
    out = sharding.split_sequence(linear(h, self.down[...], sharding, flat=False))
    out = out + self.down_bias[...].astype(out.dtype) if self.has_bias else out
    return self.lora.into_stream("down", out, h, sharding)


class GeGLU(SwiGLU):
  """The same with GELU, approximated by tanh (arXiv:2002.05202, arXiv:1606.08415)."""

  @staticmethod
  def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


class ClampedSwiGLU(SwiGLU):
  """That of gpt-oss (arXiv:2508.10925): both results are clamped, the gate is steeper, and `up` begins at 1."""

  STEEPNESS, LIMIT = 1.702, 7.0

  @classmethod
  def gated(cls, gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, cls.LIMIT), jnp.clip(up, -cls.LIMIT, cls.LIMIT)
    return gate * jax.nn.sigmoid(cls.STEEPNESS * gate) * (up + 1)


MLPS: dict[str, type[SwiGLU]] = {"swiglu": SwiGLU, "geglu": GeGLU, "swiglu_clamped": ClampedSwiGLU}
