"""A pytest plugin that leaves a share of `full` to the other stack.

MESHWRIGHT_SHARE=1    # nine tenths; 2: the other tenth

`.ci/run` tests two stacks. Each runs all of `make test`, so each promise is tested on both. `full` repeats promises for
more strategies and variants, and there each stack runs a share: the newest the smaller one, because its compiler for
CPUs takes twice as long. Which one depends on all values of a case: each value has a colour, one of ten, and the
colours of a case add up. So of a table of strategies and variants, the newest stack has about a tenth of each
strategy's variants, and other ones of the next strategy. Tests of one program have the same values, so they are in the
same share. Tests without cases go by their file, whose fixtures they have in common. Without the variable everything
runs.

A test that must run on both stacks has the marker `both_stacks`.
"""

import os
import zlib

import pytest

SHARE = "MESHWRIGHT_SHARE"
LEFT = "is in the other share"  # the reason that stands among those of skipped tests
COLOURS = 10
THEIRS = 7  # the colour of the cases for the newest stack


def share(item: pytest.Item) -> int:
  """1 or 2, from the values of a case if all are names or numbers, else from its id: others print as they like.

  A test without cases goes by its file.
  """
  case = getattr(item, "callspec", None)
  if case is None:
    return _of(item.nodeid.partition("::")[0])
  values = [value for _, value in sorted(case.params.items())]
  is_plain = all(value is None or isinstance(value, str | int | float) for value in values)
  return _of(*map(str, values) if is_plain else [case.id])


def _of(*texts: str) -> int:
  """The share of these texts, by those bits of their checksums that divide today's strategies evenly."""
  return 2 if sum(zlib.crc32(text.encode()) >> 10 for text in texts) % COLOURS == THEIRS else 1


def is_left(item: pytest.Item, mine: int) -> bool:
  is_shared = item.get_closest_marker("full") and not item.get_closest_marker("both_stacks")
  return bool(is_shared) and share(item) != mine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if mine := int(os.environ.get(SHARE) or 0):
    left = [item for item in items if is_left(item, mine)]
    items[:] = [item for item in items if item not in set(left)]
    config.hook.pytest_deselected(items=left)
    if skips := config.pluginmanager.get_plugin("skipped tests"):
      skips.left = {item.nodeid: LEFT for item in left}
