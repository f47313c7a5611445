"""ExpertSizes: the checked sizes and options of a mixture of experts, which `ModelSizes.experts` holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from errors import ConfigError, above_zero, not_negative, one_of, positive

ROUTERS = ("softmax_topk", "topk_softmax", "sigmoid_bias")  # ops/routing.py
WAYS = ("auto", "gather", "exchange", "ragged")  # ops/experts.py

# The attributes that have another name in the config, where all fields of a model are in one section.
CONFIG_NAMES = {
  "count": "experts",
  "per_token": "experts_per_token",
  "width": "expert_width",
  "shared": "shared_experts",
  "transport": "expert_transport",
  "capacity": "expert_capacity",
  "every": "experts_every",
}


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
  """The sizes and options of a mixture. `configs/base.py` documents each field and holds the defaults."""

  count: int
  per_token: int
  width: int  # 0 becomes mlp_width
  shared: int
  dense_layers: int
  every: int
  router: str
  router_scale: float
  router_aux: float
  router_z: float
  router_bias_rate: float
  transport: str
  capacity: float  # 0: no limit

  @staticmethod
  def of(model: Mapping[str, Any]) -> "ExpertSizes | None":
    """The sizes in a config's `model`; None without experts. Raises ConfigError if they do not fit each other."""
    one_of("model.router", model["router"], ROUTERS)
    one_of("model.expert_transport", model["expert_transport"], WAYS)
    counts = ("experts", "dense_layers", "expert_width", "shared_experts")
    for name in (*counts, "expert_capacity", "router_aux", "router_z", "router_bias_rate"):
      not_negative(f"model.{name}", model[name])
    above_zero("model.router_scale", model["router_scale"], "1")
    positive("model.experts_every", model["experts_every"])
    count, depth, per_token = (model[name] for name in ("experts", "depth", "experts_per_token"))
    if not count:
      for name in ("shared_experts", "dense_layers", "expert_capacity"):
        if value := model[name]:
          raise ConfigError(
            f"model.{name}={value} is for mixtures of experts, but model.experts=0; set model.experts, or use "
            f"model.{name}=0"
          )
      if model["experts_every"] > 1:
        raise ConfigError(f"model.experts_every={model['experts_every']} needs model.experts; set it, or use 1")
      return None
    if model["dense_layers"] >= depth:
      raise ConfigError(
        f"model.dense_layers={model['dense_layers']} leaves no block for the experts (model.experts={count}), "
        f"because model.depth={depth}; use at most {depth - 1}, or model.experts=0 for a dense model"
      )
    if model["dense_layers"] // model["experts_every"] == depth // model["experts_every"]:
      raise ConfigError(
        f"model.experts_every={model['experts_every']} with model.dense_layers={model['dense_layers']} leaves no block "
        f"for the experts (model.experts={count}), because model.depth={depth}; use smaller numbers"
      )
    if not 1 <= per_token <= count:
      raise ConfigError(
        f"model.experts_per_token={per_token} must be from 1 to model.experts={count}; use {min(2, count)}"
      )
    model = {**model, "expert_width": model["expert_width"] or model["mlp_width"]}
    return ExpertSizes(**{ours: model[theirs] for ours, theirs in EXPERT_FIELDS.items()})

  def has(self, layer: int) -> bool:
    """Whether a layer of the model has experts: the last of each `every`, but none of the first `dense_layers`."""
    return layer >= self.dense_layers and (layer + 1) % self.every == 0

  def number_of(self, layer: Any) -> Any:
    """The number of a layer that has experts among these: an int, or an array of them."""
    return layer // self.every - self.dense_layers // self.every if self.every > 1 else layer - self.dense_layers

  def layer_of(self, number: int) -> int:
    """The inverse of `number_of`."""
    return (number + self.dense_layers // self.every + 1) * self.every - 1

  @property
  def has_bias(self) -> bool:
    """Whether a bias is added to the scores to choose experts."""
    return self.router == "sigmoid_bias"


# For each attribute, its name in the config.
EXPERT_FIELDS = {field.name: CONFIG_NAMES.get(field.name, field.name) for field in dataclasses.fields(ExpertSizes)}
