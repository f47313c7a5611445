"""What a config.json says of windows (models/windows.py): each family has its own fields for them.

Of mistral and mixtral all layers have the window `sliding_window`, if it is not null. Of qwen3_moe they do with
`use_sliding_window`, and of qwen2 and qwen3 the layers from `max_window_layers` on, or those that `layer_types` names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from errors import ConfigError, shown
from models import windows as windows_of_model
from models.windows import pattern_of

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # as layer_types calls them


@dataclasses.dataclass(frozen=True)
class Windows:
  """How the models of a family may have windows.

  Attributes:
    default: what a config.json means that does not say `sliding_window`.
    switch: whether it counts with `use_sliding_window` only.
    first: from which layer on layers have it, if `max_window_layers` does not say; None if all have it or none.
    period: every so many layers, the last one is global, if neither `layer_types` nor `sliding_window_pattern` says
      another; 0: there is no such pattern.
    nope: whether its models have layers without rotary positions (`no_rope_layers`), and no windows.
  """

  default: int | None = None
  switch: bool = False
  first: int | None = None
  period: int = 0
  nope: bool = False


def read(windows: Windows | None, given: Mapping[str, Any], where: str) -> dict[str, Any]:
  """The fields `window` and `layers_pattern` of `config.model`. `windows` is None for a family that has none."""
  depth, kinds = given["num_hidden_layers"], given.get("layer_types")
  of_each = isinstance(kinds, list) and len(kinds) == depth and all(kind in (LOCAL, GLOBAL) for kind in kinds)
  if kinds is not None and not of_each:
    raise ConfigError(
      f"{where} has layer_types={shown(kinds)}, which is not {LOCAL!r} or {GLOBAL!r} for each of its {depth} layers; "
      "use a model with such layers"
    )
  if windows and windows.nope:
    return _without_rotation(given, depth, where)
  window = given.get("sliding_window", windows and windows.default) or 0
  if windows and windows.switch and not given.get("use_sliding_window"):
    window = 0
  if not window and not kinds:
    return {"window": 0, "layers_pattern": ""}
  if windows and windows.first is not None:
    first = given.get("max_window_layers", windows.first)
    local = [kind == LOCAL for kind in kinds] if kinds else [window > 0 and layer >= first for layer in range(depth)]
  elif windows and windows.period:
    period = given.get("sliding_window_pattern") or given.get("_sliding_window_pattern") or windows.period
    if not isinstance(period, int) or period < 1:
      raise ConfigError(f"{where} has sliding_window_pattern={shown(period)}, and needs a number of layers; correct it")
    local = [kind == LOCAL for kind in kinds] if kinds else [(layer + 1) % period != 0 for layer in range(depth)]
  else:
    local = [window > 0] * depth
  if (windows is None and window) or (any(local) and not window) or (kinds and [k == LOCAL for k in kinds] != local):
    said = [f"{name}={shown(given.get(name))}" for name in ("sliding_window", "use_sliding_window", "layer_types")]
    raise ConfigError(
      f"{where} has {', '.join(said)}, which say different things of its windows for model_type="
      f"{given.get('model_type')!r}; correct them"
    )
  if not any(local):
    return {"window": 0, "layers_pattern": ""}
  pattern = pattern_of([windows_of_model.LOCAL if is_local else windows_of_model.GLOBAL for is_local in local])
  return {"window": window, "layers_pattern": pattern}


def _without_rotation(given: Mapping[str, Any], depth: int, where: str) -> dict[str, Any]:
  """The fields of a family that says for each layer whether it has rotary positions: 1, or 0 if it has none."""
  interval, said = given.get("no_rope_layer_interval") or 4, given.get("no_rope_layers")
  if not isinstance(interval, int) or interval < 1:
    raise ConfigError(f"{where} has no_rope_layer_interval={shown(interval)}, and needs a number of layers; correct it")
  rotated = said or [int((layer + 1) % interval != 0) for layer in range(depth)]
  if not isinstance(rotated, list) or len(rotated) < depth or not all(x in (0, 1) for x in rotated):
    raise ConfigError(f"{where} has no_rope_layers={shown(said)}, and needs a 0 or 1 for each of its {depth} layers")
  if given.get("use_sliding_window"):
    raise ConfigError(f"{where} has use_sliding_window=True beside no_rope_layers, which is not known")
  if not all(rotated[:depth]):
    kinds = [windows_of_model.GLOBAL if x else windows_of_model.NOPE for x in rotated[:depth]]
    return {"window": 0, "layers_pattern": pattern_of(kinds)}
  raise ConfigError(f"{where} has rotary positions in all layers, which other families have; use model_type='llama'")


def write(windows: Windows | None, window: int, pattern: str, depth: int) -> dict[str, Any]:
  """The fields of config.json that say so."""
  if windows and windows.nope:
    kinds = windows_of_model.kinds_of_layers(pattern, depth)
    return {"no_rope_layers": [int(kind != windows_of_model.NOPE) for kind in kinds]}
  if not window:
    return {"sliding_window": None}
  assert windows is not None
  local = [kind == windows_of_model.LOCAL for kind in windows_of_model.kinds_of_layers(pattern, depth)]
  fields: dict[str, Any] = {"sliding_window": window}
  if windows.switch:
    fields["use_sliding_window"] = True
  if windows.period:
    fields["layer_types"] = [LOCAL if is_local else GLOBAL for is_local in local]
  if windows.first is not None:  # older versions of transformers read max_window_layers alone
    fields |= {
      "max_window_layers": local.index(True), "layer_types": [LOCAL if is_local else GLOBAL for is_local in local],
    }  # fmt: skip
  return fields
