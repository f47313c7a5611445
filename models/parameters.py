"""The Transformer's parameters as nested dicts of arrays: made, described and bound to the model again.

Everything outside models/ holds parameters in this form, so that it needs no module to sum, shard or store them.
"""

import functools
from typing import Any

import jax
from flax import nnx

from models import lora
from models.dimensions import Dims
from models.sizes import ModelSizes
from models.transformer import Transformer, is_param


@functools.cache
def definition(sizes: ModelSizes) -> tuple[nnx.GraphDef, nnx.State]:
  """The module's structure and the shapes of its parameters. Allocates nothing."""
  model = nnx.eval_shape(lambda: Transformer(sizes, nnx.Rngs(params=0)))
  return nnx.split(model, nnx.Param)


def logical_dims(sizes: ModelSizes) -> dict[str, Any]:
  """The names of each parameter's dimensions, in the same nested dicts as the parameters."""

  def dims(path: tuple, param: nnx.Param) -> Dims:
    stacked = path[0].key == "blocks"
    return (("layers",) if stacked else ()) + param.dims

  _, params = definition(sizes)
  return nnx.to_pure_dict(jax.tree.map_with_path(dims, params, is_leaf=is_param))


def used_dtypes(sizes: ModelSizes) -> dict[str, Any]:
  """The dtype in which the model uses each parameter, in the same nested dicts as the parameters."""

  def dtype(path: tuple, param: nnx.Param) -> str:
    if not any(param.dims):
      return sizes.param_dtype  # the scale of a norm, because norms are computed in float32
    return sizes.predicts.head_dtype() if path[0].key == "head" else sizes.dtype

  _, params = definition(sizes)
  return nnx.to_pure_dict(jax.tree.map_with_path(dtype, params, is_leaf=is_param))


def init_params(sizes: ModelSizes, key: jax.Array) -> dict[str, Any]:
  """Initial parameters, as nested dicts of arrays. The same key gives bitwise equal parameters under every layout."""
  return nnx.to_pure_dict(nnx.state(Transformer(sizes, nnx.Rngs(params=key)), nnx.Param))


def trained(sizes: ModelSizes, params: dict[str, Any]) -> dict[str, Any]:
  """The parameters that are trained, in nested dicts without the others: all, or only the adapters of `lora_rank`.

  `params` may be any tree like the parameters, such as the names of their dimensions, or a part of it.
  """
  return params if not sizes.lora_rank else _chosen(params, True)


def frozen(sizes: ModelSizes, params: dict[str, Any]) -> dict[str, Any]:
  """The parameters that are not trained, in the same form; {} if all are."""
  return {} if not sizes.lora_rank else _chosen(params, False)


def _chosen(params: dict[str, Any], adapters: bool) -> dict[str, Any]:
  """Only the adapters, or only what is not in them."""
  found = {}
  for name, x in params.items():
    if name == lora.NAME:
      chosen = x if adapters else {}
    elif isinstance(x, dict):
      chosen = _chosen(x, adapters)
    else:
      chosen = {} if adapters else x
    if not isinstance(chosen, dict) or chosen:
      found[name] = chosen
  return found


def joined(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
  """Nested dicts with the entries of both, such as trained and frozen parameters."""
  return {**a, **b, **{name: joined(a[name], b[name]) for name in a if name in b}}


def bind(sizes: ModelSizes, params: dict[str, Any]) -> Transformer:
  """The model with these parameters: those of `init_params`, or the same with a slice of the stacked blocks."""
  graph, _ = definition(sizes)
  return nnx.merge(graph, params)
