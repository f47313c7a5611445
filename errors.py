"""The error that a user can cause, the checks that raise it, and the errors that end a whole job.

Every check on user input raises `ConfigError` with one sentence that names the field, the value and the fix.
`train.py` prints that sentence and exits with status 2, before anything has been compiled. Trouble that may pass is
`Unavailable`: status 1, and another start may succeed. docs/cluster.md lists the exit statuses.
"""

import contextlib
import difflib
import errno
import math
import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
  """Bad input. The message names the field, its value and how to fix it."""


class Unavailable(Exception):
  """What a run needs does not work now: storage, a port, its workdir. Another start may succeed. One sentence."""


class JobError(Exception):
  """Ends all processes of a job: each raises it at the same point, or has finished, so none waits for another."""


class JobConfigError(ConfigError, JobError):
  """A ConfigError that all processes of a job raise together."""


class JobUnavailable(Unavailable, JobError):
  """An Unavailable that all processes of a job raise together."""


# Errors of a file system that stay until somebody changes the input, or the permissions.
LASTING = {
  errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG,
  errno.ELOOP, errno.EINVAL,
}  # fmt: skip
# Errors while reading that say something of the files. All others say only that they cannot be seen now.
OF_FILES = {
  None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
# What to do about an error of a file system.
FIXES = {
  errno.EACCES: "give this user the right to do so (chown, chmod)",
  errno.EPERM: "give this user the right to do so (chown, chmod)",
  errno.EROFS: "make its file system writable",
  errno.ENOSPC: "free some space, or inodes (df, df -i)",
  errno.EDQUOT: "free some space, or ask for a larger quota",
  errno.EMFILE: "allow more open files (ulimit -n)",
  errno.ENFILE: "allow this machine more open files (fs.file-max)",
  errno.EIO: "check its disk",
  errno.ESTALE: "mount its file system again",
  errno.ENOTCONN: "mount its file system again",
  errno.ENODEV: "mount its file system again",
  errno.EHOSTDOWN: "wait for its file server",
  errno.ETIMEDOUT: "wait for its file server",
  errno.ELOOP: "remove the link, which is not followed",
}


def unseen(error: BaseException) -> int:
  """The number of the error for which files cannot be read now, which says nothing of them; 0 if it is none of these.

  Libraries raise errors of their own, with the text of the system's.
  """
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, OSError) and cause.errno not in OF_FILES:
      return cause.errno or 0
    if found := [number for number in FIXES.keys() - OF_FILES if os.strerror(number) in str(cause)]:
      return found[0]
    cause = cause.__cause__ or cause.__context__
  return 0


def of_file(error: OSError, path: str | os.PathLike[str], doing: str = "read", other: str = "") -> str:
  """What is wrong with a file that an error of the operating system names, and what to do, by the error's number.

  Args:
    path: the file, if the error names none.
    doing: what cannot be done: "read", "written".
    other: what else helps, such as "name another folder".
  """
  path = error.filename if isinstance(error.filename, str) else os.fspath(path)
  named = repr(path) if path else "a file"
  whose = _whose(path) if error.errno in (errno.EACCES, errno.EPERM) else ""
  fix = " or ".join(filter(None, [FIXES.get(error.errno or 0, ""), other])) or "check that it is what it should be"
  return f"{named} cannot be {doing} ({error.strerror or first_line(error)}{whose}); {fix}"


def unwritable(
  error: OSError, field: str, folder: str | os.PathLike[str], other: str = "name another folder"
) -> ConfigError | Unavailable:
  """The error to raise if a folder that a field names, or a file in it, cannot be written. `other`: what else helps."""
  given, told = f"{field}={os.fspath(folder)!r}", of_file(error, folder, "written", other)
  own = told.removeprefix(repr(os.fspath(folder)))
  return of_system(error, f"{given}: {told}" if own == told else given + own)


def _whose(path: str) -> str:
  """Whose a file is, or the innermost folder above it that can be seen."""
  it = "it"
  while path not in ("", os.path.dirname(path)):
    with contextlib.suppress(OSError):
      owner, me = os.stat(path).st_uid, os.geteuid()
      return f"; {it} belongs to {'this user' if owner == me else f'{user(owner)}, and this user is {user(me)}'}"
    path = os.path.dirname(path)
    it = repr(path)
  return ""


def expanded(path: str | os.PathLike[str], field: str) -> Path:
  """The path with `~` replaced. Raises ConfigError, naming `field`, if there is no such user, or no home is known."""
  try:
    return Path(path).expanduser()
  except RuntimeError as error:
    raise ConfigError(
      f"{field}={os.fspath(path)!r} begins with the home of a user that this machine does not know; write the whole "
      "path, or set HOME"
    ) from error


def user(uid: int) -> str:
  """The name of a user, or the number if the machine knows none, as in many containers."""
  with contextlib.suppress(KeyError, OverflowError):
    return pwd.getpwuid(uid).pw_name
  return str(uid)


def dangling(path: str | os.PathLike[str]) -> str:
  """Why something may be missing only for now: the link in a path that leads nowhere; "" if there is none."""
  path = os.path.abspath(path)
  while path != os.path.dirname(path):
    if os.path.islink(path) and not os.path.exists(path):
      return f"{path!r} is a link to {os.readlink(path)!r}, which is not there; mount that disk, or remove the link"
    path = os.path.dirname(path)
  return ""


def may_pass(error: BaseException) -> bool:
  """Whether another start may succeed: storage may answer again, and a full disk may have room."""
  if isinstance(error, Unavailable):
    return True
  lasts = isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.errno in LASTING)
  return isinstance(error, OSError) and not lasts


def of_system(error: OSError, message: str) -> ConfigError | Unavailable:
  """The error with this message to raise in place of one of the operating system or of storage."""
  return Unavailable(message) if may_pass(error) else ConfigError(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """Returns "; did you mean 'x'?" for the known name nearest to `name`, or else a list of the known names."""
  known = sorted(known)
  nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
  return f"; did you mean '{nearest[0]}'?" if nearest else f"; use one of: {', '.join(known)}"


def one_of(field: str, value: str, known: Iterable[str]) -> str:
  """Returns `value` if it is one of `known`. Raises ConfigError otherwise."""
  known = list(known)
  if value not in known:
    raise ConfigError(f"{field}={value!r} does not exist{did_you_mean(str(value), known)}")
  return value


def positive(field: str, value: int) -> int:
  """Returns `value` if it is at least 1 and fits into 32 bits, as steps and sizes do. Raises ConfigError otherwise."""
  if _representable(field, value) < 1:
    raise ConfigError(f"{field}={value} must be at least 1")
  return value


def not_negative(field: str, value: Any, fix: str = "use 0 to switch it off") -> Any:
  """Returns `value` if it is 0 or a finite number above. Raises ConfigError, which ends with `fix`, otherwise."""
  if _representable(field, value) < 0:
    raise ConfigError(f"{field}={value} must not be negative; {fix}")
  return value


def above_zero(field: str, value: float, example: str) -> float:
  """Returns `value` if it is a finite number above 0. Raises ConfigError otherwise."""
  if not 0 < value < math.inf:
    raise ConfigError(f"{field}={value} must be a finite number above 0; use {example}")
  return value


def _representable(field: str, value: Any) -> Any:
  if isinstance(value, int) and abs(value) >= 1 << 31:
    raise ConfigError(f"{field}={value} does not fit into 32 bits; use a number below 2147483648")
  if not math.isfinite(value):
    raise ConfigError(f"{field}={value} must be a finite number")
  return value


def file_name(where: str, name: Any) -> str:
  """Returns `name` if it names a file without its folder. `where` is what names it, for the ConfigError otherwise.

  Data from strangers may name any file, which would then be read and trained on.
  """
  if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
    raise ConfigError(f"{where} names the file {name!r}; use the name of a file in the same folder")
  return name


def inside(where: str, root: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
  """Returns `path`, of a file or folder below `root`. Raises ConfigError if a symbolic link leads out of `root`.

  The cache of Hugging Face has links, from `snapshots/REVISION` into `blobs`. These are allowed.
  """
  path = os.fspath(path)
  if os.path.islink(path):
    real, allowed = os.path.realpath(path), [os.path.realpath(root)]
    before, snapshots, _ = allowed[0].partition("/snapshots/")
    allowed += [os.path.join(before, "blobs")] if snapshots else []
    if not any(real == folder or real.startswith(os.path.join(folder, "")) for folder in allowed):
      raise ConfigError(f"{where} has {path!r}, a link out of this folder to {real!r}; copy that, or name it instead")
  return path


def first_line(error: BaseException) -> str:
  """The first line of an exception's message, shortened to 300 characters."""
  return _shortened(visible((str(error).strip() or type(error).__name__).partition("\n")[0]))


def shown(value: Any) -> str:
  """A value that a stranger's file holds, as Python writes it, shortened to 300 characters."""
  return _shortened(repr(value))


# Control characters of terminals, lone surrogates, ends of lines that look like none, and what reorders text.
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, keep: str = "") -> str:
  """Foreign text as it may be shown, in terminals and logs: what acts on them is escaped, but for what `keep` has.

  Names of files, rows, samples and records may hold escape sequences, which set titles, hide lines or answer for users.
  """
  return _HARMFUL.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
  return character.encode("unicode_escape").decode()


def _shortened(text: str) -> str:
  return text if len(text) <= 300 else text[:140] + " … " + text[-140:]
