"""The memory of one process. Measured in a process of its own, which imports this file."""

from pathlib import Path


def peak_bytes() -> int:
  """The most memory that this process has had, as Linux counts it.

  Not `ru_maxrss`, which also counts the memory of the process that started this one.
  """
  status = Path("/proc/self/status").read_text()
  return 1024 * int(status.partition("VmHWM:")[2].split()[0])
