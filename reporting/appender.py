"""Appends lines to a file, also on a disk that is full for a while, and warns without ending the run."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from errors import JobError, first_line, visible
from runtime import processes


class Appender:
  """Appends lines to a file. On a full disk: warns once, buffers, and retries on the next write.

  TensorBoard's own writer ends its thread at the first error, and blocks training when its queue of ten is full.

  If a kill has left half a line in the file, the first write begins a new line, so that its own lines can be read.
  """

  def __init__(self, path: Path):
    self.path, self.waiting, self.failing = path, b"", False
    self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    size = os.fstat(self.descriptor).st_size
    if size and os.pread(self.descriptor, 1, size - 1) != b"\n":
      self.waiting = b"\n"

  def write(self, data: bytes) -> None:
    self.waiting += data
    try:
      while self.waiting:
        self.waiting = self.waiting[os.write(self.descriptor, self.waiting) :]
    except OSError as error:
      if not self.failing:
        warn(f"{self.path} cannot be written ({error.strerror}); training continues, and the next write retries")
    self.failing = bool(self.waiting)

  def sync(self) -> None:
    """Flushes to disk, so that the data survives a power failure."""
    with contextlib.suppress(OSError):
      os.fsync(self.descriptor)

  def close(self) -> None:
    self.write(b"")
    with contextlib.suppress(OSError):  # NFS may find out only now that the disk is full
      os.close(self.descriptor)


@contextlib.contextmanager
def extra(what: str, together: bool = False) -> Iterator[None]:
  """Around what a run can do without, such as a picture: if it fails, that is one warning.

  Args:
    together: whether all processes of the job do it together. Then they all fail, or the one that fails ends the job.
  """
  try:
    yield
  except Exception as error:  # whatever a library may raise
    if isinstance(error, JobError) or (together and processes.failed_alone(error)):
      raise
    why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    warn(f"{what} is left out ({why}); the run is not affected")


def warn(text: str) -> None:
  """Prints an error, which does not end the run, on standard error. Every process may call it."""
  tqdm.write(f"error: {visible(text)}", file=sys.stderr)
