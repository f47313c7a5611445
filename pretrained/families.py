"""The families of models that are read and written, and what their config.json says: the fields of `config.model`.

All are decoders with rotary positions, RMSNorm and a gated MLP. They differ in biases, in the norms of queries and
keys, and in their defaults.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from errors import ConfigError, one_of
from models.sizes import ModelSizes

REQUIRED = {
  "hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads",
  "intermediate_size": "mlp_width", "vocab_size": "vocab_size",
}  # fmt: skip
# What any other value would change, and the model cannot do.
FIXED = {
  "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None, "auto_map": None,
  "rope_interleaved": False, "is_encoder_decoder": False, "add_cross_attention": False, "use_mrope": False,
}  # fmt: skip
READ = {
  *REQUIRED, *FIXED, "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
  "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types",
  "max_window_layers",
}  # fmt: skip
# What does not change what the model computes.
IGNORED = {
  "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
  "attention_dropout", "pretraining_tp", "max_position_embeddings", "is_llama_config", "transformers.js_config",
  "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id",
  "problem_type", "attn_implementation", "_attn_implementation_autoset", "unsloth_version", "unsloth_fixed",
}  # fmt: skip
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    architecture: the class in the library transformers.
    qkv_bias, qk_norm: fields of the model, the same in all models of the family.
    defaults: what a config.json means that leaves a field out; None for a value that follows from others.
  """

  architecture: str
  qkv_bias: bool = False
  qk_norm: bool = False
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


DEFAULTS = {
  "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
  "rope_theta": 10_000.0, "use_sliding_window": True, "sliding_window": None,
}  # fmt: skip
FAMILIES = {
  "llama": Family("LlamaForCausalLM"),
  "mistral": Family("MistralForCausalLM", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
  "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, defaults={"num_key_value_heads": 32, "use_sliding_window": False}),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    qk_norm=True,
    defaults={"num_key_value_heads": 32, "use_sliding_window": False, "head_dim": 128},
  ),
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """What a config.json says.

  Attributes:
    family: a key of FAMILIES.
    fields: of `config.model`.
    window: how many positions a position sees at most; None for all.
    context: how many tokens a text has at most; 0 if the file does not say.
  """

  family: str
  fields: dict[str, Any]
  window: int | None
  context: int


def read(given: dict[str, Any], where: str) -> Shape:
  """What the content of a config.json means. Raises ConfigError, naming `where`, for what the model cannot compute."""
  name = one_of(f"model_type in {where}", str(given.get("model_type")), FAMILIES)
  family = FAMILIES[name]
  for key, value in given.items():
    if key in FIXED and value not in (FIXED[key], None):
      raise ConfigError(f"{where} has {key}={value!r}, which this model cannot compute; use a model without it")
    if key not in READ | IGNORED and not key.endswith(("_token_id", "name_or_path")):
      raise ConfigError(
        f"{where} has the field {key!r}, which is not known here; remove it if the model computes the same without it"
      )
  for key in REQUIRED:
    if not isinstance(given.get(key), int) or given[key] < 1:
      raise ConfigError(f"{where} has {key}={given.get(key)!r}, and needs a positive number; copy the file again")
  get = lambda key: {**DEFAULTS, **family.defaults, **given}[key]
  rope = (given.get("rope_scaling") or {}) | (given.get("rope_parameters") or {})
  fields = {
    **{ours: given[theirs] for theirs, ours in REQUIRED.items()},
    "inputs": "tokens",
    "objective": "next_token",
    "kv_heads": get("num_key_value_heads") or given["num_attention_heads"],
    "head_dim": get("head_dim") or 0,
    "tied_embedding": bool(get("tie_word_embeddings")),
    "norm_eps": float(get("rms_norm_eps")),
    "rope_base": float(rope.get("rope_theta", get("rope_theta"))),
    "rope_scaling": _scaling(rope, where),
    "qkv_bias": family.qkv_bias,
    "qk_norm": family.qk_norm,
  }
  window = get("sliding_window") if _slides(given, get("use_sliding_window")) else None
  return Shape(name, fields, window, context=given.get("max_position_embeddings") or 0)


def _scaling(rope: dict[str, Any], where: str) -> tuple[float, ...]:
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return ()
  if kind != "llama3" or not all(isinstance(rope.get(key), (int, float)) for key in LLAMA3):
    raise ConfigError(
      f"{where} scales rotary positions by {rope!r}; only 'llama3' with {', '.join(LLAMA3)} is known: use a model with "
      "that, or with none"
    )
  return tuple(float(rope[key]) for key in LLAMA3)


def _slides(given: dict[str, Any], by_default: bool) -> bool:
  """Whether some layer sees a window only."""
  layers = given.get("layer_types")
  return by_default if layers is None else "sliding_attention" in layers


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
  norms_and_biases = (sizes.qkv_bias, sizes.qk_norm)
  fitting = [name for name, family in FAMILIES.items() if (family.qkv_bias, family.qk_norm) == norms_and_biases]
  if not fitting:
    raise ConfigError("model.qkv_bias=True with model.qk_norm=True is no known family; use one of them")
  # Llama's classes refuse a width that heads do not divide, even if head_dim is given.
  name = fitting[-1] if sizes.width % sizes.heads else fitting[0]
  scaling = (
    {"rope_type": "llama3", **dict(zip(LLAMA3, sizes.rope_scaling, strict=True))} if sizes.rope_scaling else None
  )
  return {
    "architectures": [FAMILIES[name].architecture],
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
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": end,
    "torch_dtype": dtype,
  }
