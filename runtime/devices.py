"""Starts JAX: finds the accelerators or simulates devices, joins the other processes, sets the compilation cache."""

import contextlib
import ctypes
import importlib.util
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import jax

from errors import ConfigError, Unavailable, expanded, first_line, positive, unwritable
from runtime import cgroup, device_memory, processes
from runtime.stderr import silenced
from runtime.storage import owners

AUTO, PROGRAMS = "auto", "~/.cache/meshwright/compiled"  # compilation_cache_dir, and its folder unless JAX has one
JAXS = "JAX_COMPILATION_CACHE_DIR"
MOST_SIMULATED = 1024  # each device is a thread; with 100,000, starting takes longer than anyone waits


def start_jax(config: Any) -> list[jax.Device]:
  """Sets JAX up and returns the devices to train on: accelerators, or `config.simulated_devices` made from the CPU."""
  if will_use_cpus(jax.config.jax_platforms):  # type: ignore[attr-defined]  # jax adds its options at run time
    _keep_freed_memory()  # before any thread starts: a thread that has its own heap keeps it
  count = positive("simulated_devices", config.simulated_devices)
  if count > MOST_SIMULATED:
    raise ConfigError(f"simulated_devices={count} is more than one machine can run; use at most {MOST_SIMULATED}")
  _simulate(count)
  give_threads(count)
  processes.join(config.distributed)
  if has_gpu_compiler() and _has_gpus() and not will_use_cpus(jax.config.jax_platforms):  # type: ignore[attr-defined]
    device_memory.ask()  # after `join`, which chooses the GPUs of this process; before JAX starts
  devices = started()
  with processes.raise_together():
    owners.read_also(config.cache_owner)
    _keep_programs(config.compilation_cache_dir, config.profile.steps > 0)
  return devices


def _simulate(count: int) -> None:
  """Makes so many devices from the CPU. ConfigError: JAX runs already, as in a notebook, with another number."""
  if jax.config.jax_num_cpu_devices == count:  # type: ignore[attr-defined]  # jax adds its options at run time
    return
  try:
    jax.config.update("jax_num_cpu_devices", count)
  except RuntimeError as error:
    there = jax.local_devices()
    if there[0].platform == "cpu" and len(there) != count:
      raise ConfigError(
        f"simulated_devices={count} comes too late, because JAX runs already, with {len(there)} CPU devices; set it to "
        f"{len(there)}, or restart and first run `import jax; jax.config.update('jax_num_cpu_devices', {count})`"
      ) from error


def started() -> list[jax.Device]:
  """The devices of the platforms that JAX is asked for. Raises ConfigError or Unavailable if they cannot be started."""
  asked = jax.config.jax_platforms or ""  # type: ignore[attr-defined]  # jax adds its options at run time
  plain = ",".join(filter(None, asked.lower().replace(" ", "").split(",")))  # as in JAX_PLATFORMS=CPU
  if plain != asked:
    jax.config.update("jax_platforms", plain)
  # The first request for devices makes libtpu and the CUDA plugin look for theirs, and complain at length if there are
  # none.
  try:
    with silenced() if _has_compiler_alone() else contextlib.nullcontext():
      return jax.devices()
  except RuntimeError as error:
    if "gloo" in str(error) and not processes.has_address():
      raise ConfigError(
        f"the name of this machine, {socket.gethostname()!r}, has no address, which processes on CPUs need; add it to "
        "/etc/hosts or to the network's names"
      ) from error
    why = first_line(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    if asked:
      raise ConfigError(
        f"JAX_PLATFORMS={asked!r} cannot be used ({why}); unset it for what this machine has, or set it to cpu"
      ) from error
    raise Unavailable(f"no device can be used ({why}); correct that, or set JAX_PLATFORMS=cpu") from error


def cache_of_programs(given: str) -> tuple[str, str]:
  """The folder for compiled programs, "" for none, and the field or variable that names it.

  `given`: `compilation_cache_dir`. With "auto" that of JAX counts, from its own variable or from the program around.
  """
  known = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # jax adds its options at run time
  if given == AUTO and known:
    return known, JAXS
  return given if given != AUTO else "" if os.environ.get(JAXS) == "" else PROGRAMS, "compilation_cache_dir"


def _keep_programs(given: str, profiled: bool) -> None:
  """Sets the folder in which JAX keeps compiled programs. Whoever may write there can run code in this process.

  A folder that JAX has from its own variable, or from the program around, is checked in the same way, and keeps the
  options that it has.

  Args:
    given: `compilation_cache_dir`.
    profiled: whether a trace is recorded. An equal program from the cache may name other scopes, which it would show.
  """
  path, field = cache_of_programs(given)
  own = field != JAXS
  if not path:
    jax.config.update("jax_compilation_cache_dir", None)
    return
  if own:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  if own or profiled:
    jax.config.update("jax_compilation_cache_include_metadata_in_key", profiled)
  if "://" not in path:  # who may write to a bucket is up to the bucket
    folder = expanded(path, field)
    try:
      place = owners.place(folder, field)
    except (OSError, ConfigError) as error:
      if path == PROGRAMS:  # which nobody has asked for
        why = error.strerror if isinstance(error, OSError) else first_line(error)
        print(
          f"note: compiled programs are not kept, because {path} cannot be used ({why})", file=sys.stderr, flush=True
        )
        jax.config.update("jax_compilation_cache_dir", None)
        return
      none = f'or set {field}="" for none'
      if isinstance(error, ConfigError):
        raise ConfigError(f"{error}, {none}") from error
      raise unwritable(error, field, folder, f"name another folder, {none}") from error
    foreign = [shelf.folder for shelf in place.read if shelf.foreign]
    path = str(foreign[0] if foreign else place.write or place.read[0].folder)
    if foreign or not os.access(path, os.W_OK):  # nothing takes so long to compile, so nothing is written
      jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
      jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # XLA's own, which GPUs would write into it
      jax.config.update("jax_compilation_cache_max_size", -1)
  jax.config.update("jax_compilation_cache_dir", path)


def give_threads(devices: int) -> None:
  """Gives XLA's CPU backend more threads than simulated devices, if called before it starts.

  It starts as many threads as devices, or as cores if these are more. Each collective blocks a thread until all devices
  have come to it. A device that waits in two at once may take the thread of a device which has not come yet: then all
  wait forever. XLA reads the number from this variable (its `DefaultThreadPoolSize`). Not many more, because it also
  cuts matrix products into as many pieces: with 32 threads for 8 devices, steps took a tenth longer.
  """
  cores = cgroup.cores()  # in a container or job that may use less of its machine, more threads only wait
  if devices > 1 or cores < (os.cpu_count() or 1):
    os.environ.setdefault("NPROC", str(max(cores, devices + devices // 2 if devices > 1 else 1)))
  needed = 40 + 4 * cores + 2 * devices  # at least: JAX aborts without a sentence if it can start no thread
  if (allowed := cgroup.threads()) is not None and allowed < needed:
    raise ConfigError(
      f"this user or container may start {allowed} more processes and threads, and a run with {devices} devices needs "
      f"{needed} or more; allow them (ulimit -u, docker run --pids-limit)"
    )


def _has_compiler_alone() -> bool:
  """Whether libtpu or JAX's CUDA plugin is installed on a machine without TPUs or GPUs, to compile for them."""
  return (_has_tpu_compiler() and not _has_tpus()) or (has_gpu_compiler() and not _has_gpus())


def will_use_cpus(platforms: str | None) -> bool:
  """Whether JAX, asked for these `platforms`, will choose the CPU. Asks no backend, because that would start it."""
  return platforms == "cpu" or not (
    (_has_tpu_compiler() and _has_tpus()) or (has_gpu_compiler() and _has_gpus())  # the plugin and the device
  )


def _has_tpus() -> bool:
  return any(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists()


def _has_gpus() -> bool:
  return any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()  # dxg: Windows Subsystem for Linux


def _has_tpu_compiler() -> bool:
  return importlib.util.find_spec("libtpu") is not None


def missing_plugin() -> str:
  """The extra of pyproject.toml that brings what jax lacks for this machine's accelerators; "" if it lacks nothing."""
  if _has_gpus() and not has_gpu_compiler():
    return "cuda"
  return "tpu" if _has_tpus() and not _has_tpu_compiler() else ""


def has_gpu_compiler() -> bool:
  """Whether JAX's CUDA plugin is installed, which XLA's GPU compiler is part of."""
  return any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))


def _keep_freed_memory() -> None:
  """Makes glibc keep freed memory instead of returning it to the kernel.

  XLA's CPU backend allocates its temporaries anew each step. By default glibc takes large blocks from the kernel and
  gives them back, so every step begins with page faults. With an accelerator, the host's memory serves reading and
  checkpoints instead, and should be returned. The numbers are the constants of malloc.h.
  """
  if platform.libc_ver()[0] == "glibc":
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-8, 1)  # M_ARENA_MAX: a single heap, to which freed memory returns
    mallopt(-4, 0)  # M_MMAP_MAX: never map a block outside the heap
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return the heap's top to the kernel
