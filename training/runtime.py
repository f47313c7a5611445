"""The edge to the machine: which devices there are, and where compiled programs and results are kept."""

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import platform
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from errors import ConfigError, positive
from training import processes
from training.quiet import quiet, silenced


def start(config: Any) -> list[jax.Device]:
  """Sets JAX up and returns the devices to train on: accelerators, else `config.simulated_devices` made of the CPU."""
  _keep_freed_memory()  # first, since a thread that has a heap of its own keeps it
  if jax.config.jax_num_cpu_devices != positive("simulated_devices", config.simulated_devices):  # type: ignore
    jax.config.update("jax_num_cpu_devices", config.simulated_devices)
  processes.start(config.distributed)
  # Whoever first asks for devices, or for the number of processes, has libtpu look for TPUs.
  with silenced() if _has_only_the_compiler_of_tpus() else contextlib.nullcontext():
    devices = jax.devices()
  quiet()
  if config.compilation_cache_dir:
    with processes.together():
      folder = writable(Path(config.compilation_cache_dir).expanduser(), "compilation_cache_dir")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  return devices


def _has_only_the_compiler_of_tpus() -> bool:
  """libtpu is installed, to compile for TPUs that are not there; it would report that in many lines."""
  has_tpus = any(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists()
  return importlib.util.find_spec("libtpu") is not None and not has_tpus


def writable(folder: Path, field: str) -> Path:
  """Makes the folder if need be; raises ConfigError if nothing can be written there."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".write-test-{os.getpid()}"
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise ConfigError(f"{field}={str(folder)!r} cannot be written ({error.strerror}); name another folder") from error
  return folder


def writable_file(file: Path, field: str) -> Path:
  """The file, its folder made if need be; raises ConfigError if it cannot be written."""
  if file.is_dir():
    raise ConfigError(f"{field}={str(file)!r} is a folder; name a file in it")
  writable(file.parent, field)
  return file


@contextlib.contextmanager
def owned(workdir: Path) -> Iterator[None]:
  """Makes `workdir` this job's alone while the body runs; all processes call it.

  Raises ConfigError if nothing can be written there, if another run has it, or if the processes of the job do not
  all see it. The lock is the operating system's and ends with the process that holds it, however that ends.
  """
  with contextlib.ExitStack() as held:

    def take() -> str:
      writable(workdir, "workdir")
      file = held.enter_context((workdir / "lock").open("a+"))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        file.seek(0)
        raise ConfigError(
          f"workdir={str(workdir)!r} is in use by another run ({file.read().strip()}); name another, or end that run"
        ) from None
      except OSError as error:
        print(f"note: {workdir} cannot be locked ({error.strerror}); start no second run there", flush=True)
      file.truncate(0)
      owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
      print(owner, file=file, flush=True)
      os.fsync(file.fileno())
      return owner

    owner = processes.first(take)
    with processes.together():
      if not (workdir / "lock").exists() or (workdir / "lock").read_text().strip() != owner:
        raise ConfigError(f"workdir={str(workdir)!r} is not one folder for all processes; use a shared file system")
    yield


def _keep_freed_memory() -> None:
  """Tells glibc to hold on to freed memory, where the C library is glibc.

  XLA's CPU backend allocates its temporaries anew each step, and glibc takes large ones from the kernel and gives
  them back, so that each step begins by faulting in zeroed pages. Numbers: the constants of malloc.h.
  """
  if platform.libc_ver()[0] == "glibc":
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-8, 1)  # M_ARENA_MAX: one heap, which freed memory goes back to
    mallopt(-4, 0)  # M_MMAP_MAX: nothing is mapped apart from it
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing of it is ever returned
