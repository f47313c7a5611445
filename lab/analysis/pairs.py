"""The pairs of a query and a key that attention computes: by kernel, by kind of layer, and if devices share a text."""

from collections.abc import Callable, Collection

from lab.analysis import splash
from lab.analysis.case import Case
from models import windows
from models.ops.pieces import query_block
from models.ops.positions import chunks
from models.sizes import ModelSizes


def in_pieces(case: Case) -> bool:
  """Whether attention reads a text in pieces, those of each device in turn (models/ops/context.py)."""
  is_attention = case.sizes.mixes.per_pair(case.sizes) > 0
  return is_attention and case.sharers > 1 and case.sizes.attention_context != "exchange"


def mean(case: Case, of: Callable[[Case, ModelSizes], float], stacks: Collection[str]) -> float:
  """The mean over the blocks of these stacks. `of` gets the sizes of each kind of blocks."""
  groups = [group for group in case.sizes.groups.values() if group.name in stacks]
  blocks = sum(group.layers for group in groups)
  return sum(group.layers * of(case, group.sizes) for group in groups) / blocks if blocks else 0.0


def computed(case: Case, sizes: ModelSizes) -> float:
  """The pairs of positions that a block computes for an example; if devices share it, all of them together."""
  t, causal = sizes.positions, sizes.predicts.causal
  if sizes.shown and case.sharers > 1 and sizes.local_way != "exchange":  # of chunks, and of halos (ops/halo.py)
    chunk = t // chunks(case.sharers)
    within = sizes.shown if sizes.shown < chunk else 0
    return t // chunk * (_pairs(sizes, chunk, True, within) + _pairs(sizes, sizes.shown - 1, True))
  own = t // (case.sharers if in_pieces(case) and not sizes.shown else 1)
  return _pairs(sizes, own, causal, sizes.shown) * (t // own) + computed_of_others(case, sizes)


def computed_of_others(case: Case, sizes: ModelSizes) -> float:
  """Those of them whose keys are another device's: of each other device all pairs, or with a causal mask two chunks."""
  if not in_pieces(case) or sizes.shown:
    return 0.0
  own = sizes.positions // case.sharers
  of_one = 2 * _pairs(sizes, own // 2, False) if sizes.predicts.causal else _pairs(sizes, own, False)
  return case.sharers * (case.sharers - 1) * of_one


def _pairs(sizes: ModelSizes, t: int, causal: bool, window: int = 0) -> float:
  """Those of so many queries and as many keys."""
  if sizes.attention == "splash":
    return splash.pairs(t, causal, window)
  if not causal or (sizes.attention == "plain" and t == sizes.positions):
    return t**2
  if sizes.attention == "cudnn":
    return windows.pairs(t, window, True)  # skips every masked pair, as calls.py counts it
  size = query_block(window)
  first = lambda start: max(start + 1 - window, 0) if window else 0
  return sum(min(size, t - start) * (min(start + size, t) - first(start)) for start in range(0, t, size))
