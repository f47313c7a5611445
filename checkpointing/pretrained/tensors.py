"""Which tensor of a model folder is which weight, and how its rows and columns are arranged here.

A folder has a tensor for each layer: a matrix [outputs, inputs] or a vector. Of experts it has one for each layer and
expert. Here layers and experts are stacked, and heads are a dimension of their own: `query` is [layers, width, heads,
head_dim], and in a folder [heads · head_dim, width].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from checkpointing.pretrained import families
from models.parameters import definition, trained
from models.sizes import ModelSizes

Form = tuple[str, tuple[int, ...], tuple[int, ...]]
LAYER = "model.layers.{}."
# For each weight the name of its tensors, with a place for each number of `Tensor.at`, and which of the dimensions that
# a tensor has make its rows and columns.
FORMS: dict[str, Form] = {
  "embedding": ("model.embed_tokens.weight", (0,), (1,)),
  "blocks/attention_norm/scale": (LAYER + "input_layernorm.weight", (0,), ()),
  "blocks/attention/query": (LAYER + "self_attn.q_proj.weight", (1, 2), (0,)),
  "blocks/attention/key": (LAYER + "self_attn.k_proj.weight", (1, 2), (0,)),
  "blocks/attention/value": (LAYER + "self_attn.v_proj.weight", (1, 2), (0,)),
  "blocks/attention/query_bias": (LAYER + "self_attn.q_proj.bias", (0, 1), ()),
  "blocks/attention/key_bias": (LAYER + "self_attn.k_proj.bias", (0, 1), ()),
  "blocks/attention/value_bias": (LAYER + "self_attn.v_proj.bias", (0, 1), ()),
  "blocks/attention/query_norm/scale": (LAYER + "self_attn.q_norm.weight", (0,), ()),
  "blocks/attention/key_norm/scale": (LAYER + "self_attn.k_norm.weight", (0,), ()),
  "blocks/attention/out": (LAYER + "self_attn.o_proj.weight", (2,), (0, 1)),
  "blocks/mlp_norm/scale": (LAYER + "post_attention_layernorm.weight", (0,), ()),
  "blocks/mlp/gate": (LAYER + "mlp.gate_proj.weight", (1,), (0,)),
  "blocks/mlp/up": (LAYER + "mlp.up_proj.weight", (1,), (0,)),
  "blocks/mlp/down": (LAYER + "mlp.down_proj.weight", (1,), (0,)),
  "norm/scale": ("model.norm.weight", (0,), ()),
  "head": ("lm_head.weight", (1,), (0,)),
}


def _experts(name: str, gate: str, up: str, down: str) -> dict[str, Form]:
  """The forms of a mixture, by the name of its module and those of the matrices of an expert."""
  names = {"router": "gate", "gate": f"experts.{{}}.{gate}", "up": f"experts.{{}}.{up}", "down": f"experts.{{}}.{down}"}
  return {f"blocks/mlp/{ours}": (f"{LAYER}{name}.{theirs}.weight", (1,), (0,)) for ours, theirs in names.items()}


# Of families whose blocks have a mixture of experts.
EXPERTS = {
  "mixtral": _experts("block_sparse_moe", "w1", "w3", "w2"),
  "qwen3_moe": _experts("mlp", "gate_proj", "up_proj", "down_proj"),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a model folder.

  Attributes:
    weight: the name of the weight that it belongs to, such as "blocks/mlp/up".
    at: its place in the weight: its layer, and its expert. Outside the blocks it is the whole weight, at ().
    sizes: the shape of the weight at this place.
    groups: the dimensions of `sizes` that make its rows, and its columns; of a vector, only rows.
  """

  name: str
  weight: str
  at: tuple[int, ...]
  sizes: tuple[int, ...]
  groups: tuple[tuple[int, ...], ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(math.prod(self.sizes[at] for at in group) for group in self.groups)

  def part(self, index: Sequence[slice]) -> tuple[slice, ...]:
    """The rows and columns that hold a part of the weight at this place.

    Only the first dimension of a group may be split.
    """
    found = []
    for first, *rest in self.groups:
      start, stop, _ = index[first].indices(self.sizes[first])
      each = math.prod(self.sizes[at] for at in rest)
      assert all(index[at].indices(self.sizes[at])[:2] == (0, self.sizes[at]) for at in rest)
      found.append(slice(start * each, stop * each))
    return tuple(found)

  def to_weight(self, part: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Rows and columns as the part of the weight that they hold, which has this shape."""
    order = [at for group in self.groups for at in group]
    return part.reshape([shape[at] for at in order]).transpose(np.argsort(order))

  def of_weight(self, weight: np.ndarray) -> np.ndarray:
    """The tensor, of a whole weight."""
    return weight[self.at].transpose([at for group in self.groups for at in group]).reshape(self.shape)


@functools.cache
def tensors(sizes: ModelSizes) -> tuple[Tensor, ...]:
  """The tensors of a model: those outside the blocks, and those of each layer. Adapters are not among them.

  Those of a weight follow one another, in the order of their places.
  """
  params = nnx.to_pure_dict(definition(dataclasses.replace(sizes, lora=None))[1])
  forms = FORMS | EXPERTS.get(families.of(sizes), {})
  of = lambda weight: (forms if weight.startswith("blocks/") else FORMS)[weight.removeprefix("dense_")]
  return _made(sizes, params, of)


@functools.cache
def adapter_tensors(sizes: ModelSizes) -> tuple[Tensor, ...]:
  """The tensors of a model's adapters (models/lora.py), as the library PEFT names them."""

  def form(weight: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    *layer, _, target, side = weight.split("/")
    name, outputs, inputs = FORMS["/".join([*layer, target]).removeprefix("dense_")]
    name = "base_model.model." + name.removesuffix("weight") + f"lora_{side.upper()}.weight"
    # An `a` is [I..., R] and a `b` [R, O...]: R stands for the outputs, or for the inputs.
    if side == "a":
      return name, (len(inputs),), tuple(range(len(inputs)))
    return name, tuple(range(1, 1 + len(outputs))), (0,)

  return _made(sizes, trained(sizes, nnx.to_pure_dict(definition(sizes)[1])), form)


def _made(sizes: ModelSizes, params: dict[str, Any], form: Callable[[str], Form]) -> tuple[Tensor, ...]:
  """The tensors of these parameters. `form` returns the form of a weight (FORMS).

  A folder numbers all layers. Here the stack `blocks` begins after the dense ones.
  """
  made = []
  for path, param in jax.tree.leaves_with_path(params):
    weight = jax.tree_util.keystr(path, simple=True, separator="/")
    name, rows, columns = form(weight)
    stacked, groups = name.count("{}"), (rows, columns) if columns else (rows,)
    shape, first = tuple(param.shape[stacked:]), sizes.dense_layers if weight.startswith("blocks/") else 0
    for at in np.ndindex(*param.shape[:stacked]):
      made.append(Tensor(name.format(*[at[0] + first, *at[1:]] if at else []), weight, at, shape, groups))
  return tuple(made)
