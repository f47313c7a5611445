"""The families of models that are read and written.

All are decoders with rotary positions, RMSNorm and a gated MLP or a mixture of experts. They differ in biases, norms,
windows and activations, in their defaults, and in how experts are weighed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpointing.pretrained.windows import Windows
from models.mlps import ClampedSwiGLU


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    architecture: the class in the library transformers.
    fields: those fields of `config.model` that are the same in all models of the family, if not as in PLAIN.
    fixed: what its config.json holds besides FIXED, or in its place; further fields: `known`.
    scales_embedding: whether rows of the embedding are multiplied by the root of the width.
    local_theta: the base of rotary positions in local layers (rotary.read).
    experts: what a config.json calls the fields of experts; {} if the family has none.
    routers: how experts are weighed, if the family has any: without norm_topk_prob, and with it.
    dense_layers: whether layers may have an MLP instead of experts (`mlp_only_layers`, `decoder_sparse_step`).
    windows: how its models may have windows; None if they have none.
    packed: whether weights of experts may be stored in four bits each (mxfp4.py).
    rope_scaling: what a config.json means that does not scale rotary positions.
    defaults: what a config.json means that leaves a field out; None for a value that follows from others.
  """

  architecture: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  known: tuple[str, ...] = ()
  scales_embedding: bool = False
  local_theta: float | None = None
  experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  routers: tuple[str, ...] = ()
  dense_layers: bool = False
  windows: Windows | None = None
  packed: bool = False
  rope_scaling: Mapping[str, Any] | None = None
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def of_model(self) -> dict[str, Any]:
    """The fields of `config.model` that are the same in all its models."""
    return {**PLAIN, **self.fields}


PLAIN = {
  "mlp": "swiglu", "norms": "before", "norm_offset": 0.0, "qkv_bias": False, "qk_norm": False, "qk_norm_over": "head",
  "out_bias": False, "mlp_bias": False, "attention_sinks": False,
}  # fmt: skip
NORMS_OF_OLMO = {"norms": "after", "qk_norm": True, "qk_norm_over": "width"}
DEFAULTS = {
  "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
  "rope_theta": 10_000.0, "query_pre_attn_scalar": None, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
BY_LAYER = Windows(default=4096, switch=True, first=28)
FAMILIES = {
  "llama": Family("LlamaForCausalLM"),
  "mistral": Family("MistralForCausalLM", windows=Windows(default=4096), defaults={"num_key_value_heads": 8}),
  "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, windows=BY_LAYER, defaults={"num_key_value_heads": 32}),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    {"qk_norm": True},
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
    {"qk_norm": True},
    experts={
      "num_experts": "experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "expert_width",
    },
    routers=("topk_softmax", "softmax_topk"),
    dense_layers=True,
    windows=Windows(default=4096, switch=True),
    defaults={"num_key_value_heads": 4},
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    {"mlp": "geglu", "norms": "both", "norm_offset": 1.0, "qk_norm": True},
    fixed={
      "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None,
      "final_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    known=("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
    scales_embedding=True,
    local_theta=10_000.0,
    windows=Windows(default=4096, period=6),
    defaults={
      "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "rope_theta": 1e6,
      "query_pre_attn_scalar": 256,
    },
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    {"mlp": "swiglu_clamped", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "attention_sinks": True},
    fixed={"attention_bias": True, "swiglu_alpha": ClampedSwiGLU.STEEPNESS, "swiglu_limit": ClampedSwiGLU.LIMIT},
    known=("experts_per_token", "initial_context_length"),
    experts={
      "num_local_experts": "experts", "num_experts_per_tok": "experts_per_token", "intermediate_size": "expert_width",
    },
    routers=("softmax_topk",),
    windows=Windows(default=128, period=2),
    packed=True,
    rope_scaling={
      "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096,
    },
    defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
  ),
  "olmo2": Family("Olmo2ForCausalLM", NORMS_OF_OLMO, defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5}),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    NORMS_OF_OLMO,
    local_theta=0.0,
    windows=Windows(default=4096, period=4),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    known=("no_rope_layers", "no_rope_layer_interval"),
    windows=Windows(switch=True, nope=True),
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
  ),
}  # fmt: skip
