"""A pytest plugin that leaves a half of `full` to the other stack.

MESHWRIGHT_HALF=1    # or 2: runs this half

`.ci/run` tests two stacks. Each runs all of `make test`, so each promise is tested on both. `full` repeats promises for
more strategies and variants, and there each stack runs a half. Which one depends on all values of a case: of a table of
strategies and variants, each stack runs the black or the white squares of a chessboard. Tests that share a program have
the same values, so they are in the same half. Tests without cases go by their file, whose fixtures they share. Without
the variable everything runs.

A test that must run on both stacks has the marker `both_stacks`.
"""

import os
import zlib

import pytest

HALF = "MESHWRIGHT_HALF"
LEFT = "is in the other half"  # the reason that stands among those of skipped tests


def half(item: pytest.Item) -> int:
  """1 or 2, from the values of a case if all are names or numbers, else from its id: others print as they like.

  A test without cases goes by its file.
  """
  case = getattr(item, "callspec", None)
  if case is None:
    return 1 + _bit(item.nodeid.partition("::")[0])
  values = [value for _, value in sorted(case.params.items())]
  is_plain = all(value is None or isinstance(value, str | int | float) for value in values)
  return 1 + sum(map(_bit, map(str, values) if is_plain else [case.id])) % 2


def _bit(text: str) -> int:
  """The bit of the checksum that divides today's strategies and variants most evenly."""
  return zlib.crc32(text.encode()) >> 9 & 1


def is_left(item: pytest.Item, mine: int) -> bool:
  is_halved = item.get_closest_marker("full") and not item.get_closest_marker("both_stacks")
  return bool(is_halved) and half(item) != mine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if mine := int(os.environ.get(HALF) or 0):
    left = [item for item in items if is_left(item, mine)]
    items[:] = [item for item in items if item not in set(left)]
    config.hook.pytest_deselected(items=left)
    if skips := config.pluginmanager.get_plugin("skipped tests"):
      skips.left = {item.nodeid: LEFT for item in left}
