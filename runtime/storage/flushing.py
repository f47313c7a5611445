"""Flushes files and folders to disk, as far as their file system can."""

import errno
import os
import stat

UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def flush(descriptor: int) -> None:
  """Flushes a file or folder. Some network and FUSE file systems cannot flush folders, which is no error here.

  After a power failure of their server, such a folder may lack its newest names.
  """
  try:
    os.fsync(descriptor)
  except OSError as error:
    if error.errno not in UNSUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
      raise
