"""What a process may use of its machine: the limits of its control groups, which containers and schedulers set.

A program in a container sees the memory and the cores of the whole machine, and gets what these files say. Both
versions of control groups are read. Without files, as on other systems than Linux, there is no limit.
"""

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # tests have another
NO_LIMIT = 1 << 60  # version 1 says so by a number near 2^63


def memory() -> int | None:
  """The bytes of memory that the processes of this group may have together; None: no limit."""
  given = [int(size) for (size,) in (*_limits("", "memory.max"), *_limits("memory", "memory.limit_in_bytes"))]
  return min((size for size in given if size < NO_LIMIT), default=None)


def threads() -> int | None:
  """How many more processes and threads may be started; None: any number. A user's limit does not count for root."""
  names = "pids.max", "pids.current"
  left = [int(most) - int(now) for most, now in (*_limits("", *names), *_limits("pids", *names))]
  of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
  if of_user != resource.RLIM_INFINITY and os.geteuid():
    left.append(of_user)
  return min(left, default=None)


def cores() -> int:
  """How many cores this process can keep busy: those that it may run on, or less if its group gets less time."""
  given = getattr(os, "sched_getaffinity", None)
  mine = len(given(0)) if given else os.cpu_count() or 1
  shares = [text.split() for (text,) in _limits("", "cpu.max")]
  shares += _limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
  times = [int(quota) / int(period) for quota, period in shares if int(quota) > 0]
  return max(1, min([mine, *map(math.ceil, times)]))


def _limits(controller: str, *names: str) -> Iterator[list[str]]:
  """What the files of these names hold, for each group with a limit in the first: from this process's group outwards.

  `controller`: of version 1; "": version 2, which has one tree.
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
      found = [(place / name).read_text().strip() for name in names]
      if not found[0].startswith("max"):
        yield found
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
