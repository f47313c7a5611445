"""What a config.json says of rotary positions (models/ops/rotary.py): base and scaling, for all layers or by kind."""

import math
from collections.abc import Mapping
from typing import Any

from errors import ConfigError, shown
from models.sizes import ModelSizes

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NUMBER, MOST = (int, float), 1e30
OF_KINDS = ("full_attention", "sliding_attention")  # the entries of rope_parameters that are by kind of layer


def read(
  given: Mapping[str, Any], theta: float, local_theta: float | None, meant: Mapping[str, Any] | None, where: str
) -> dict[str, Any]:
  """The fields of `config.model`.

  Args:
    theta: the base that a config.json means that does not say `rope_theta`.
    local_theta: that of local layers (`rope_local_base_freq`), in a family whose local layers are never scaled. 0: the
      same as that of the others. None: in this family, all layers are alike.
    meant: how a config.json scales that does not say so.
  """
  for key in ("rope_scaling", "rope_parameters"):
    if not isinstance(given.get(key) or {}, dict):
      raise ConfigError(f"{where} has {key}={given[key]!r}, and needs its fields; copy the file again")
  said = given.get("rope_parameters") or {}
  by_kind = local_theta is not None and any(kind in said for kind in OF_KINDS)
  rope, local = (said.get(kind) or {} for kind in OF_KINDS) if by_kind else (said, {})
  rope = rope | (given.get("rope_scaling") or {}) or {**(meant or {})}
  base = _base(rope.get("rope_theta", given.get("rope_theta", theta)), "rope_theta", where)
  kind, scaling = _scaling(rope, given, where)
  fields = {"rope_base": base, "rope_scaling": scaling, "rope_scaling_kind": kind, "rope_base_local": 0.0}
  if local_theta is None:
    return fields
  if _scaling(local, given, where)[1]:
    raise ConfigError(f"{where} scales the rotary positions of local layers; use a model that does not")
  name = "rope_theta in rope_parameters" if by_kind else "rope_local_base_freq"
  own = _base(local.get("rope_theta", given.get("rope_local_base_freq", local_theta or base)), name, where)
  return fields | {"rope_base_local": own if scaling or own != base else 0.0}


def _base(theta: Any, name: str, where: str) -> float:
  if not isinstance(theta, NUMBER) or isinstance(theta, bool) or not 0 < theta < MOST:
    raise ConfigError(f"{where} has {name}={shown(theta)}, and needs a number; copy the file again")
  return float(theta)


def _scaling(rope: Mapping[str, Any], given: Mapping[str, Any], where: str) -> tuple[str, tuple[float, ...]]:
  """`rope_scaling_kind` and `rope_scaling`."""
  kind = rope.get("rope_type", rope.get("type", "default"))
  wanted = {"llama3": LLAMA3, "linear": ("factor",), "yarn": ("factor",)}.get(kind, ())
  further = ("beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor", "truncate")
  known = {*wanted, *(further if kind == "yarn" else ()), "rope_theta", "rope_type", "type"}
  others = {key for key in rope if key not in known}
  others -= {"partial_rotary_factor"} if rope.get("partial_rotary_factor") in (1, None) else set()
  filled = dict(rope)
  if kind == "yarn":
    defaults: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
    defaults["original_max_position_embeddings"] = given.get("max_position_embeddings")
    filled = defaults | {key: value for key, value in rope.items() if value is not None}
    factor = filled.get("factor")
    if isinstance(factor, NUMBER) and factor > 0:
      filled.setdefault("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    wanted = ("factor", "beta_slow", "beta_fast", "original_max_position_embeddings", "attention_factor")
  is_known = (wanted or kind == "default") and not others and isinstance(filled.get("truncate", True), bool)
  fits = lambda value: isinstance(value, NUMBER) and not isinstance(value, bool) and 0 < value < MOST
  if not is_known or not all(fits(filled.get(key)) for key in wanted):
    raise ConfigError(
      f"{where} scales rotary positions by {shown(dict(rope))}; only 'llama3' with {', '.join(LLAMA3)}, 'linear' and "
      "'yarn' with a factor are known: use a model with one of them, or with none"
    )
  kind = "yarn_unrounded" if filled.get("truncate") is False else kind
  return (kind if wanted else "llama3"), tuple(float(filled[key]) for key in wanted)


def fits(sizes: ModelSizes, local_theta: float | None) -> bool:
  """Whether a config.json of a family, with this `local_theta`, can say what the angles of local layers are."""
  every = sizes.rope_base, sizes.rope_scaling
  local = (sizes.rope_base_local, ()) if sizes.rope_base_local else every
  if not sizes.window:
    return True
  if local_theta is None:
    return local == every
  return not local[1] and (local_theta > 0 or local[0] == sizes.rope_base)


def write(sizes: ModelSizes, local_theta: float | None, meant: Mapping[str, Any] | None) -> dict[str, Any]:
  """The fields of config.json that say so."""
  numbers: dict[str, Any] | None = {"rope_type": "default"} if meant else None
  if sizes.rope_scaling:
    kind, given = sizes.rope_scaling_kind, sizes.rope_scaling
    if kind == "llama3":
      *factors, length = given  # the length counts tokens: transformers wants a whole number
      numbers = dict(zip(LLAMA3, (*factors, round(length)), strict=True))
    elif kind == "linear":
      numbers = {"factor": given[0]}
    else:
      factor, slow, fast, length, scale = given
      numbers = {"factor": factor, "beta_fast": fast, "beta_slow": slow, "attention_factor": scale}
      numbers["original_max_position_embeddings"] = round(length)
      numbers |= {"truncate": False} if kind == "yarn_unrounded" else {}
    numbers = {"rope_type": kind.removesuffix("_unrounded"), **numbers}
  fields: dict[str, Any] = {"rope_theta": sizes.rope_base, "rope_scaling": numbers}
  if local_theta:
    fields["rope_local_base_freq"] = sizes.rope_base_local or sizes.rope_base
  return fields
