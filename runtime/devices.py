"""Starts JAX: finds the accelerators or simulates devices, joins the other processes, sets the compilation cache."""

import contextlib
import ctypes
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

import jax

from errors import ConfigError, positive
from runtime import processes
from runtime.folders import writable
from runtime.stderr import silenced

MOST_SIMULATED = 1024  # each device is a thread; with 100,000, starting takes longer than anyone waits


def start_jax(config: Any) -> list[jax.Device]:
  """Sets JAX up and returns the devices to train on: accelerators, or `config.simulated_devices` made from the CPU."""
  if will_use_cpus(jax.config.jax_platforms):  # type: ignore[attr-defined]  # jax adds its options at run time
    _keep_freed_memory()  # before any thread starts: a thread that has its own heap keeps it
  count = positive("simulated_devices", config.simulated_devices)
  if count > MOST_SIMULATED:
    raise ConfigError(f"simulated_devices={count} is more than one machine can run; use at most {MOST_SIMULATED}")
  if jax.config.jax_num_cpu_devices != count:  # type: ignore[attr-defined]  # jax adds its options at run time
    jax.config.update("jax_num_cpu_devices", count)
  give_threads(count)
  processes.join(config.distributed)
  # The first request for devices makes libtpu and the CUDA plugin look for theirs, and complain at length if there are
  # none.
  with silenced() if _has_compiler_alone() else contextlib.nullcontext():
    devices = jax.devices()
  if config.compilation_cache_dir:
    with processes.raise_together():
      folder = writable(Path(config.compilation_cache_dir).expanduser(), "compilation_cache_dir")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # Otherwise the cache may return an equal program that names other scopes, and a trace would show those.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", config.profile.steps > 0)
  return devices


def give_threads(devices: int) -> None:
  """Gives XLA's CPU backend more threads than simulated devices, if called before it starts.

  It starts as many threads as devices, or as cores if these are more. Each collective blocks a thread until all devices
  have come to it. A device that waits in two at once may take the thread of a device which has not come yet: then all
  wait forever. XLA reads the number from this variable (its `DefaultThreadPoolSize`). Not many more, because it also
  cuts matrix products into as many pieces: with 32 threads for 8 devices, steps took a tenth longer.
  """
  if devices > 1:
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, devices + devices // 2)))


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
