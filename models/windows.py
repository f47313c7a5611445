"""Kinds of layers by what attention sees in them. `model.layers_pattern` says which layers are of which kind.

    local   a position sees itself and the `window` - 1 before it; or, without a causal mask, fewer than `window` on
            each side (`model.window`)
    global  a position sees the whole text
    nope    global, without rotary positions (arXiv:2305.19466)

Blocks run in loops over periods of the pattern (stacks.py).
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from errors import ConfigError, not_negative

if TYPE_CHECKING:
  from models.sizes import ModelSizes

KINDS = ("local", "global", "nope")
LOCAL, GLOBAL, NOPE = KINDS


def kinds_of_layers(pattern: str, depth: int, default: str = LOCAL) -> tuple[str, ...]:
  """The kind of each layer. A pattern such as "local:5,global:1" repeats from layer 0; with "" all are `default`."""
  period: list[str] = []
  for part in pattern.split(",") if pattern else [f"{default}:1"]:
    kind, _, count = part.partition(":")
    if kind not in KINDS or not (count.isdecimal() and int(count)):
      raise ConfigError(
        f"model.layers_pattern={pattern!r} has the part {part!r}, which is not KIND:NUMBER with a kind of "
        f"{' or '.join(KINDS)}; write it as 'local:5,global:1', or '' if all layers are alike"
      )
    period += [kind] * int(count)
  if len(period) > depth:
    raise ConfigError(
      f"model.layers_pattern={pattern!r} is for {len(period)} layers, but model.depth={depth}; use at most {depth}"
    )
  return tuple(period[layer % len(period)] for layer in range(depth))


def pattern_of(kinds: Sequence[str]) -> str:
  """The pattern for which `kinds_of_layers` returns `kinds`; "" if all layers are local, or all global."""
  runs = [(kind, len(list(run))) for kind, run in itertools.groupby(period_of(kinds))]
  return "" if set(kinds) in ({LOCAL}, {GLOBAL}) else ",".join(f"{kind}:{count}" for kind, count in runs)


def period_of(kinds: Sequence[Any]) -> tuple[Any, ...]:
  """The first layers, as few as give all layers if they are repeated."""
  fits = lambda size: all(kinds[i] == kinds[i % size] for i in range(len(kinds)))
  return tuple(kinds[: next(size for size in range(1, len(kinds) + 1) if fits(size))])


def pairs(length: int, window: int, causal: bool) -> int:
  """How many pairs of a position and one that it sees a text of this length has. A window of 0 shows all."""
  seen = min(window, length) if window else length
  before = length * seen - seen * (seen - 1) // 2  # those of a position with itself, and with those before it
  return before if causal else 2 * before - length


def check(sizes: "ModelSizes") -> None:
  """Raises ConfigError for an invalid window or pattern."""
  window, pattern = not_negative("model.window", sizes.window, "use 0 for none"), sizes.layers_pattern
  kinds = kinds_of_layers(pattern, sizes.depth, LOCAL if window else GLOBAL)
  if window and LOCAL not in kinds:
    raise ConfigError(
      f"model.layers_pattern={pattern!r} has no local layer for model.window={window}; use "
      "model.layers_pattern='' if all layers are local"
    )
  if LOCAL in kinds and not window:
    raise ConfigError(
      f"model.layers_pattern={pattern!r} has local layers; set model.window, the positions that they see"
    )
  if not_negative("model.rope_base_local", sizes.rope_base_local, "use 0 for rope_base") and not window:
    raise ConfigError(
      f"model.rope_base_local={sizes.rope_base_local} is for models with local layers; set model.window, or use 0"
    )
  if (window or pattern) and not sizes.mixes.per_pair(sizes):
    raise ConfigError(
      f"model.window={window} and model.layers_pattern={pattern!r} are for attention, and model.mixer={sizes.mixer!r} "
      "has no pairs of positions; use 0 and ''"
    )
