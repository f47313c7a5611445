"""Folders of file systems that cannot flush them: network and FUSE file systems."""

import errno
import os
import stat
from pathlib import Path

import pytest

from runtime.storage.flushing import flush


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
@pytest.mark.parametrize("folder", [True, False])
def test_only_a_folder_may_stay_unflushed_and_only_where_that_is_not_supported(
  number: int, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  def unsupported(descriptor: int) -> None:
    assert stat.S_ISDIR(os.fstat(descriptor).st_mode) == folder
    raise OSError(number, os.strerror(number))

  (tmp_path / "file").touch()
  descriptor = os.open(tmp_path if folder else tmp_path / "file", os.O_RDONLY)
  monkeypatch.setattr(os, "fsync", unsupported)
  try:
    if folder and number != errno.EIO:
      flush(descriptor)
    else:
      with pytest.raises(OSError, match=os.strerror(number)):
        flush(descriptor)
  finally:
    os.close(descriptor)
