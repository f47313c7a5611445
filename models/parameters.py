"""The Transformer's parameters as nested dicts of arrays: made, described and bound to the model again.

Everything outside models/ holds parameters in this form, so that it needs no module to sum, shard or store them.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from models import lora
from models.dimensions import Sharding
from models.keys import Purpose
from models.ops.float8 import quantized
from models.sizes import ModelSizes
from models.transformer import Transformer, is_param, used_dtype

Path = tuple[str, ...]  # the keys of nested dicts that lead to an entry


@functools.cache
def definition(sizes: ModelSizes) -> tuple[nnx.GraphDef, nnx.State]:
  """The module's structure and the shapes of its parameters. Allocates nothing."""
  model = nnx.eval_shape(lambda: Transformer(sizes, _streams(jax.random.key(0))))
  return nnx.split(model, nnx.Param)


def logical_dims(sizes: ModelSizes) -> dict[str, Any]:
  """The names of each parameter's dimensions, in the same nested dicts as the parameters."""
  lead = {stack.name: (stack.dim,) for stack in sizes.stacks}
  return _of_each(sizes, lambda top, param: lead.get(top, ()) + param.dims)


def used_dtypes(sizes: ModelSizes) -> dict[str, Any]:
  """The dtype in which the model uses each parameter, in the same nested dicts as the parameters."""
  return _of_each(sizes, lambda _, param: used_dtype(param, sizes))


def stored_dtypes(sizes: ModelSizes) -> dict[str, Any]:
  """The dtype in which a parameter that is trained is stored, in the same nested dicts as the parameters."""
  return _of_each(sizes, lambda _, param: param.dtype.name)


def multiplying(sizes: ModelSizes) -> dict[str, Any]:
  """Whether each parameter multiplies as `model.products` says, in the same nested dicts as the parameters."""
  return _of_each(sizes, lambda _, param: bool(param.get_metadata().get("product")))


def _of_each(sizes: ModelSizes, f: Callable[[str, nnx.Param], Any]) -> dict[str, Any]:
  """f of each parameter, given the name of the outermost entry that holds it: "embedding", "norm", or a stack's."""
  of = lambda path, param: f(path[0].key, param)
  return nnx.to_pure_dict(jax.tree.map_with_path(of, definition(sizes)[1], is_leaf=is_param))


def init_params(sizes: ModelSizes, key: jax.Array) -> dict[str, Any]:
  """Initial parameters, as nested dicts of arrays. One root key gives bitwise equal parameters under every layout."""
  return nnx.to_pure_dict(nnx.state(Transformer(sizes, _streams(key)), nnx.Param))


def _streams(root: jax.Array) -> nnx.Rngs:
  """Two streams of random keys: for weights and for adapters."""
  return nnx.Rngs(weights=Purpose.WEIGHTS.key(root), adapters=Purpose.ADAPTERS.key(root))


def trained(sizes: ModelSizes, params: dict[str, Any]) -> dict[str, Any]:
  """The parameters that are trained, in nested dicts without the others: all, or only the adapters of `lora_rank`.

  `params` may be any tree like the parameters, such as the names of their dimensions, or a part of it.
  """
  return chosen(params, lambda path: lora.NAME in path) if sizes.lora else params


def frozen(sizes: ModelSizes, params: dict[str, Any]) -> dict[str, Any]:
  """The parameters that are not trained, in the same form; {} if all are trained."""
  return chosen(params, lambda path: lora.NAME not in path) if sizes.lora else {}


def chosen(tree: dict[str, Any], keep: Callable[[Path], bool], path: Path = ()) -> dict[str, Any]:
  """The entries of nested dicts whose paths `keep` accepts. Dicts of which nothing is left are left out."""
  found = {}
  for name, x in tree.items():
    at = (*path, name)
    if isinstance(x, dict):
      x = chosen(x, keep, at)
    if x if isinstance(x, dict) else keep(at):
      found[name] = x
  return found


def joined(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
  """Nested dicts with the entries of both, such as trained and frozen parameters."""
  return {**a, **b, **{name: joined(a[name], b[name]) for name in a if name in b}}


def named(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree, with names such as "blocks/mlp/up"."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return [(name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  """Puts named leaves into nested dicts, which can be read without the classes of the original tree."""
  out: dict[str, Any] = {}
  for name, leaf in pairs:
    *path, last = name.split("/")
    functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, out)[last] = leaf
  return out


def in_float8(sizes: ModelSizes, stacks: dict[str, Any], sharding: Sharding) -> dict[str, Any]:
  """Stacks of blocks, with the weights that multiply in float8 made so; as they are if none does."""
  if sizes.products == "dtype":
    return stacks
  model = bind(sizes, nnx.to_pure_dict(definition(sizes)[1]) | stacks)  # of the others shapes alone, which nobody reads
  return {name: nnx.to_pure_dict(quantized(model.scanned(name, sharding)[0], sharding)) for name in stacks}


def bind(sizes: ModelSizes, params: dict[str, Any]) -> Transformer:
  """The model with these parameters: those of `init_params`, or the same with a slice of the stacked blocks."""
  graph, _ = definition(sizes)
  return nnx.merge(graph, params)
