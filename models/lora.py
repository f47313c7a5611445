"""LoRA: low-rank adapters of weights that are not trained (Hu et al. 2021, arXiv:2106.09685).

An adapter of a weight [I..., O...] is a product a·b of two small weights, [I..., R] and [R, O...]. What it adds to a
product with the weight is computed apart, as (x·a)·b, so the gradient of the large weight is never made. At first b is
zero, and the model computes what it did before.

Where devices split heads or hidden units, only x·a [B, T, R] is sent between them. The side of an adapter that is as
wide as the residual stream works on each device's own positions.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from errors import ConfigError, above_zero, not_negative, one_of
from models.dimensions import Sharding
from models.ops.gradients import with_gradient
from models.ops.grouped import NAMES
from models.ops.layers import weight
from models.remat import ADAPTER

if TYPE_CHECKING:
  from models.sizes import ModelSizes

TARGETS = ("query", "key", "value", "out", "gate", "up", "down")  # the weights that may have adapters
NAME = "lora"  # the name of the adapters among the parameters of a layer


@dataclasses.dataclass(frozen=True)
class LoraSizes:
  """The sizes of adapters, which `ModelSizes.lora` holds. `configs/base.py` documents each field."""

  rank: int
  alpha: float
  targets: tuple[str, ...]  # the weights that have adapters

  @staticmethod
  def of(model: Mapping[str, Any]) -> "LoraSizes | None":
    """The sizes in a config's section `model`; None without adapters."""
    rank = not_negative("model.lora_rank", model["lora_rank"], "use 0 to train all weights")
    targets = targets_of(model["lora_targets"])
    if rank and not targets:
      raise ConfigError(f"model.lora_targets is empty; name some of {', '.join(TARGETS)}")
    above_zero("model.lora_alpha", model["lora_alpha"], "16")
    return LoraSizes(rank, model["lora_alpha"], targets) if rank else None

  @property
  def scale(self) -> float:
    """The factor that multiplies what adapters add."""
    return self.alpha / self.rank

  @property
  def of_expert(self) -> int:
    """How many weights of an expert have an adapter."""
    return sum(name in NAMES for name in self.targets)


def check_targets(sizes: "ModelSizes") -> None:
  """Raises ConfigError if neither the mixer nor the MLP of a block has one of the weights that are to have adapters."""
  if lacking := [name for name in (sizes.lora.targets if sizes.lora else ()) if name not in sizes.sides]:
    raise ConfigError(
      f"model.lora_targets names {', '.join(lacking)}, which model.mixer={sizes.mixer!r} with model.mlp={sizes.mlp!r} "
      f"cannot adapt; use {','.join(sizes.sides)!r}, or train all weights with model.lora_rank=0"
    )


def targets_of(names: str) -> tuple[str, ...]:
  """The weights in a list with commas. Raises ConfigError for a weight that cannot have an adapter."""
  found = {one_of("model.lora_targets", name.strip(), TARGETS) for name in names.split(",") if name.strip()}
  return tuple(name for name in TARGETS if name in found)


def adapter_weights(sizes: "ModelSizes") -> int:
  """How many weights of a block's adapters work on a token."""
  if not sizes.lora:
    return 0
  weights = sum(sizes.width + sizes.sides[name] for name in sizes.lora.targets if sizes.sides[name])
  if sizes.experts:
    weights += sizes.experts.per_token * sizes.lora.of_expert * (sizes.width + sizes.experts.width)
  return sizes.lora.rank * weights


def groups(lora: LoraSizes, sides: Mapping[str, int]) -> list[tuple[str, list[str], list[str]]]:
  """For `heads` and for `mlp`, the targets that read the residual stream, and those that write to it.

  The weights of a mixture's experts are not among them. `sides` is `ModelSizes.sides`.
  """
  names = [name for name in lora.targets if sides[name]]
  some = lambda *wanted: [name for name in wanted if name in names]
  return [("heads", some("query", "key", "value"), some("out")), ("mlp", some("gate", "up"), some("down"))]


def names_of(weight: str) -> tuple[str, str]:
  """The names of a and b of the adapter of a weight: "blocks/mlp/up" → "blocks/mlp/lora/up/a" and ".../up/b"."""
  layer, _, target = weight.rpartition("/")
  return f"{layer}/{NAME}/{target}/a", f"{layer}/{NAME}/{target}/b"


def merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
  """A stacked weight [L, I..., O...] with what its adapter [L, I..., R] and [L, R, O...] adds to it.

  Weights of experts, and their adapters, have the experts after the layers: [L, E, I, O].
  """
  lead, rank = a.shape[: a.ndim + b.ndim - w.ndim - 2], a.shape[-1]
  change = a.reshape(*lead, -1, rank) @ b.reshape(*lead, rank, -1)
  return w + scale * change.reshape(w.shape)


class Adapter(nnx.Module):
  """The two small weights of one adapter; for a weight of experts, two for each expert.

  `inputs` says how many dimensions of the large weight are contracted.
  """

  def __init__(self, of: nnx.Param, inputs: int, rank: int, dtype: str, rngs: nnx.Rngs):
    dims = of.dims
    lead = 1 if dims[0] == "experts" else 0
    before, after = of.shape[lead : lead + inputs], of.shape[lead + inputs :]
    std, end = math.prod(before) ** -0.5, lead + inputs
    shape, names = of.shape[:lead], dims[:lead]
    self.a = weight(rngs.adapters, (*shape, *before, rank), (*dims[:end], None), std=std, dtype=dtype)
    self.b = nnx.Param(jnp.zeros((*shape, rank, *after), dtype), dims=(*names, None, *dims[end:]))


class Adapters(nnx.Module):
  """The adapters of a layer's weights, each under the name of its weight.

  Attributes:
    names: the weights of this layer that have an adapter.
    scale: the factor that multiplies what an adapter adds.
  """

  def __init__(self, sizes: "ModelSizes", rngs: nnx.Rngs, **weights: tuple[nnx.Param, int]):
    self.names, self.scale = tuple[str, ...](), 0.0
    if lora := sizes.lora:
      self.names, self.scale = tuple(name for name in weights if name in lora.targets), lora.scale
      for name in self.names:
        setattr(self, name, Adapter(*weights[name], lora.rank, sizes.param_dtype, rngs))

  def halves(self) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The two weights of each adapter, whose product is what is added to the large weight."""
    pairs = {name: getattr(self, name) for name in self.names}
    return {name: (own.a[...], self.scale * own.b[...]) for name, own in pairs.items()}

  def after_stream(self, products: dict[str, jax.Array], x: jax.Array, sharding: Sharding) -> tuple[jax.Array, ...]:
    """Adds to products [B, T, O...] of the residual stream what their adapters make of the stream.

    Args:
      products: the products by the names of their weights.
      x: the stream [B, T, D], before `Sharding.whole_sequence`.
    """
    names = [name for name in products if name in self.names]
    if names:
      low = sharding.whole_sequence(_joined(x, [getattr(self, name).a[...] for name in names]))  # sent as one array
      for name, part in zip(names, jnp.split(low, len(names), axis=-1), strict=True):
        products = products | {name: products[name] + self.scale * _product(part, getattr(self, name).b[...])}
    return tuple(products.values())

  def into_stream(self, name: str, product: jax.Array, h: jax.Array, sharding: Sharding, inputs: int = 1) -> jax.Array:
    """Adds to a product [B, T, D] what the adapter of its weight makes of the same input.

    Args:
      name: the name of the weight.
      product: the result of `Sharding.split_sequence`.
      h: the input [B, T, I...].
      inputs: the number of dimensions of I.
    """
    if name not in self.names:
      return product
    own = getattr(self, name)
    low = checkpoint_name(sharding.split_sequence(_product(h, own.a[...], inputs)), ADAPTER)
    return product + self.scale * _product(low, own.b[...])


def _product(x: jax.Array, w: jax.Array, inputs: int = 1) -> jax.Array:
  """[..., I...] × [I..., O...] → [..., O...]. Never flat (`layers.linear`), so devices may split positions."""
  return jnp.tensordot(x, w, axes=inputs)


def _joined(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
  """The products of one input [..., I] with weights [I, R] each, side by side. Saves no joined weights."""

  def forward(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, list[jax.Array]]]:
    return x @ jnp.concatenate(weights, axis=-1), (x, weights)

  def backward(given: tuple[jax.Array, list[jax.Array]], g: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    x, weights = given
    of_weights = jnp.einsum("bti,btr->ir", x, g)
    return g @ jnp.concatenate(weights, axis=-1).T, jnp.split(of_weights, len(weights), axis=-1)

  return with_gradient(forward, backward, x, weights)
