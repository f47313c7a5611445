"""Which tensor of a model folder is which weight, and how its rows and columns are arranged here.

A folder has a tensor for each layer: a matrix [outputs, inputs] or a vector. Of experts it has one for each layer and
expert, but for gpt-oss, which has one of all experts, in which gate and up take turns. Here layers and experts are
stacked, and heads are a dimension of their own: `query` is [layers, width, heads, head_dim], and in a folder
[heads · head_dim, width].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from checkpointing.pretrained import families
from models.parameters import definition, trained
from models.sizes import ModelSizes
from models.stacks import STACKS

Form = tuple[Any, ...]  # a name and groups of dimensions, for each dimension of a tensor one
LAYER = "model.layers.{}."
# For each weight the name of its tensors, with a place for each number of `Tensor.at`, and which of the dimensions that
# a weight has there make its rows and columns.
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
  "blocks/attention/sinks": (LAYER + "self_attn.sinks", (0,), ()),
  "blocks/attention/out_bias": (LAYER + "self_attn.o_proj.bias", (0,), ()),
  "blocks/attention/out": (LAYER + "self_attn.o_proj.weight", (2,), (0, 1)),
  "blocks/mlp_norm/scale": (LAYER + "post_attention_layernorm.weight", (0,), ()),
  "blocks/mlp/gate": (LAYER + "mlp.gate_proj.weight", (1,), (0,)),
  "blocks/mlp/up": (LAYER + "mlp.up_proj.weight", (1,), (0,)),
  "blocks/mlp/down": (LAYER + "mlp.down_proj.weight", (1,), (0,)),
  "norm/scale": ("model.norm.weight", (0,), ()),
  "head": ("lm_head.weight", (1,), (0,)),
}


# Of families that also normalize what mixers and MLPs return; with a norm before the MLP, that has another name.
AFTER: dict[str, Form] = {
  "blocks/attention_norm_after/scale": (LAYER + "post_attention_layernorm.weight", (0,), ()),
  "blocks/mlp_norm/scale": (LAYER + "pre_feedforward_layernorm.weight", (0,), ()),
  "blocks/mlp_norm_after/scale": (LAYER + "post_feedforward_layernorm.weight", (0,), ()),
}
# Of families whose norms of queries and keys are over all heads.
OVER_WIDTH: dict[str, Form] = {
  f"blocks/attention/{name}_norm/scale": (LAYER + f"self_attn.{name[0]}_norm.weight", (0, 1), ())
  for name in ("query", "key")
}


def _experts(name: str, gate: str, up: str, down: str) -> dict[str, Form]:
  """The forms of a mixture, by the name of its module and those of the matrices of an expert."""
  names = {"router": "gate", "gate": f"experts.{{}}.{gate}", "up": f"experts.{{}}.{up}", "down": f"experts.{{}}.{down}"}
  return {f"blocks/mlp/{ours}": (f"{LAYER}{name}.{theirs}.weight", (1,), (0,)) for ours, theirs in names.items()}


OF_ALL_EXPERTS: dict[str, Form] = {
  "blocks/mlp/router": (LAYER + "mlp.router.weight", (1,), (0,)),
  "blocks/mlp/router_bias": (LAYER + "mlp.router.bias", (0,)),
  "blocks/mlp/gate": (LAYER + "mlp.experts.gate_up_proj", (0,), (1,), (2,)),
  "blocks/mlp/up": (LAYER + "mlp.experts.gate_up_proj", (0,), (1,), (2,)),
  "blocks/mlp/down": (LAYER + "mlp.experts.down_proj", (0,), (1,), (2,)),
  "blocks/mlp/gate_bias": (LAYER + "mlp.experts.gate_up_proj_bias", (0,), (1,)),
  "blocks/mlp/up_bias": (LAYER + "mlp.experts.gate_up_proj_bias", (0,), (1,)),
  "blocks/mlp/down_bias": (LAYER + "mlp.experts.down_proj_bias", (0,), (1,)),
}
# Two weights that take turns in the last dimension of a tensor, by the name of the weight: its number among them.
TURNS = {"gate": 0, "up": 1, "gate_bias": 0, "up_bias": 1}
# Of families whose blocks have a mixture of experts.
EXPERTS = {
  "gpt_oss": OF_ALL_EXPERTS,
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
    turn, turns: of the columns, this weight has the number `turn` of each so many (TURNS).
  """

  name: str
  weight: str
  at: tuple[int, ...]
  sizes: tuple[int, ...]
  groups: tuple[tuple[int, ...], ...]
  turn: int = 0
  turns: int = 1

  @property
  def shape(self) -> tuple[int, ...]:
    *first, last = (math.prod(self.sizes[at] for at in group) for group in self.groups)
    return *first, last * self.turns

  def part(self, index: Sequence[slice]) -> tuple[slice, ...]:
    """The rows and columns that hold a part of the weight at this place, with those of others that take turns.

    Only the first dimension of a group may be split.
    """
    found = []
    for first, *rest in self.groups:
      start, stop, _ = index[first].indices(self.sizes[first])
      each = math.prod(self.sizes[at] for at in rest)
      assert all(index[at].indices(self.sizes[at])[:2] == (0, self.sizes[at]) for at in rest)
      found.append(slice(start * each, stop * each))
    last = found[-1]
    return *found[:-1], slice(last.start * self.turns, last.stop * self.turns)

  def own(self, part: np.ndarray) -> np.ndarray:
    """The columns of this weight, of some of the tensor."""
    return part[..., self.turn :: self.turns]

  def to_weight(self, part: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Rows and columns as the part of the weight that they hold, which has this shape."""
    order = [at for group in self.groups for at in group]
    return part.reshape([shape[at] for at in order]).transpose(np.argsort(order))

  def of_weight(self, weight: np.ndarray) -> np.ndarray:
    """The tensor, of a whole weight; without what others have of it."""
    shape = *self.shape[:-1], self.shape[-1] // self.turns
    return weight[self.at].transpose([at for group in self.groups for at in group]).reshape(shape)


def by_name(every: Iterable[Tensor]) -> dict[str, list[Tensor]]:
  """The weights that each tensor of a folder holds, in turn."""
  found: dict[str, list[Tensor]] = {}
  for tensor in every:
    found.setdefault(tensor.name, []).append(tensor)
  return {name: sorted(own, key=lambda tensor: tensor.turn) for name, own in found.items()}


def whole(own: Sequence[Tensor], weight: Callable[[str], np.ndarray]) -> np.ndarray:
  """A tensor of a folder, of the weights that it holds. `weight` returns a weight by its name."""
  parts = [tensor.of_weight(weight(tensor.weight)) for tensor in own]
  return parts[0] if len(parts) == 1 else np.stack(parts, axis=-1).reshape(own[0].shape)


@functools.cache
def tensors(sizes: ModelSizes) -> tuple[Tensor, ...]:
  """The tensors of a model: those outside the blocks, and those of each layer. Adapters are not among them.

  Those of a weight follow one another, in the order of their places.
  """
  params = nnx.to_pure_dict(definition(dataclasses.replace(sizes, lora=None))[1])
  family = families.of(sizes)
  forms = FORMS | EXPERTS.get(family, {})
  if sizes.norms != "before":
    forms |= AFTER
  if sizes.qk_norm_over == "width":
    forms |= OVER_WIDTH
  of = lambda weight: (forms if weight.startswith("blocks/") else FORMS)[weight.removeprefix("dense_")]
  return _made(sizes, params, of)


@functools.cache
def adapter_tensors(sizes: ModelSizes) -> tuple[Tensor, ...]:
  """The tensors of a model's adapters (models/lora.py), as the library PEFT names them."""

  def form(weight: str) -> Form:
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

  A folder numbers the layers of all stacks together.
  """
  made = []
  layers = {name: [i for i, kind in enumerate(sizes.kinds) if kind.stack == name] for name in STACKS}
  for path, param in jax.tree.leaves_with_path(params):
    weight = jax.tree_util.keystr(path, simple=True, separator="/")
    name, *given = form(weight)
    stacked, groups = name.count("{}"), tuple(group for group in given if group)
    turns = {"turn": TURNS[weight.split("/")[-1]], "turns": 2} if "gate_up" in name else {}
    shape, numbers = tuple(param.shape[stacked:]), layers.get(weight.split("/")[0], [])
    for at in np.ndindex(*param.shape[:stacked]):
      made.append(Tensor(name.format(*[numbers[at[0]], *at[1:]] if at else []), weight, at, shape, groups, **turns))
  return tuple(made)
