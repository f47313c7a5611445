"""Another user, as whom a test may act: files that root may read whatever their modes are refused to that user."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = 4711  # without an entry in /etc/passwd
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextlib.contextmanager
def another_user(*folders: Path) -> Iterator[None]:
  """The body runs as another user, who may pass through the folders above these."""
  temporary = Path(tempfile.gettempdir())
  for above in {above for folder in folders for above in folder.parents if temporary in above.parents}:
    above.chmod(above.stat().st_mode | 0o055)
  os.seteuid(USER)
  try:
    yield
  finally:
    os.seteuid(0)


def given(folder: Path) -> Path:
  """Makes a folder, which belongs to that user."""
  folder.mkdir(parents=True)
  os.chown(folder, USER, USER)
  return folder
