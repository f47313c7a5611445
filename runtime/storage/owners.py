"""Whose caches are read and written: one rule for prepared data (data/cache.py) and compiled programs (devices.py).

Whoever can write into a cache decides what is trained on, and which code runs. So:

- A folder that belongs to this user, and to which nobody else may write, is read and written. It is made so, with mode
  0700; whoever wants to share it changes its mode.
- In any other folder, which others share, this user has a folder of that kind: `user-UID`.
- What another user owns is read only if `cache_owner` names them, and if nobody else may write to it. Then it is read
  and never written. What root owns is read as well: root can change everything on a machine.
"""

import contextlib
import functools
import grp
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from errors import ConfigError, user

ROOT = 0
_named = [""]  # the value of cache_owner, which is one for a whole program


class Shelf(NamedTuple):
  """A folder that is read.

  Attributes:
    owners: the users to whom what is in it may belong.
    foreign: whether another user has filled it, so that its contents are hashed before they are used.
    has_modes: false on a file system that keeps no owners and modes, such as that of a USB stick.
  """

  folder: Path
  owners: Collection[int]
  foreign: bool = False
  has_modes: bool = True


class Place(NamedTuple):
  """Where a cache is: the folders to look in, in this order, and the one to write to, if there is one."""

  read: list[Shelf]
  write: Path | None


def read_also(owner: str) -> None:
  """From now on, what this user owns is read, too: a name or a number; "": nobody's. Raises ConfigError if unknown."""
  if owner:
    _uid(owner)
  _named[0] = owner


def _uid(owner: str) -> int:
  try:
    return int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
  except (KeyError, OverflowError):
    raise ConfigError(f"cache_owner={owner!r} is no user of this machine; use a user's name or number") from None


def place(folder: Path, field: str) -> Place:
  """Where the cache is that `field` names, which is made if there is none.

  Raises OSError if that cannot be, and ConfigError if there is nothing that may be read or written.
  """
  me, named = os.geteuid(), _uid(_named[0]) if _named[0] else None
  if not folder.exists():
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process was first
      folder.mkdir(mode=0o700)
  found = folder.stat()
  if own := _own(folder, found):
    return Place([own], folder)
  read: list[Shelf] = []
  at = [(folder, found)]
  for uid in dict.fromkeys(uid for uid in (named, ROOT) if uid not in (None, me)):
    with contextlib.suppress(OSError):
      at.append((theirs := folder / f"user-{uid}", theirs.lstat()))
    for path, seen in at:
      if stat.S_ISDIR(seen.st_mode) and seen.st_uid == uid and is_closed(path, seen):
        read.append(Shelf(path, {seen.st_uid, ROOT}, foreign=uid != ROOT))
  if found.st_uid == named:
    return Place(_some(read, folder, found, field), None)
  mine = folder / f"user-{me}"
  try:
    mine.mkdir(mode=0o700, exist_ok=True)
    if not (own := _own(mine, mine.lstat())):
      raise ConfigError(
        f"{field}={str(folder)!r} has a folder {mine.name}, which another user owns or may write to; remove it, or use "
        "another folder"
      )
  except OSError:
    return Place(_some(read, folder, found, field), None)
  _say(f"note: others may write to {field}={str(folder)!r}, so what is yours there is in its folder {mine.name}")
  return Place([own, *read], mine)


@functools.lru_cache(maxsize=64)
def _say(line: str) -> None:
  """Once in a program."""
  print(line, file=sys.stderr, flush=True)


def _some(read: list[Shelf], folder: Path, found: os.stat_result, field: str) -> list[Shelf]:
  if read:
    return read
  whose = user(found.st_uid)
  why = (
    "others may write to it" if found.st_uid == (_uid(_named[0]) if _named[0] else -1) else "you may not write there"
  )
  raise ConfigError(
    f"{field}={str(folder)!r} belongs to {whose}, and {why}; use another folder, or, if nobody else may write there, "
    f"read theirs with cache_owner={whose}"
  )


def _own(folder: Path, found: os.stat_result) -> Shelf | None:
  """The folder, if it belongs to this user alone.

  If it does not look so, a file that is made there shows how the file system sees this user: NFS may give the files of
  root to nobody, and others keep no modes.
  """
  me = os.geteuid()
  if not stat.S_ISDIR(found.st_mode):
    return None
  if found.st_uid == me and is_closed(folder, found):
    return Shelf(folder, {me, ROOT})
  try:
    with tempfile.NamedTemporaryFile(prefix=".owner-", dir=folder) as probe:
      seen = os.fstat(probe.fileno())
  except OSError:
    return None
  has_modes = not seen.st_mode & 0o022  # the file was made with 0600
  if found.st_uid == seen.st_uid and (is_closed(folder, found) or not has_modes):
    return Shelf(folder, {seen.st_uid, me, ROOT}, has_modes=has_modes)
  return None


def is_closed(path: Path, found: os.stat_result) -> bool:
  """Whether nobody but its owner may write to a file or folder.

  A group that is the owner's alone counts as the owner (Linux gives each user one, with umask 002), and so does one
  that has no name, which a container may get for its volumes.
  """
  if not found.st_mode & 0o022:
    return True
  with contextlib.suppress(OSError):
    if os.statvfs(path).f_flag & os.ST_RDONLY:
      return True
  return not found.st_mode & 0o002 and _is_private(found.st_gid, found.st_uid)


@functools.lru_cache(maxsize=64)
def _is_private(gid: int, uid: int) -> bool:
  try:
    group = grp.getgrgid(gid)
  except (KeyError, OverflowError):
    return True
  owner = user(uid)
  return not set(group.gr_mem) - {owner} and (group.gr_name == owner or gid == ROOT)


def no_links(path: str, flags: int) -> int:
  """An opener for `open` that follows no symbolic link at the end of a path: it would overwrite a file elsewhere."""
  return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def mine_alone(path: str, flags: int) -> int:
  """The same for a file in a cache, to which nobody else may write."""
  return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
