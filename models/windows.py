"""Windows: how many positions a position sees, itself included (`model.window`), and which layers have a window.

A layer with a window is local, the others are global. No implementation of attention hides what is outside a window. So
a model with local layers reads at most as many positions as a window shows, and computes the same as with windows.
"""

import itertools
from collections.abc import Sequence

from errors import ConfigError, not_negative

KINDS = ("local", "global")


def local_layers(pattern: str, depth: int) -> tuple[bool, ...]:
  """Whether each layer is local. A pattern such as "local:5,global:1" repeats from layer 0; with "" all are local."""
  period: list[bool] = []
  for part in pattern.split(",") if pattern else ["local:1"]:
    kind, _, count = part.partition(":")
    if kind not in KINDS or not (count.isdecimal() and int(count)):
      raise ConfigError(
        f"model.layers_pattern={pattern!r} has the part {part!r}, which is not KIND:NUMBER with a kind of "
        f"{' or '.join(KINDS)}; write it as 'local:5,global:1', or '' if all layers are local"
      )
    period += [kind == "local"] * int(count)
  if len(period) > depth:
    raise ConfigError(
      f"model.layers_pattern={pattern!r} is for {len(period)} layers, but model.depth={depth}; use at most {depth}"
    )
  return tuple(period[layer % len(period)] for layer in range(depth))


def pattern_of(local: Sequence[bool]) -> str:
  """The pattern for which `local_layers` returns `local`; "" if all layers are local."""
  runs = [(KINDS[not is_local], len(list(run))) for is_local, run in itertools.groupby(local)]
  return "" if all(local) else ",".join(f"{kind}:{count}" for kind, count in runs)


def check(window: int, pattern: str, depth: int, positions: int) -> None:
  """Raises ConfigError for an invalid window or pattern, or a window that is shorter than what the model reads."""
  if pattern and not window:
    raise ConfigError(f"model.layers_pattern={pattern!r} needs a window; set model.window, or leave the pattern empty")
  if not_negative("model.window", window, "use 0 for none") and not any(local_layers(pattern, depth)):
    raise ConfigError(
      f"model.layers_pattern={pattern!r} has no local layer for model.window={window}; use "
      "model.layers_pattern='' if all layers are local"
    )
  if 0 < window < positions:
    raise ConfigError(
      f"model.seq_len={positions} is longer than the window of {window} positions that the model's local layers see "
      f"(model.window); use at most {window}"
    )
