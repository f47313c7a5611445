"""The cache of prepared data. A folder is written under a temporary name and renamed when it is complete."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import ConfigError


def prepared(root: str, name: str, key: Any, write: Callable[[Path], None]) -> Path:
  """Returns the folder for (name, key) under `root`. If there is none yet, `write(folder)` fills a new one."""
  digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
  final = Path(root).expanduser() / f"{name}-{digest}"
  if final.exists():
    return final
  try:
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
  except OSError as error:
    raise ConfigError(f"data.cache_dir={root!r} cannot be written ({error.strerror}); use another folder") from error
  try:
    write(unfinished)
    try:
      os.rename(unfinished, final)
    except OSError:  # another process was first
      if not final.exists():
        raise
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
  return final
