"""Files of a bucket, brought to this machine once: from then on they are read like any others.

They are in `data.cache_dir`, for each set of files a folder. What names a set is the generation of each object, so
after an object has changed, the files are read again. A download that was killed goes on with the files that it lacks.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data.cache import prepared
from errors import ConfigError, Unavailable, of_system
from runtime.storage.answers import StorageError
from runtime.storage.bucket import Folder, is_url, location

AT_ONCE = 8  # files that are read at the same time


def brought(path: str, field: str, cache_dir: str) -> str:
  """The same path, or several separated by commas, with files and folders of this machine in place of a bucket's.

  Raises ConfigError, naming `field`, if there is nothing at a URL, and that or Unavailable if it cannot be read.
  """
  if "://" not in path:
    return path
  return ",".join(_brought(one, field, cache_dir) if is_url(one) else one for one in map(str.strip, path.split(",")))


def _brought(url: str, field: str, cache_dir: str) -> str:
  source = location(url, field)
  assert isinstance(source, Folder)
  try:
    names = source.names()
    single = not names and source.generations([""]) != [None]
    root, names = (source.parent, [source.name]) if single else (source, [n for n in names if not _is_hidden(n)])
    if not names:
      raise ConfigError(f"{field}={url!r} does not exist; use an object of a bucket, or a folder with some")
    key = [(name, (generation or b"").hex()) for name, generation in zip(names, root.generations(names), strict=True)]
    folder = prepared(cache_dir, _as_name(source), (str(root), key), lambda to: _download(root, names, to))
  except StorageError as error:
    failed = of_system(error, f"{field}={url!r} cannot be read: {error}")
  except FileNotFoundError as error:
    failed = Unavailable(f"{field}={url!r} changes while it is read: {error}; run again when it changes no more")
  else:
    return str(folder / source.name if single else folder)
  raise failed


def _download(root: Folder, names: list[str], to: Path) -> None:
  missing = [name for name in names if not (to / name).exists()]
  with ThreadPoolExecutor(AT_ONCE) as threads:
    list(threads.map(lambda name: (root / name).download(to / name), missing))


def _is_hidden(name: str) -> bool:
  return any(part.startswith(".") for part in name.split("/"))


def _as_name(source: Folder) -> str:
  """A name for the folder on this machine, by which people recognize it."""
  return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{source.scheme}-{source.bucket}-{source.path}")[:100]
