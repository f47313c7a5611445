"""What a config.json says: the family of a model (registry.py), and the fields of `config.model`. And the way back."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import limits
from checkpointing.pretrained import rotary, windows
from checkpointing.pretrained.registry import DEFAULTS, FAMILIES, PLAIN
from checkpointing.pretrained.windows import Windows
from errors import ConfigError, shown
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
DENSE = ("mlp_only_layers", "decoder_sparse_step")  # which layers of a mixture have no experts
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
  "olmoe": "norms over all heads of queries and keys in a mixture",
  "gemma3": "an encoder of images", "qwen2_moe": "a gate for the shared expert",
}  # fmt: skip
# What fields hold that may be absent: the type, the smallest value, and both in words. A COUNT or a FLAG may be null.
NUMBER = (int, float)
COUNT, FLAG = (int, 1, "a positive number"), (bool, False, "true or false")
TYPES: dict[str, tuple[Any, int, str]] = {
  **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings"), COUNT),
  "decoder_sparse_step": COUNT,
  "max_window_layers": (int, 0, "a number of layers"),
  **dict.fromkeys(("rms_norm_eps", "rope_theta", "router_aux_loss_coef"), (NUMBER, 0, "a number")),
  "query_pre_attn_scalar": (NUMBER, 1, "a number of at least 1"),
  **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "norm_topk_prob"), FLAG),
}


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
  if name not in FAMILIES:  # a family with a similar name is another model, so none is suggested
    raise ConfigError(
      f"model_type in {where}={name!r} does not exist here; use a model of {', '.join(sorted(FAMILIES))}"
    )
  family = FAMILIES[name]
  known, required, fixed = READ | IGNORED | {*family.known}, {**REQUIRED, **family.experts}, {**FIXED, **family.fixed}
  if family.experts:
    known |= {*family.experts, *READ_OF_EXPERTS}
  if "num_experts" in family.experts:  # newer files call it num_local_experts
    given = {"num_experts": given.get("num_local_experts"), **given}
  dense, every = list[int](), 1
  if family.dense_layers:
    known |= {*DENSE}
    fixed = {key: value for key, value in fixed.items() if key not in DENSE}
    dense, every = given.get(DENSE[0]) or [], given.get(DENSE[1]) or 1
  if family.packed and (given.get("quantization_config") or {}).get("quant_method") == "mxfp4":
    fixed["quantization_config"] = given["quantization_config"]
  for key, value in given.items():
    if key in fixed and value not in (fixed[key], None):
      raise ConfigError(f"{where} has {key}={shown(value)}, which this model cannot compute; use a model without it")
    if key not in known and key not in fixed and not key.endswith(("_token_id", "name_or_path")):
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
  is_first = isinstance(dense, list) and dense == [*range(len(dense))]
  if not is_first or len(dense) // every == given["num_hidden_layers"] // every:
    raise ConfigError(
      f"{where} has mlp_only_layers={dense!r} with decoder_sparse_step={every}, but only the first layers may be "
      "dense, and not all; use another model"
    )
  get = lambda key: {**DEFAULTS, **family.defaults, **given}[key]
  fields = {
    **{ours: given[theirs] for theirs, ours in REQUIRED.items()},
    "inputs": "tokens",
    "objective": "next_token",
    "mixer": "attention",
    **family.of_model(),
    "kv_heads": get("num_key_value_heads") or given["num_attention_heads"],
    "head_dim": get("head_dim") or 0,
    "tied_embedding": bool(get("tie_word_embeddings")),
    "norm_eps": float(get("rms_norm_eps")),
    "embedding_scale": given["hidden_size"] ** 0.5 if family.scales_embedding else 1.0,
    "attention_scale": _attention_scale(given, get),
    **rotary.read(given, get("rope_theta"), family.local_theta, family.rope_scaling, where),
    **windows.read(family.windows, given, where),
    "experts": 0,
    "dense_layers": len(dense),
    "experts_every": every,
    **{ours: given[theirs] for theirs, ours in family.experts.items()},
    "shared_experts": 0,
  }
  if family.experts:
    fields |= {
      "router": family.routers[bool(get("norm_topk_prob")) and len(family.routers) > 1],
      "router_scale": 1.0,
      "router_aux": get("router_aux_loss_coef") / _aux_unit(fields),
    }
  if not fields["window"]:
    fields["rope_base_local"] = 0.0
  return Shape(name, fields, context=given.get("max_position_embeddings") or 0)


def _attention_scale(given: Mapping[str, Any], get: Callable[[str], Any]) -> float:
  """What scores are multiplied by, if it is not the usual: 0."""
  scalar, usual = get("query_pre_attn_scalar"), get("head_dim") or given["hidden_size"] / given["num_attention_heads"]
  return 0.0 if scalar in (None, usual) else scalar**-0.5


def _aux_unit(fields: Mapping[str, Any]) -> float:
  """Our weight of the balance loss is this part of router_aux_loss_coef.

  The library's loss is that of all blocks with experts together, and is experts_per_token if all experts have equal
  loads. Ours is 1 in each of these blocks.
  """
  of_first = lambda layers: layers // fields["experts_every"]
  return (of_first(fields["depth"]) - of_first(fields["dense_layers"])) / fields["experts_per_token"]


def of(sizes: ModelSizes) -> str:
  """The family of a model. Raises ConfigError for one of none."""
  if sizes.mixer != "attention":
    raise ConfigError(f"model.mixer={sizes.mixer!r} is no known family; use model.mixer='attention'")
  own, experts = {name: getattr(sizes, name) for name in PLAIN}, sizes.experts
  if not own["qk_norm"]:
    own["qk_norm_over"] = PLAIN["qk_norm_over"]
  is_scaled = sizes.embedding_scale != 1
  fitting = [
    name
    for name, family in FAMILIES.items()
    if family.of_model() == own and family.scales_embedding == is_scaled
    and ("query_pre_attn_scalar" in family.known or not sizes.attention_scale)
  ]  # fmt: skip
  if not fitting or (is_scaled and not math.isclose(sizes.embedding_scale, sizes.width**0.5, rel_tol=1e-6)):
    said = own | {"embedding_scale": sizes.embedding_scale, "attention_scale": sizes.attention_scale}
    others = ", ".join(f"model.{name}={value!r}" for name, value in said.items() if value != PLAIN.get(name, 0))
    raise ConfigError(f"a model with {others} is of no known family; use the fields of one (docs/pretrained.md)")
  fitting = [
    name
    for name in fitting
    if bool(FAMILIES[name].experts) == bool(experts) and (not experts or experts.router in FAMILIES[name].routers)
  ]
  if not fitting:
    of_experts = f"model.experts={experts.count} and model.router={experts.router!r}" if experts else "model.experts=0"
    raise ConfigError(
      f"{of_experts} with model.qk_norm={sizes.qk_norm} and "
      f"model.qkv_bias={sizes.qkv_bias} is no known family; use model.router='softmax_topk' without biases"
    )
  fitting = [name for name in fitting if FAMILIES[name].dense_layers or len(sizes.stacks) == 1]
  if not fitting and experts:
    raise ConfigError(
      f"model.dense_layers={experts.dense_layers} and model.experts_every={experts.every} with "
      f"model.qk_norm={sizes.qk_norm} are no known family; use model.qk_norm=True, as Qwen3-MoE has, or "
      "model.dense_layers=0 and model.experts_every=1"
    )
  fitting = [name for name in fitting if _has_window(FAMILIES[name].windows, sizes)]
  if not fitting:
    raise ConfigError(
      f"model.window={sizes.window} with model.layers_pattern={sizes.layers_pattern!r} is no known family; use "
      "model.layers_pattern='', or one without experts and with model.qkv_bias=True or model.qk_norm=True, as Qwen has"
    )
  fitting = [name for name in fitting if rotary.fits(sizes, FAMILIES[name].local_theta)]
  if not fitting:
    raise ConfigError(
      f"model.rope_base_local={sizes.rope_base_local} with model.rope_base={sizes.rope_base} and "
      f"model.rope_scaling={sizes.rope_scaling} is no known family; use model.rope_base_local=0, or the other fields "
      "of Gemma 3, whose local layers have a base of their own"
    )
  if experts and (experts.shared or experts.router_scale != 1):
    raise ConfigError(
      f"model.shared_experts={experts.shared} with model.router_scale={experts.router_scale} is no known family; use 0 "
      "and 1.0"
    )
  # Llama's classes refuse a width that heads do not divide, even if head_dim is given.
  return fitting[-1] if sizes.width % sizes.heads else fitting[0]


def _has_window(family: Windows | None, sizes: ModelSizes) -> bool:
  """Whether models of a family, with such windows, may have the kinds of layers of the sizes."""
  if "nope" in sizes.layers_pattern or (family and family.nope):
    return bool(family and family.nope) and "nope" in sizes.layers_pattern and not sizes.window
  if family and family.period:
    return sizes.window > 0
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
  scalar = round((sizes.attention_scale or sizes.head_dim**-0.5) ** -2)
  mixture: dict[str, Any] = {}
  if experts := sizes.experts:
    fields = {name: getattr(experts, ours) for ours, name in EXPERT_FIELDS.items()}
    mixture = {theirs: fields[name] for theirs, name in family.experts.items()}
    unit = _aux_unit(fields | {"depth": sizes.depth})
    mixture["router_aux_loss_coef"] = float(f"{experts.router_aux * unit:.12g}")
    if len(family.routers) > 1:
      mixture["norm_topk_prob"] = experts.router == family.routers[1]
    if family.dense_layers:
      without = zip(DENSE, ([*range(experts.dense_layers)], experts.every), strict=True)
      mixture |= {key: value for key, value in without if value != FIXED[key]}
  return {
    "architectures": [family.architecture],
    "model_type": name,
    **{theirs: getattr(sizes, ours) for theirs, ours in REQUIRED.items()},
    "num_key_value_heads": sizes.kv_heads,
    "head_dim": sizes.head_dim,
    **{name: value for name, value in {"hidden_act": "silu", **family.fixed}.items() if value is not None},
    "tie_word_embeddings": sizes.tied_embedding,
    "rms_norm_eps": sizes.norm_eps,
    **rotary.write(sizes, family.local_theta, family.rope_scaling),
    **({"query_pre_attn_scalar": scalar} if "query_pre_attn_scalar" in family.known else {}),
    "max_position_embeddings": max(context, sizes.seq_len),
    **windows.write(family.windows, sizes.window, sizes.layers_pattern, sizes.depth),
    **mixture,
    "bos_token_id": None,
    "eos_token_id": end,
    "torch_dtype": dtype,
  }
