"""What a process may use of its machine: the limits of its control groups, which containers and schedulers set.

A program in a container sees the memory and the cores of the whole machine, and gets what these files say. Both
versions of control groups are read. Without files, as on other systems than Linux, there is no limit.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # tests have another
NO_LIMIT = 1 << 60  # version 1 says so by a number near 2^63


def memory() -> int | None:
  """The bytes of memory that the processes of this group may have together; None: no limit."""
  given = [int(text) for text in (*_values("", "memory.max"), *_values("memory", "memory.limit_in_bytes"))]
  return min((size for size in given if size < NO_LIMIT), default=None)


def processes() -> int | None:
  """How many processes and threads the group may have; None: no limit."""
  return min((int(text) for text in (*_values("", "pids.max"), *_values("pids", "pids.max"))), default=None)


def cores() -> int:
  """How many cores this process can keep busy: those that it may run on, or less if its group gets less time."""
  given = getattr(os, "sched_getaffinity", None)
  mine = len(given(0)) if given else os.cpu_count() or 1
  shares = [text.split() for text in _values("", "cpu.max")]
  for quota, period in zip(_values("cpu", "cpu.cfs_quota_us"), _values("cpu", "cpu.cfs_period_us"), strict=False):
    shares.append([quota, period])
  times = [int(quota) / int(period) for quota, period in shares if int(quota) > 0]
  return max(1, min([mine, *map(math.ceil, times)]))


def _values(controller: str, name: str) -> Iterator[str]:
  """What files of this name hold, from this process's group up to the outermost one that can be seen.

  Those without a limit are left out. `controller`: of version 1; "": version 2, which has one tree.
  """
  group = _groups().get(controller)
  mounted = ROOT / "sys/fs/cgroup" / controller
  if group is None or (not controller and not (mounted / "cgroup.controllers").exists()):
    return
  place = mounted / group.lstrip("/")
  while not place.is_dir() and place != mounted:  # a container may see its own group as the outermost one
    place = place.parent
  while True:
    with contextlib.suppress(OSError):
      text = (place / name).read_text().strip()
      if text and not text.startswith("max"):
        yield text
    if place == mounted:
      return
    place = place.parent


def _groups() -> dict[str, str]:
  """This process's group for each controller of version 1, and under "" that of version 2."""
  found: dict[str, str] = {}
  with contextlib.suppress(OSError):
    for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
      _, controllers, group = line.split(":", 2)
      found |= dict.fromkeys(controllers.split(","), group)
  return found
