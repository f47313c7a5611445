"""What a config.json says of windows (models/windows.py): each family has its own fields for them.

Of mistral and mixtral all layers have the window `sliding_window`, if it is not null. Of qwen3_moe they do with
`use_sliding_window`, and of qwen2 and qwen3 the layers from `max_window_layers` on, or those that `layer_types` names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from errors import ConfigError, shown
from models.windows import local_layers, pattern_of

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # as layer_types calls them


@dataclasses.dataclass(frozen=True)
class Windows:
  """How the models of a family may have windows.

  Attributes:
    default: what a config.json means that does not say `sliding_window`.
    switch: whether it counts with `use_sliding_window` only.
    first: from which layer on layers have it, if `max_window_layers` does not say; None if all have it or none.
  """

  default: int | None = None
  switch: bool = False
  first: int | None = None


def read(windows: Windows | None, given: Mapping[str, Any], where: str) -> dict[str, Any]:
  """The fields `window` and `layers_pattern` of `config.model`. `windows` is None for a family that has none."""
  depth, kinds = given["num_hidden_layers"], given.get("layer_types")
  of_each = isinstance(kinds, list) and len(kinds) == depth and all(kind in (LOCAL, GLOBAL) for kind in kinds)
  if kinds is not None and not of_each:
    raise ConfigError(
      f"{where} has layer_types={shown(kinds)}, which is not {LOCAL!r} or {GLOBAL!r} for each of its {depth} layers; "
      "use a model with such layers"
    )
  window = given.get("sliding_window", windows and windows.default) or 0
  if windows and windows.switch and not given.get("use_sliding_window"):
    window = 0
  if not window and not kinds:
    return {"window": 0, "layers_pattern": ""}
  if windows and windows.first is not None:
    first = given.get("max_window_layers", windows.first)
    local = [kind == LOCAL for kind in kinds] if kinds else [window > 0 and layer >= first for layer in range(depth)]
  else:
    local = [window > 0] * depth
  if (windows is None and window) or (any(local) and not window) or (kinds and [k == LOCAL for k in kinds] != local):
    said = [f"{name}={shown(given.get(name))}" for name in ("sliding_window", "use_sliding_window", "layer_types")]
    raise ConfigError(
      f"{where} has {', '.join(said)}, which say different things of its windows for model_type="
      f"{given.get('model_type')!r}; correct them"
    )
  return {"window": window, "layers_pattern": pattern_of(local)} if any(local) else {"window": 0, "layers_pattern": ""}


def write(windows: Windows | None, window: int, pattern: str, depth: int) -> dict[str, Any]:
  """The fields of config.json that say so."""
  if not window:
    return {"sliding_window": None}
  assert windows is not None
  local = local_layers(pattern, depth)
  fields: dict[str, Any] = {"sliding_window": window}
  if windows.switch:
    fields["use_sliding_window"] = True
  if windows.first is not None:  # older versions of transformers read max_window_layers alone
    fields |= {
      "max_window_layers": local.index(True), "layer_types": [LOCAL if is_local else GLOBAL for is_local in local],
    }  # fmt: skip
  return fields
