"""The model's weights, with the names of their dimensions and what the model does with them."""

import functools
import math
from typing import NamedTuple

import jax
from flax import nnx

from models import lora
from models.dimensions import FIRST_LAYERS, Dims, is_dims
from models.mixers import MIXERS
from models.parameters import definition, logical_dims, multiplying, stored_dtypes, used_dtypes
from models.sizes import ModelSizes


class Weight(NamedTuple):
  """A parameter of the model.

  Attributes:
    shape: global, with all layers.
    dims: the logical dimensions of `shape`.
    dtype: in which the model uses it: float32 for a classifier's head, `param_dtype` for norms, else the compute dtype.
    roles: how the model uses it: "block", "embedding", "head", "norm" or "adapter". A tied embedding is also the head.
    stored: the dtype in which it is stored if it is trained; else it is stored in `dtype`.
    trained: whether it is.
    product: whether it multiplies as `model.products` says.
  """

  name: str
  shape: tuple[int, ...]
  dims: Dims
  dtype: str
  roles: tuple[str, ...]
  stored: str
  trained: bool = True
  product: bool = False

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def is_table(self) -> bool:
    """Whether its rows are looked up by token id."""
    return self.dims[0] == "vocab"

  @property
  def in_blocks(self) -> bool:
    return "block" in self.roles

  @property
  def in_stages(self) -> bool:
    """Whether the stages of a pipeline share its blocks. Dense blocks of a mixture are all on the first one."""
    return "layers" in self.dims

  @property
  def layers(self) -> int:
    """The number of blocks of its stack; 1 outside the blocks."""
    return self.shape[0] if self.in_blocks else 1

  @property
  def entry(self) -> str:
    """The outermost entry of the parameters that holds it, such as "blocks"."""
    return self.name.partition("/")[0]

  @property
  def is_matrix(self) -> bool:
    """Whether one of its sides is the model's width. If not, it is a scale, a bias or half of an adapter."""
    return "embed" in self.dims

  @property
  def is_beside_stream(self) -> bool:
    """Whether it is half of an adapter that devices multiply with their own positions. Experts have no such half."""
    return "adapter" in self.roles and "experts" not in self.dims

  @property
  def in_parts_along(self) -> str | None:
    """The dimension, besides the batch, along which devices compute parts of the gradient of what is no matrix."""
    if {"heads", "mlp"} & set(self.dims):
      return None  # a device has all of the gradient for its heads or hidden units
    return "heads" if self.name.split("/")[1] in MIXERS else "sequence"  # such as of queries and keys, or of the stream


@functools.cache
def weights(sizes: ModelSizes) -> tuple[Weight, ...]:
  """The model's parameters, ordered by name."""
  _, params = definition(sizes)
  found = jax.tree.leaves_with_path(nnx.to_pure_dict(params))
  named = jax.tree.leaves(logical_dims(sizes), is_leaf=is_dims)
  dtypes, stored = jax.tree.leaves(used_dtypes(sizes)), jax.tree.leaves(stored_dtypes(sizes))
  products = jax.tree.leaves(multiplying(sizes))
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  is_trained = lambda path: not sizes.lora or lora.NAME in name(path).split("/")
  return tuple(
    Weight(
      name(path), tuple(param.shape), dims, dtype, _roles(sizes, name(path), dims), kept, is_trained(path), product
    )
    for (path, param), dims, dtype, kept, product in zip(found, named, dtypes, stored, products, strict=True)
  )


def trained(sizes: ModelSizes) -> tuple[Weight, ...]:
  """The parameters that are trained."""
  return tuple(weight for weight in weights(sizes) if weight.trained)


def _roles(sizes: ModelSizes, name: str, dims: Dims) -> tuple[str, ...]:
  if dims[0] in (FIRST_LAYERS, "layers"):
    return ("block", "adapter") if lora.NAME in name.split("/") else ("block",)
  if dims == sizes.reads.embedding()[1]:
    return ("embedding", "head") if sizes.tied_embedding else ("embedding",)
  return ("head",) if dims == sizes.predicts.head()[1] else ("norm",)
