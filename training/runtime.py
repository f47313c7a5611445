"""The edge to the machine: which devices there are, and where compiled programs and results are kept."""

import os
from pathlib import Path
from typing import Any

import jax

from errors import ConfigError, positive


def start(config: Any) -> list[jax.Device]:
  """Sets JAX up and returns the devices to train on: the accelerators, or `config.simulated_devices` made from the CPU."""
  jax.config.update("jax_num_cpu_devices", positive("simulated_devices", config.simulated_devices))
  if config.compilation_cache_dir:
    folder = writable(Path(config.compilation_cache_dir).expanduser(), "compilation_cache_dir")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  return jax.devices()


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
