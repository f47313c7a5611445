"""Measures one part of the preparation in a process of its own: `python -m lab.benchmarks.preparation_worker < SPEC`.

It follows the protocol of worker.py. preparation.py starts it.
"""

import re
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import data
from configs import base
from errors import ConfigError
from lab.benchmarks import worker


def memory(field: str) -> int:
  """The bytes that this process has in memory (`VmRSS`), or the most that it had (`VmHWM`).

  Not `ru_maxrss`, which also counts the memory of the process that started this one.
  """
  try:
    status = Path("/proc/self/status").read_text()
  except OSError as error:
    raise ConfigError("memory is read from /proc/self/status, which is not here; measure this on Linux") from error
  return 1024 * int(re.findall(rf"{field}:\s+(\d+) kB", status)[0])


def opened(spec: dict[str, Any]) -> ConfigDict:
  config = base.get_config("lm", "single")
  config.update_from_flattened_dict(spec["fields"])
  return config


def time_load(spec: dict[str, Any]) -> dict[str, Any]:
  """Seconds of `data.load`, which prepares the data if needed, and the peak of memory before and after it."""
  config, before = opened(spec), memory("VmHWM")
  start = time.perf_counter()
  dataset = data.load(config)
  seconds = time.perf_counter() - start
  return {
    "seconds": seconds,
    "before_bytes": before,
    "peak_bytes": memory("VmHWM"),
    "examples": len(dataset.parts[0].train),
  }


def read_batches(spec: dict[str, Any]) -> dict[str, Any]:
  """Seconds of `batches` batches, and the memory before and after them."""
  config = opened(spec)
  batches = data.Batches(data.mixture(data.load(config)), config.batch_size, config.seed)
  batches.read(0)
  before, start = memory("VmRSS"), time.perf_counter()
  for step in range(1, spec["batches"] + 1):
    batches.read(step)
  return {"seconds": time.perf_counter() - start, "before_bytes": before, "after_bytes": memory("VmRSS")}


def time_step(spec: dict[str, Any]) -> dict[str, Any]:
  """Seconds of single training steps on one simulated device, and of reading single batches."""
  jax.config.update("jax_platforms", "cpu")
  config = opened(spec)
  steps = {"config": config.to_dict(), "devices": 1, "warmup": 6, "steps": spec["steps"]}
  found = worker.time_steps(steps)
  batches, seconds = data.Batches(data.mixture(data.load(config)), config.batch_size, config.seed), []
  for step in range(spec["batches"]):
    start = time.perf_counter()
    batches.read(step)
    seconds.append(time.perf_counter() - start)
  return {"step_seconds": found["seconds"], "read_seconds": seconds}


TASKS = {"load": time_load, "read": read_batches, "step": time_step}

if __name__ == "__main__":
  worker.main(TASKS)
