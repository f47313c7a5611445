"""The memory of devices: the share of a GPU that a run asks for, and what a run says if it needs more than there is.

hardware.py says how much of a device a program may use. By default JAX takes 75% of each GPU when it starts, and a
program cannot get the rest. `ask` raises that to `GPU_SHARE` on cards that nobody else uses.
"""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import xla_bridge
from jax._src.lib import xla_client

from errors import ConfigError, first_line
from runtime import hardware
from runtime.hardware import GPU_SHARE

SHARE = "XLA_CLIENT_MEM_FRACTION"
# Whoever has set one of these has decided how JAX uses the card; the second is the older name of `SHARE`.
SETTINGS = (SHARE, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
SHARED = "CUDA_MPS_"  # variables of NVIDIA's service with which several processes share a card
UNIFIED = "TF_FORCE_UNIFIED_MEMORY"  # with this, a program may use the host's memory, too: a share of 4 is valid
IN_USE = 0.05  # of a card, by other programs; a driver keeps up to 1 GB for itself


def ask() -> None:
  """Has JAX take `GPU_SHARE` of each GPU when it starts.

  Changes nothing if JAX has started, if the user has set how JAX uses GPUs, or unless every card that this process will
  use is of a kind in the table and free: other programs may need the rest. Raises ConfigError for a setting that is not
  valid, because JAX would then leave the GPUs alone and compute on the CPU.
  """
  if xla_bridge.backends_are_initialized():
    return
  _check()
  if not chosen() and _are_free():
    os.environ[SHARE] = str(GPU_SHARE)


def _check() -> None:
  """Raises ConfigError if JAX cannot use this process's settings, or if a share is not one."""
  try:
    share = xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction", GPU_SHARE)
  except ValueError as error:
    reason = first_line(error).rstrip(".")
    raise ConfigError(f"{chosen()} cannot be used: {reason}; correct the variable, or unset it") from error
  assert isinstance(share, float)
  if not 0 < share <= 1 and not os.environ.get(UNIFIED):
    raise ConfigError(f"{chosen()} is not a share of a GPU's memory; use a number above 0 and at most 1, such as 0.9")


def chosen() -> str:
  """The first setting about GPU memory of this process, as NAME=VALUE; "" if there is none."""
  options = jax.config.jax_pjrt_client_create_options  # type: ignore[attr-defined]  # jax adds its options at run time
  given = {name: os.environ.get(name, "") for name in SETTINGS} | {
    "jax_pjrt_client_create_options": options
    if re.search("memory_fraction|preallocate|allocator", str(options))
    else "",
    "XLA_FLAGS": " ".join(re.findall(r"\S*memory_fraction\S*", os.environ.get("XLA_FLAGS", ""))),
  }
  given |= {name: value for name, value in os.environ.items() if name.startswith(SHARED)}
  return next((f"{name}={value}" for name, value in given.items() if value), "")


class _Usage(ctypes.Structure):
  """nvmlMemory_t."""

  _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _are_free() -> bool:
  """Whether this process will use GPUs, and each is of a known kind, whole, and used by no other program.

  NVML, a library of NVIDIA's driver, says so without starting CUDA. If it does not answer, nothing is known.
  """
  try:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
      return False
    try:
      cards = _cards(nvml)
      return bool(cards) and all(_is_free(nvml, card) for card in cards)
    finally:
      nvml.nvmlShutdown()
  except (OSError, AttributeError, ValueError, IndexError):
    return False


def _cards(nvml: Any) -> list[str]:
  """The numbers or UUIDs of the cards that CUDA and JAX will let this process use."""
  count = ctypes.c_uint()
  nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  cards = [str(i) for i in range(count.value)] if visible is None else [name.strip() for name in visible.split(",")]
  own = xla_bridge.CUDA_VISIBLE_DEVICES.value  # of these: jax.distributed gives each process on a host one of them
  return cards if own == "all" else [cards[int(i)] for i in own.split(",")]


def _is_free(nvml: Any, card: str) -> bool:
  handle, name, usage = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Usage()
  parts, later = ctypes.c_uint(), ctypes.c_uint()
  if card.isdigit():
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(card)), ctypes.byref(handle))
  else:
    failed = nvml.nvmlDeviceGetHandleByUUID(card.encode(), ctypes.byref(handle))
  failed = failed or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
  if failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(usage)):
    return False
  cut = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(parts), ctypes.byref(later)) == 0 and parts.value  # MIG
  return bool(not cut and hardware.chip(name.value.decode()) and usage.used <= IN_USE * usage.total)


def described(devices: Sequence[jax.Device]) -> str:
  """How much of a GPU's memory this run may use, why, and what stays for others; "" for other devices."""
  limit = hardware.usable_memory(devices)
  if devices[0].platform != "gpu" or not limit:
    return ""
  setting, size = chosen(), f"{limit / 1e9:,.2f} GB of each GPU"
  if setting == f"{SHARE}={GPU_SHARE}":
    return (
      f"{size}: {GPU_SHARE:.0%} of the card, where JAX alone takes 75%; {1 - GPU_SHARE:.0%} stays for CUDA, NCCL and "
      f"others (set {SHARE} to change that)"
    )
  return f"{size}, as {setting} says" if setting else (
    f"{size}: the share that JAX takes by itself, because other programs use the card or its kind is not known here "
    f"(set {SHARE}={GPU_SHARE} for more)"
  )  # fmt: skip


def is_too_little(error: BaseException) -> bool:
  """Whether XLA says that a device or its host has too little memory, when it compiles or when it runs."""
  text = str(error)
  return "Ran out of memory" in text or ("RESOURCE_EXHAUSTED" in text and bool(re.search("mem|allocat", text, re.I)))


class TooLittle(ConfigError):
  """A device has too little memory for a run.

  Attributes:
    config: the run's, with the sizes that its data say.
    devices: all devices of the run.
    limit: the bytes of each that a program may use; None if they are not known.
  """

  def __init__(self, message: str, config: Any, devices: Sequence[jax.Device], limit: float | None):
    super().__init__(message)
    self.config, self.devices, self.limit = config, devices, limit


@contextlib.contextmanager
def in_words(config: Any, devices: Sequence[jax.Device], state: bool = False) -> Iterator[None]:
  """Turns XLA's error about too little memory into a TooLittle, which says how much there is and what helps.

  Args:
    state: whether the state alone is made. Then no smaller batch would help.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if not is_too_little(error):
      raise
    limit, said = hardware.usable_memory(devices), first_line(error).rstrip(".")
    size = f"the {limit / 1e9:,.2f} GB of a device's memory that a program may use" if limit else "memory"
    what, fix = f"batch_size={config.batch_size}", "model.remat=full, a larger accumulation, a smaller batch"
    if state:
      what, fix = f"the state of strategy={config.strategy!r}", "a strategy that splits it more, optimizer.on_host=True"
    message = f"{what} does not fit into {size} ({said}); use {fix} or more devices"
    suggests = "as python -m tools.explain suggests for the same flags"
    raise TooLittle(f"{message}, {suggests}", config, devices, limit) from error
