"""ModelSizes: the checked sizes of a Transformer, made from a config.

What only some models have is a group of its own: experts, adapters, images.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from errors import ConfigError, above_zero, not_negative, one_of, positive
from models import windows
from models.expert_sizes import ExpertSizes
from models.inputs import INPUTS, Field, ImageSizes, Input, Shapes
from models.lora import LoraSizes, check_targets
from models.mixers import MIXERS, Mixer
from models.mlps import MLPS
from models.objectives import OBJECTIVES, Objective
from models.ops.context import WAYS
from models.ops.rotary import SCALINGS
from models.packings import PACKINGS, counts_parts
from models.remat import names_of
from models.stacks import Stacks

ATTENTION = ("auto", "plain", "blockwise", "cudnn", "splash")
REMAT = ("minimal", "dots", "full", "offload")  # from the one that keeps most on the device to the one that keeps least
UNROLL = ("scan", "all", "auto")  # how the blocks run: in a loop, or one after another in the program
PRODUCTS = ("dtype", "float8", "float8_gathers")  # how weights of blocks multiply (ops/float8.py)
WITH_BLOCKS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")  # formats that are not among them
DTYPES = ("float32", "bfloat16")  # float16 would need loss scaling
NORMS = ("before", "after", "both")  # where norms stand: before mixers and MLPs, or after what these return
NORMED = ("head", "width")  # what `qk_norm` normalizes over: each head, or all of them
# The fields that name one of several things.
KNOWN: dict[str, Collection[str]] = {
  "inputs": INPUTS, "objective": OBJECTIVES, "mixer": MIXERS, "mlp": MLPS, "attention": ATTENTION, "dtype": DTYPES,
  "attention_context": WAYS, "remat": REMAT, "param_dtype": DTYPES, "unroll": UNROLL, "products": PRODUCTS,
  "rope_scaling_kind": SCALINGS, "norms": NORMS, "qk_norm_over": NORMED,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelSizes(Stacks):
  """The sizes and options of a model. `configs/base.py` documents each field and holds the defaults."""

  inputs: str
  objective: str
  width: int
  depth: int
  mixer: str  # one of mixers.MIXERS
  mlp: str  # one of mlps.MLPS
  heads: int
  kv_heads: int
  head_dim: int  # 0 becomes width / heads
  mlp_width: int
  seq_len: int
  window: int  # 0: none (windows.py)
  layers_pattern: str  # the kinds of layers (windows.py); "": all are alike
  rope_base_local: float  # that of local layers; 0: rope_base
  vocab_size: int
  tied_embedding: bool
  dropout: float
  rope_base: float
  rope_scaling: tuple[float, ...]  # (factor, low, high, length) (rotary.frequencies), or () for none
  rope_scaling_kind: str  # one of rotary.SCALINGS
  embedding_scale: float  # of the rows of tokens
  attention_scale: float  # 0: 1 / the root of head_dim
  norms: str  # one of block.NORMS
  qkv_bias: bool
  out_bias: bool
  mlp_bias: bool  # of an MLP's products, or of those of experts and of their router
  attention_sinks: bool
  qk_norm: bool
  qk_norm_over: str  # one of NORMED
  norm_eps: float
  norm_offset: float  # what is added to the scales of norms
  attention: str
  attention_context: str  # one of ops.context.WAYS
  remat: str
  saved: str  # names (remat.py), with commas
  unroll: str  # one of UNROLL
  products: str  # one of PRODUCTS
  loss_chunk: int  # 0: automatic (ops/loss.py)
  dtype: str  # the dtype of activations, and of weights when used; master weights are stored in `param_dtype`
  param_dtype: str
  features: int
  classes: int
  outputs: int
  experts: ExpertSizes | None  # None: each block has an MLP
  lora: LoraSizes | None  # None: everything is trained
  images: ImageSizes | None  # None: the model reads tokens
  segments: bool  # whether a batch has the field `segments` (`example_shapes`)
  completions: bool  # whether a batch has the field `completions` (`example_shapes`)
  attention_why: str = dataclasses.field(default="", compare=False)  # why `attention` is not the platform's best
  local_way: str = "halo"  # how local layers read other devices' positions, if these share a text (context.of_local)
  context_why: str = dataclasses.field(default="", compare=False)  # why `attention_context` was chosen

  def __post_init__(self) -> None:
    object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))  # JSON makes a list of it
    if self.products.lower() in WITH_BLOCKS:
      raise ConfigError(
        f"model.products={self.products!r} has a scale for each block of numbers, which products here do not have; use "
        "'float8'"
      )
    for name, known in KNOWN.items():
      one_of(f"model.{name}", getattr(self, name), known)
    names_of(self.saved)
    for name in ("width", "depth", "heads", "kv_heads", "mlp_width", "seq_len"):
      positive(f"model.{name}", getattr(self, name))
    above_zero("model.rope_base", self.rope_base, "10000")
    not_negative("model.loss_chunk", self.loss_chunk, "use 0 to choose")
    above_zero("model.norm_eps", self.norm_eps, "1e-5")
    above_zero("model.embedding_scale", self.embedding_scale, "1.0")
    not_negative("model.attention_scale", self.attention_scale, "use 0 for the usual")
    numbers, wanted = self.rope_scaling, SCALINGS[self.rope_scaling_kind]
    if numbers and not (
      len(numbers) == len(wanted) and min(numbers) > 0 and (len(numbers) == 1 or numbers[1] < numbers[2])
    ):
      raise ConfigError(
        f"model.rope_scaling={numbers} with model.rope_scaling_kind={self.rope_scaling_kind!r} needs {len(wanted)} "
        f"numbers above 0: {', '.join(wanted)}, the third above the second; use (8.0, 1.0, 4.0, 8192) and 'llama3' for "
        "that of Llama 3.1, or () for none"
      )
    if not self.head_dim:
      if self.width % self.heads:
        raise ConfigError(
          f"model.heads={self.heads} does not divide model.width={self.width}; use heads that divide it, or set "
          "model.head_dim"
        )
      object.__setattr__(self, "head_dim", self.width // self.heads)
    if not 0 <= self.dropout < 1:
      raise ConfigError(f"model.dropout={self.dropout} must be at least 0 and below 1; use 0 for no dropout")
    positive("model.head_dim", self.head_dim)
    self.mixes.check(self)
    check_targets(self)
    self.reads.check()
    windows.check(self)
    self.predicts.check()

  @property
  def expert_limit(self) -> int:
    """How many tokens of an example an expert takes at most; 0: no limit."""
    if not self.experts:
      return 0
    equal = self.positions * self.experts.per_token / self.experts.count
    return min(math.ceil(self.experts.capacity * equal), self.positions)

  @property
  def hidden_width(self) -> int:
    """Hidden units of an MLP, or of each expert: the size of the dimension `mlp`."""
    return self.experts.width if self.experts else self.mlp_width

  @property
  def dense_width(self) -> int:
    """Hidden units of a block that work on every token: those of its MLP, or of its shared experts."""
    return self.experts.shared * self.experts.width if self.experts else self.mlp_width

  @property
  def reads(self) -> Input:
    """The `Input` that `model.inputs` names (inputs.py)."""
    return INPUTS[self.inputs](self)

  @property
  def predicts(self) -> Objective:
    """The `Objective` that `model.objective` names (objectives.py)."""
    return OBJECTIVES[self.objective](self)

  @property
  def mixes(self) -> type[Mixer]:
    """The `Mixer` that `model.mixer` names (mixers.py)."""
    return MIXERS[self.mixer]

  @property
  def sides(self) -> dict[str, int]:
    """For each of a block's weights that may have an adapter, the size of the side that is not the stream's.

    In a mixture, the MLP's sizes are those of the shared experts, and 0 without shared experts.
    """
    mixing, mlp = self.mixes.products(self), MLPS[self.mlp]
    sides = {name: mixing[name] // self.width for name in self.mixes.adapted}
    return sides | dict.fromkeys(mlp.adapted, self.dense_width)

  @property
  def positions(self) -> int:
    """Length of the sequence that the blocks see: tokens of a text, patches of an image."""
    return self.reads.positions()

  def example_shapes(self) -> Shapes:
    """The content of a batch: the fields that the input and the objective read, and two more if the model has them.

    A row of `segments` says to which document each token belongs: its documents are numbered 1, 2, ... in order, and 0
    is padding. Tokens of different documents do not see each other. A row of `completions` says which tokens belong to
    completions. Only the predictions of these tokens count.
    """
    shapes = self.reads.shapes(self.predicts.ahead) | self.predicts.shapes()
    length = self.positions + self.predicts.ahead
    if self.segments:
      shapes |= {"segments": Field((length,), np.int32, length + 1)}
    return shapes | {"completions": Field((length,), np.bool_, 2)} if self.completions else shapes

  def shardable(self) -> list[tuple[str, str, int]]:
    """(logical dimension, config field, size) for every size that a layout may split."""
    first = self.first_layers
    found = [
      ("embed", "model.width", self.width),
      *(("heads", f"model.{name}", getattr(self, name)) for name in self.mixes.heads),
      *(("mlp", f"model.{'expert' if c.experts else 'mlp'}_width", c.hidden_width) for _, c, *_ in self.stacks),
      ("layers", "model.depth" + " - model.dense_layers" * bool(first), self.depth - first),
    ]
    if self.experts:
      found.append(("experts", "model.experts", self.experts.count))
    has_vocab = "vocab" in (*self.reads.embedding()[1], *self.predicts.head()[1])
    return [*found, ("vocab", "model.vocab_size", self.vocab_size)] if has_vocab else found


def replaced(config: ConfigDict, section: str, fields: dict[str, Any]) -> ConfigDict:
  """The config with other values for some fields of a section. Leaves the given config as it is.

  ConfigDict cannot copy itself if `data.path` is a dict, because its keys, names of files, have dots.
  """
  sections = dict(config.items()) | {section: ConfigDict(dict(config[section].items()) | fields, convert_dict=False)}
  return ConfigDict(sections, convert_dict=False)


def with_sizes_made_up(config: ConfigDict) -> ConfigDict:
  """The config with made-up values for sizes that only the data can give. It serves to check all other fields."""
  model = config.model
  channels = len(model.pixel_mean or model.pixel_std) or 1
  sizes = {"image_size": model.patch_size, "channels": channels, "classes": 2, "vocab_size": 2}
  sizes |= {"features": 1, "outputs": 1}
  return replaced(config, "model", {name: size for name, size in sizes.items() if not model[name]})


def sizes_of(model: Mapping[str, Any], **fields: Any) -> ModelSizes:
  """The ModelSizes of a config's section `model`; `fields` are those that the section does not have."""
  groups: dict[str, Any] = {"experts": ExpertSizes, "lora": LoraSizes, "images": ImageSizes}
  plain = {field.name for field in dataclasses.fields(ModelSizes)} - groups.keys()
  made = {name: group.of(model) for name, group in groups.items()}
  return ModelSizes(**{name: model[name] for name in plain & model.keys()}, **made, **fields)


def model_sizes(config: ConfigDict, platform: str = "cpu") -> ModelSizes:
  """The ModelSizes of a config. `attention` stays as in the config, until `models.ops.attention.choose` decides it.

  Args:
    platform: "cpu", "gpu" or "tpu", for the dtype `auto`.
  """
  model = dict(config.model)
  one_of("model.dtype", model["dtype"], ("auto", *DTYPES))
  if model["dtype"] == "auto":
    model["dtype"] = "float32" if platform == "cpu" else "bfloat16"
  documents = one_of("data.packing", config.data.packing, PACKINGS) == "documents"
  padded = model["inputs"] == "tokens" and model["objective"] != "next_token"  # texts shorter than seq_len
  checked = sizes_of(model, segments=documents or padded, completions=counts_parts(config))
  for name in ("messages_field", "prompt_field"):
    given = f"data.{name}={config.data[name]!r}"
    if config.data[name] and model["objective"] != "next_token":
      raise ConfigError(
        f"{given} needs model.objective='next_token', but model.objective={checked.objective!r}; leave data.{name} "
        "empty"
      )
    if config.data[name] and not documents:
      raise ConfigError(
        f"{given} needs data.packing='documents', because data.packing={config.data.packing!r} would separate "
        "completions from their prompts; use 'documents'"
      )
  if documents and model["objective"] != "next_token":
    raise ConfigError(
      "data.packing='documents' needs model.objective='next_token', but model.objective="
      f"{checked.objective!r}; use data.packing='windows'"
    )
  return checked
