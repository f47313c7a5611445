"""The families of models that are read and written, and what their config.json says: the fields of `config.model`.

All are decoders with rotary positions, RMSNorm and a gated MLP or a mixture of experts. They differ in biases, in the
norms of queries and keys, in their defaults, and in how experts are weighed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import limits
from checkpointing.pretrained import windows
from checkpointing.pretrained.windows import Windows
from errors import ConfigError, one_of, shown
from models.expert_sizes import EXPERT_FIELDS
from models.sizes import ModelSizes

REQUIRED = {
  "hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads",
  "intermediate_size": "mlp_width", "vocab_size": "vocab_size",
}  # fmt: skip
# What any other value would change, and the model cannot do.
FIXED = {
  "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None, "auto_map": None,
  "rope_interleaved": False, "is_encoder_decoder": False, "add_cross_attention": False, "use_mrope": False,
  "router_jitter_noise": 0.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
READ = {
  *REQUIRED, *FIXED, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
  "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types",
  "max_window_layers",
}  # fmt: skip
READ_OF_EXPERTS = {"num_local_experts", "norm_topk_prob", "router_aux_loss_coef", "output_router_logits"}
# What does not change what the model computes.
IGNORED = {
  "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
  "attention_dropout", "pretraining_tp", "max_position_embeddings", "is_llama_config", "transformers.js_config",
  "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id",
  "problem_type", "attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
}  # fmt: skip
# What the models of some well-known families compute, and this model cannot.
REFUSED = {
  "deepseek_v2": "multi-head latent attention", "deepseek_v3": "multi-head latent attention",
  "olmoe": "norms over all heads of queries and keys", "qwen2_moe": "a gate for the shared expert",
}  # fmt: skip
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# What fields hold that may be absent: the type, the smallest value, and both in words. A COUNT or a FLAG may be null.
NUMBER, MOST = (int, float), 1e30
COUNT, FLAG = (int, 1, "a positive number"), (bool, False, "true or false")
TYPES: dict[str, tuple[Any, int, str]] = {
  **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings"), COUNT),
  "max_window_layers": (int, 0, "a number of layers"),
  **dict.fromkeys(("rms_norm_eps", "rope_theta", "router_aux_loss_coef"), (NUMBER, 0, "a number")),
  **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "norm_topk_prob"), FLAG),
}


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    architecture: the class in the library transformers.
    qkv_bias, qk_norm: fields of the model, the same in all models of the family.
    experts: what a config.json calls the fields of experts; {} if the family has none.
    routers: how experts are weighed, if the family has any: without norm_topk_prob, and with it.
    dense_layers: whether layers may have an MLP instead of experts (`mlp_only_layers`).
    windows: how its models may have windows; None if they have none.
    defaults: what a config.json means that leaves a field out; None for a value that follows from others.
  """

  architecture: str
  qkv_bias: bool = False
  qk_norm: bool = False
  experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  routers: tuple[str, ...] = ()
  dense_layers: bool = False
  windows: Windows | None = None
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


DEFAULTS = {
  "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
  "rope_theta": 10_000.0, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
BY_LAYER = Windows(default=4096, switch=True, first=28)
FAMILIES = {
  "llama": Family("LlamaForCausalLM"),
  "mistral": Family("MistralForCausalLM", windows=Windows(default=4096), defaults={"num_key_value_heads": 8}),
  "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows=BY_LAYER, defaults={"num_key_value_heads": 32}),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    qk_norm=True,
    windows=BY_LAYER,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
  ),
  "mixtral": Family(
    "MixtralForCausalLM",
    experts={
      "num_local_experts": "experts", "num_experts_per_tok": "experts_per_token", "intermediate_size": "expert_width",
    },
    routers=("softmax_topk",),
    windows=Windows(),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    qk_norm=True,
    experts={
      "num_experts": "experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "expert_width",
    },
    routers=("topk_softmax", "softmax_topk"),
    dense_layers=True,
    windows=Windows(default=4096, switch=True),
    defaults={"num_key_value_heads": 4},
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
  """What a config.json says.

  Attributes:
    family: a key of FAMILIES.
    fields: of `config.model`.
    context: how many tokens a text has at most; 0 if the file does not say.
  """

  family: str
  fields: dict[str, Any]
  context: int


def read(given: dict[str, Any], where: str) -> Shape:
  """What the content of a config.json means. Raises ConfigError, naming `where`, for what the model cannot compute."""
  name = str(given.get("model_type"))
  if name in REFUSED:
    raise ConfigError(f"{where} names {name}, a family with {REFUSED[name]}, which is not supported; use another model")
  family = FAMILIES[one_of(f"model_type in {where}", name, FAMILIES)]
  known, required = READ | IGNORED, {**REQUIRED, **family.experts}
  if family.experts:
    known |= {*family.experts, *READ_OF_EXPERTS}
  if "num_experts" in family.experts:  # newer files call it num_local_experts
    given = {"num_experts": given.get("num_local_experts"), **given}
  dense = (given.get("mlp_only_layers") or []) if family.dense_layers else []
  for key, value in given.items():
    if key in FIXED and not (dense and key == "mlp_only_layers") and value not in (FIXED[key], None):
      raise ConfigError(f"{where} has {key}={shown(value)}, which this model cannot compute; use a model without it")
    if key not in known and not key.endswith(("_token_id", "name_or_path")):
      raise ConfigError(
        f"{where} has the field {key!r}, which is not known here; remove it if the model computes the same without it"
      )
  for key in required:
    if given.get(key) is None:
      raise ConfigError(f"{where} has {key}=None, and needs a positive number; copy the file again")
  for key, form in {**dict.fromkeys(required, COUNT), **TYPES}.items():
    types, least, what = form
    value = given.get(key, least)
    fits = isinstance(value, types) and (form is FLAG or not isinstance(value, bool))
    fits = fits and least <= value < (math.inf if types is NUMBER else 1 << 31)
    if not fits and (value is not None or form not in (COUNT, FLAG)):
      raise ConfigError(f"{where} has {key}={value!r}, and needs {what}; copy the file again")
  count = given["num_hidden_layers"] * (
    12 + 3 * (next((given[k] for k, ours in family.experts.items() if ours == "experts"), 0))
  )
  if count > limits.TENSORS:
    raise ConfigError(
      f"{where} has num_hidden_layers={given['num_hidden_layers']}, which makes {count:,} tensors, more than the limit "
      f"of {limits.TENSORS:,}; copy the file again"
    )
  if not isinstance(dense, list) or dense != [*range(min(len(dense), given["num_hidden_layers"] - 1))]:
    raise ConfigError(
      f"{where} has mlp_only_layers={dense!r}, but only the first layers may be dense, and not all; use another model"
    )
  get = lambda key: {**DEFAULTS, **family.defaults, **given}[key]
  for key in ("rope_scaling", "rope_parameters"):
    if not isinstance(given.get(key) or {}, dict):
      raise ConfigError(f"{where} has {key}={given[key]!r}, and needs its fields; copy the file again")
  rope = (given.get("rope_parameters") or {}) | (given.get("rope_scaling") or {})
  theta = rope.get("rope_theta", get("rope_theta"))
  if not isinstance(theta, NUMBER) or isinstance(theta, bool) or not 0 < theta < MOST:
    raise ConfigError(f"{where} has rope_theta={shown(theta)}, and needs a number; copy the file again")
  fields = {
    **{ours: given[theirs] for theirs, ours in REQUIRED.items()},
    "inputs": "tokens",
    "objective": "next_token",
    "mixer": "attention",
    "mlp": "swiglu",
    "kv_heads": get("num_key_value_heads") or given["num_attention_heads"],
    "head_dim": get("head_dim") or 0,
    "tied_embedding": bool(get("tie_word_embeddings")),
    "norm_eps": float(get("rms_norm_eps")),
    "rope_base": float(theta),
    "rope_scaling": _scaling(rope, where),
    "qkv_bias": family.qkv_bias,
    "qk_norm": family.qk_norm,
    **windows.read(family.windows, given, where),
    "experts": 0,
    "dense_layers": len(dense),
    **{ours: given[theirs] for theirs, ours in family.experts.items()},
    "shared_experts": 0,
  }
  if family.experts:
    fields |= {
      "router": family.routers[bool(get("norm_topk_prob")) and len(family.routers) > 1],
      "router_scale": 1.0,
      "router_aux": get("router_aux_loss_coef") / _aux_unit(fields),
    }
  return Shape(name, fields, context=given.get("max_position_embeddings") or 0)


def _aux_unit(fields: Mapping[str, Any]) -> float:
  """Our weight of the balance loss is this part of router_aux_loss_coef.

  The library's loss is that of all blocks with experts together, and is experts_per_token if all experts have equal
  loads. Ours is 1 in each of these blocks.
  """
  return (fields["depth"] - fields["dense_layers"]) / fields["experts_per_token"]


def _scaling(rope: dict[str, Any], where: str) -> tuple[float, ...]:
  kind = rope.get("rope_type", rope.get("type", "default"))
  wanted = LLAMA3 if kind == "llama3" else ()
  others = {key for key in rope if key not in (*wanted, "rope_theta", "rope_type", "type")}
  others -= {"partial_rotary_factor"} if rope.get("partial_rotary_factor") in (1, None) else set()
  is_known = kind in ("llama3", "default") and not others
  if not is_known or not all(isinstance(rope.get(key), NUMBER) and abs(rope[key]) < MOST for key in wanted):
    raise ConfigError(
      f"{where} scales rotary positions by {shown(rope)}; only 'llama3' with {', '.join(LLAMA3)} is known: use a model "
      "with that, or with none"
    )
  return tuple(float(rope[key]) for key in wanted)


def of(sizes: ModelSizes) -> str:
  """The family of a model. Raises ConfigError for one of none."""
  if (sizes.mixer, sizes.mlp) != ("attention", "swiglu"):
    raise ConfigError(
      f"model.mixer={sizes.mixer!r} with model.mlp={sizes.mlp!r} is no known family; use "
      "model.mixer='attention' and model.mlp='swiglu'"
    )
  if sizes.qkv_bias and sizes.qk_norm:
    raise ConfigError("model.qkv_bias=True with model.qk_norm=True is no known family; use one of them")
  norms_and_biases, experts = (sizes.qkv_bias, sizes.qk_norm), sizes.experts
  fitting = [
    name
    for name, family in FAMILIES.items()
    if (family.qkv_bias, family.qk_norm) == norms_and_biases
    and bool(family.experts) == bool(experts)
    and (not experts or experts.router in family.routers)
  ]
  if not fitting:
    of_experts = f"model.experts={experts.count} and model.router={experts.router!r}" if experts else "model.experts=0"
    raise ConfigError(
      f"{of_experts} with model.qk_norm={sizes.qk_norm} and "
      f"model.qkv_bias={sizes.qkv_bias} is no known family; use model.router='softmax_topk' without biases"
    )
  fitting = [name for name in fitting if FAMILIES[name].dense_layers or not sizes.dense_layers]
  if not fitting:
    raise ConfigError(
      f"model.dense_layers={sizes.dense_layers} with model.qk_norm={sizes.qk_norm} is no known family; use "
      "model.qk_norm=True, as Qwen3-MoE has, or model.dense_layers=0"
    )
  fitting = [name for name in fitting if _has_window(FAMILIES[name].windows, sizes)]
  if not fitting:
    raise ConfigError(
      f"model.window={sizes.window} with model.layers_pattern={sizes.layers_pattern!r} is no known family; use "
      "model.layers_pattern='', or one without experts and with model.qkv_bias=True or model.qk_norm=True, as Qwen has"
    )
  if experts and (experts.shared or experts.router_scale != 1):
    raise ConfigError(
      f"model.shared_experts={experts.shared} with model.router_scale={experts.router_scale} is no known family; use 0 "
      "and 1.0"
    )
  # Llama's classes refuse a width that heads do not divide, even if head_dim is given.
  return fitting[-1] if sizes.width % sizes.heads else fitting[0]


def _has_window(family: Windows | None, sizes: ModelSizes) -> bool:
  """Whether models of a family, with such windows, may have that of the sizes."""
  return not sizes.window or (family is not None and (family.first is not None or not sizes.layers_pattern))


def write(sizes: ModelSizes, dtype: str, end: int | None, context: int = 0) -> dict[str, Any]:
  """The config.json of a model. Raises ConfigError for one that is none of a family.

  Args:
    dtype: in which the weights are written.
    end: the id of the token that ends a text.
    context: how many tokens a text has at most, if more than the model's seq_len.
  """
  if (sizes.inputs, sizes.objective) != ("tokens", "next_token"):
    raise ConfigError(
      f"model.inputs={sizes.inputs!r} with model.objective={sizes.objective!r} is no language model; only those that "
      "predict the next token have this form"
    )
  name = of(sizes)
  family = FAMILIES[name]
  scaling = None
  if sizes.rope_scaling:
    *factors, length = sizes.rope_scaling  # the length counts tokens: transformers wants a whole number
    scaling = {"rope_type": "llama3", **dict(zip(LLAMA3, (*factors, round(length)), strict=True))}
  mixture: dict[str, Any] = {}
  if experts := sizes.experts:
    fields = {name: getattr(experts, ours) for ours, name in EXPERT_FIELDS.items()}
    mixture = {theirs: fields[name] for theirs, name in family.experts.items()}
    unit = _aux_unit(fields | {"depth": sizes.depth})
    mixture["router_aux_loss_coef"] = float(f"{experts.router_aux * unit:.12g}")
    if len(family.routers) > 1:
      mixture["norm_topk_prob"] = experts.router == family.routers[1]
    if experts.dense_layers:
      mixture["mlp_only_layers"] = [*range(experts.dense_layers)]
  return {
    "architectures": [family.architecture],
    "model_type": name,
    **{theirs: getattr(sizes, ours) for theirs, ours in REQUIRED.items()},
    "num_key_value_heads": sizes.kv_heads,
    "head_dim": sizes.head_dim,
    "hidden_act": "silu",
    "tie_word_embeddings": sizes.tied_embedding,
    "rms_norm_eps": sizes.norm_eps,
    "rope_theta": sizes.rope_base,
    "rope_scaling": scaling,
    "max_position_embeddings": max(context, sizes.seq_len),
    **windows.write(family.windows, sizes.window, sizes.layers_pattern, sizes.depth),
    **mixture,
    "bos_token_id": None,
    "eos_token_id": end,
    "torch_dtype": dtype,
  }
