"""What a prepared folder holds, written beside it when it is complete: size, time and hash of each file.

Each start compares owners, modes, sizes and times. Contents are hashed if another user has prepared the folder, if only
times differ (a copy), and by `tools.prepare --verify`. Folders of earlier versions have no such file.
"""

import contextlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import limits
from data import growing
from errors import ConfigError, shown, user
from limits import dict_of, whole
from runtime.storage import owners
from runtime.storage.owners import Shelf

FORMAT, WRITABLE = 1, "others may write to"
MOST = 1 << 28  # bytes of such a file: about 100 for each file of a folder


class Sealed(NamedTuple):
  """A file of a prepared folder."""

  size: int
  changed: int  # ns
  hash: str


def beside(folder: Path) -> Path:
  return folder.with_name(f".{folder.name}.json")


def files(folder: Path) -> dict[str, os.stat_result]:
  """The files below a folder, without hidden ones, and the folders, whose names end with "/". Follows no link."""
  found, folders = {"": folder.lstat()}, [""]
  while folders:
    at = folders.pop()
    with os.scandir(folder / at) as entries:
      for entry in entries:
        if not entry.name.startswith("."):
          is_folder = entry.is_dir(follow_symlinks=False)
          name = f"{at}{entry.name}{'/' if is_folder else ''}"
          found[name] = entry.stat(follow_symlinks=False)
          folders += [name] if is_folder else []
  return found


def seal(unfinished: Path, final: Path, key: str) -> None:
  """Writes down what a folder holds that is complete and will be `final`."""
  inside = {name: seen for name, seen in files(unfinished).items() if not stat.S_ISDIR(seen.st_mode)}
  hashes = _hashes(unfinished, list(inside), growing.taken(unfinished))
  sealed = {name: Sealed(seen.st_size, seen.st_mtime_ns, hashes[name]) for name, seen in inside.items()}
  growing.write_atomically(beside(final), {"format": FORMAT, "key": key, "files": sealed})


def _hashes(folder: Path, names: list[str], known: dict[str, str] | None = None) -> dict[str, str]:
  known = known or {}
  with ThreadPoolExecutor(os.cpu_count()) as threads:
    rest = [name for name in names if name not in known]
    return known | dict(zip(rest, threads.map(lambda name: growing.fingerprint_of(folder / name), rest), strict=True))


def check(folder: Path, key: str, shelf: Shelf, verify: bool) -> None:
  """Raises ConfigError unless a prepared folder is what was prepared, and nobody else may have changed it."""
  if why := _fault(folder, key, shelf, verify):
    fix = "ask its owner to prepare it again" if shelf.foreign else "remove that folder, and it is prepared again"
    if WRITABLE in why and not shelf.foreign:
      fix = f"run `chmod -R go-w {folder}` if nobody has changed it, or {fix}"
    raise ConfigError(f"data.cache_dir has {str(folder)!r}, {why}; {fix}, or use another data.cache_dir")


def _fault(folder: Path, key: str, shelf: Shelf, verify: bool) -> str:
  inside = files(folder)
  for name, seen in inside.items():
    what = f"in which {name!r}" if name else "which"
    if not (stat.S_ISDIR(seen.st_mode) or stat.S_ISREG(seen.st_mode)):
      return f"{what} is a link"
    if shelf.has_modes and seen.st_uid not in shelf.owners:
      return f"{what} belongs to {user(seen.st_uid)}"
    if shelf.has_modes and seen.st_mode & 0o022 and not owners.is_closed(folder / name, seen):
      return f"{what} {WRITABLE}"
  sealed = _sealed(folder, shelf)
  if sealed is None:
    return "which an earlier version has prepared, so that its contents cannot be checked" if shelf.foreign else ""
  if (sealed.get("format"), sealed.get("key")) != (FORMAT, key):
    return "which was prepared for other data or by a newer version"
  known = {name: Sealed(*one) for name, one in sealed["files"].items()}
  held = {name: seen for name, seen in inside.items() if not stat.S_ISDIR(seen.st_mode)}
  if known.keys() != held.keys():
    return f"with files that were not prepared, or without some: {shown(sorted(known.keys() ^ held.keys())[:3])}"
  for name, seen in held.items():
    if seen.st_size != known[name].size:
      return f"in which {name!r} has {seen.st_size:,} bytes and had {known[name].size:,}"
  moved = [name for name, seen in held.items() if seen.st_mtime_ns != known[name].changed]
  hashed = list(held) if verify or shelf.foreign else moved
  wrong = [name for name, found in _hashes(folder, hashed).items() if found != known[name].hash]
  if wrong:
    return f"in which {wrong[0]!r} has other contents than were prepared"
  if moved and not shelf.foreign:
    now = {name: known[name]._replace(changed=seen.st_mtime_ns) for name, seen in held.items()}
    with contextlib.suppress(OSError):  # read only: hashed again the next time
      growing.write_atomically(beside(folder), sealed | {"files": now})
  return ""


def _sealed(folder: Path, shelf: Shelf) -> dict[str, Any] | None:
  """What was written down; {} if that cannot be read, and None if nothing was."""
  with contextlib.suppress(OSError), open(beside(folder), opener=owners.mine_alone) as file:
    seen = os.fstat(file.fileno())
    trusted = seen.st_uid in shelf.owners and owners.is_closed(beside(folder), seen)
    if seen.st_size <= MOST and (trusted or not shelf.has_modes):
      with contextlib.suppress(ValueError):
        found = limits.parsed(file.read().encode(), most=MOST)
        return found if isinstance(found, dict) and dict_of(_is_sealed)(found.get("files")) else {}
      return {}
  return None


def _is_sealed(x: Any) -> bool:
  return isinstance(x, list) and len(x) == 3 and all(map(whole(0, 1 << 63), x[:2])) and isinstance(x[2], str)
