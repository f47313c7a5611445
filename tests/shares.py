"""A pytest plugin that leaves a share of `full` to the other stack.

MESHWRIGHT_SHARE=1    # the oldest stack's; 2: the newest's

`.ci/run` tests two stacks. Each runs all of `make test`, so each promise is tested on both. `full` repeats promises for
more strategies and variants, and there each stack runs a share: the newest the smaller one, because its compiler for
CPUs takes twice as long. Which one depends on all values of a case: each value has a colour, one of twenty, and the
colours of a case add up. So of a table of strategies and variants, the newest stack has about a twentieth of each
strategy's variants, and other ones of the next strategy. Tests of one program have the same values, so they are in the
same share. Tests without cases are the oldest stack's.

Five colours of large tables are in neither share, because `.ci/run` has 90 minutes. They stand in its list of the tests
that ran nowhere. `make test-all` runs everything, without the variable.

A test that must run on both stacks has the marker `both_stacks`.
"""

import collections
import os
import zlib

import pytest

SHARE = "MESHWRIGHT_SHARE"
# The reasons that stand among those of skipped tests.
LEFT, NOWHERE = "is in the other share", "is in neither share; make test-all runs it"
COLOURS = 20
THEIRS, NOBODYS = 7, (0, 3, 9, 11, 16)  # the colours of the newest stack's cases, and of those in neither share
LARGE = 10  # so many cases make a table of which some are in neither share


def share(item: pytest.Item) -> int:
  """1 or 2; or 0 for a case that is in neither if its table is large. A test without cases is the oldest stack's.

  It depends on the values of a case if all are names or numbers, else on its id: others print as they like.
  """
  case = getattr(item, "callspec", None)
  if case is None:
    return 1
  values = [value for _, value in sorted(case.params.items())]
  is_plain = all(value is None or isinstance(value, str | int | float) for value in values)
  texts = map(str, values) if is_plain else [case.id]
  # By those bits of the checksums that divide today's strategies evenly.
  colour = sum(zlib.crc32(text.encode()) >> 10 for text in texts) % COLOURS
  return 0 if colour in NOBODYS else 2 if colour == THEIRS else 1


def reason(item: pytest.Item, mine: int, is_large: bool) -> str:
  """Why a test is left; "" if it is not."""
  if not item.get_closest_marker("full") or item.get_closest_marker("both_stacks"):
    return ""
  where = share(item) or (0 if is_large else 1)
  return "" if where == mine else LEFT if where else NOWHERE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if mine := int(os.environ.get(SHARE) or 0):
    table = lambda item: item.nodeid.partition("[")[0]
    cases = collections.Counter(table(item) for item in items if item.get_closest_marker("full"))
    left = {item: why for item in items if (why := reason(item, mine, cases[table(item)] >= LARGE))}
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=[*left])
    if skips := config.pluginmanager.get_plugin("skipped tests"):
      skips.left = {item.nodeid: why for item, why in left.items()}
