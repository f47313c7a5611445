"""Result folders: checked for writing before anything is computed, and locked against a second run."""

import contextlib
import fcntl
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax

from errors import ConfigError, Unavailable, dangling, unwritable, visible
from runtime import processes
from runtime.storage.bucket import Folder, Location, here
from runtime.storage.lease import Lease
from runtime.storage.mirror import Mirror
from runtime.storage.owners import no_links
from runtime.workdir import HOLDS, check, of_process


def writable(folder: Path, field: str) -> Path:
  """Returns the folder, created if needed. Raises ConfigError or Unavailable, naming `field`, if that cannot be."""
  if why := dangling(folder):
    raise Unavailable(f"{field}={str(folder)!r}: {why}")
  probe = folder / f".write-test-{os.getpid()}"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe.touch()
    probe.unlink()
  except OSError as error:
    if error.filename == str(probe):
      error.filename = str(folder)
    raise unwritable(error, field, folder) from error
  return folder


def fresh(name: str) -> Path:
  """Makes a folder for a run that has none, runs/NAME-TIME. Each of several runs in the same second gets its own."""
  base = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
  for number in range(1, 1000):
    folder = Path(base if number == 1 else f"{base}-{number}")
    try:
      folder.mkdir(parents=True)
    except FileExistsError:
      continue
    except OSError:
      pass  # `writable` says why
    return folder
  return Path(base)


def write(file: Path, content: str | bytes, sync: bool = False) -> None:
  """Writes a file as a whole: readers find the old one or the new one, also after a kill. Raises OSError.

  A full disk leaves the old one, and nothing beside it.

  Args:
    sync: whether the new one must survive a power failure.
  """
  part = file.with_suffix(".part")
  try:
    with open(part, "wb", opener=no_links) as out:
      out.write(content.encode() if isinstance(content, str) else content)
      if sync:
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)
  except OSError:
    with contextlib.suppress(OSError):
      part.unlink()
    raise


@contextlib.contextmanager
def written_into(folder: Path, field: str) -> Iterator[None]:
  """If the body cannot write into `folder`, raises ConfigError, or Unavailable: its disk may be full."""
  try:
    yield
  except OSError as error:
    raise unwritable(error, field, folder) from error


def writable_file(file: Path, field: str) -> Path:
  """Returns the file after creating its folder if needed. Raises ConfigError if the file cannot be written."""
  if file.is_dir():
    raise ConfigError(f"{field}={str(file)!r} is a folder; name a file in it")
  writable(file.parent, field)
  return file


@contextlib.contextmanager
def owned(results: Location) -> Iterator[Mirror | None]:
  """Locks the workdir `results` for this job while the body runs. All processes must call it.

  If it is in a bucket, the folder of this machine is locked, too. Yields what copies that to the bucket.

  Raises ConfigError if nothing can be written there, or if the job's processes do not all see the same folder. Raises
  Unavailable if another run holds the lock: it may be about to end. The lock belongs to the operating system and ends
  with the process that holds it.
  """
  workdir = here(results)
  with contextlib.ExitStack() as held:

    def lock() -> str:
      check(results)
      writable(workdir, "workdir")
      file = held.enter_context(_opened_lock(workdir / "lock"))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        file.seek(0)
        raise Unavailable(
          f"workdir={str(workdir)!r} is in use by another run ({file.read().strip()}); name another, or end that run"
        ) from None
      except OSError as error:
        print(f"note: {workdir} cannot be locked ({error.strerror}); do not start a second run there", flush=True)
      owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
      with written_into(workdir, "workdir"):
        file.truncate(0)
        print(owner, file=file, flush=True)
        os.fsync(file.fileno())
      return owner

    owner = processes.on_process_zero(lock)
    with processes.raise_together():
      shared = (workdir / "lock").exists() and (workdir / "lock").read_text().strip() == owner
      if isinstance(results, Folder):
        writable(workdir, "workdir")  # of this process's machine
      elif not shared:
        raise ConfigError(
          f"workdir={str(workdir)!r} is not the same folder for all processes; use a shared file system"
        )
    if not isinstance(results, Folder):
      yield None
      return
    leases: list[Lease] = []
    processes.on_process_zero(lambda: leases.append(held.enter_context(_leased(workdir, results, owner))))
    only = () if shared else of_process(jax.process_index())
    mirror = Mirror(workdir, results, leases[0] if leases else None, _warn, HOLDS, only)
    with processes.raise_together():
      mirror.bring()
    with mirror:
      yield mirror


def _opened_lock(path: Path) -> IO[str]:
  try:
    return open(path, "a+", opener=no_links)
  except OSError as error:
    raise unwritable(error, "workdir", path.parent) from error


def _leased(workdir: Path, remote: Folder, owner: str) -> Lease:
  home = workdir / "home"
  if not home.exists():
    home.write_text(uuid.uuid4().hex)
  return Lease(remote, home.read_text(), owner, lambda line: print(visible(line), flush=True))


def _warn(text: str) -> None:
  print(f"error: {visible(text)}", file=sys.stderr, flush=True)
