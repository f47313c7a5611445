"""Measures one cell of the throughput table in a process of its own: `python -m lab.benchmarks.worker < SPEC`.

The specification is JSON on standard input. The result is one line of JSON on standard output. A fresh process inherits
no memory, threads or compiled programs from another measurement, and can own the accelerators. rounds.py starts the
processes. torch_llama.py follows the same protocol without JAX.
"""

import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

import data
import strategies
from configs import base
from errors import ConfigError
from lab.analysis.compiled import planned
from lab.benchmarks.header import cpu
from lab.benchmarks.predicted import predicted_step
from runtime import hardware
from runtime.devices import start_jax
from strategies.execution.mesh import fitted
from training import settings

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def set_up(spec: dict[str, Any]) -> tuple[Any, list[jax.Device], strategies.Strategy]:
  """The config, the devices and the strategy that a specification asks for."""
  config = base.get_config("lm", "single")
  config.update(spec["config"])
  config.simulated_devices = spec["devices"]
  devices = start_jax(config)[: spec["devices"]]
  config.mesh.update(fitted(strategies.layout_of(config.strategy), len(devices)).mesh)
  strategy = strategies.create(config, settings.program(config, devices[0].platform), devices)
  strategy.check_batch("batch_size", config.batch_size, config.accumulation)
  return config, devices, strategy


def describe_machine(spec: dict[str, Any]) -> dict[str, Any]:
  """The hardware of this machine, and the versions of its software."""
  config = base.get_config("lm", "single")
  config.update(compilation_cache_dir="")
  devices = start_jax(config)
  simulated = devices[0].platform == "cpu"
  limit = (devices[0].memory_stats() or {}).get("bytes_limit")
  return {
    "hardware": {
      "simulated": simulated,
      "platform": devices[0].platform,
      "kind": devices[0].device_kind,
      "devices": None if simulated else len(devices),
      "device_memory_bytes": limit,
      "peak_flops": hardware.peak_flops(devices[0], "bfloat16"),
      "cpu": cpu(),
      "cores": os.cpu_count(),
      "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    },
    "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
  }


def compile_step(spec: dict[str, Any]) -> dict[str, Any]:
  """Seconds to trace, lower and compile the training step, and the bytes that a device needs for it."""
  config, _, strategy = set_up(spec)
  start = time.perf_counter()
  compiled = strategy.lower_train_step(config.batch_size).compile()
  seconds = time.perf_counter() - start
  return {
    "mesh": dict(strategy.layout.mesh),
    "said": strategy.describe(config.strategy),
    "devices_there": jax.device_count(),
    "compile_seconds": seconds,
    "bytes": planned(compiled),
    "predicted": predicted_step(strategy, config.batch_size),
  }


def time_steps(spec: dict[str, Any]) -> dict[str, Any]:
  """Seconds of each training step after the warm-up. Each step is awaited before the next begins."""
  config, devices, strategy = set_up(spec)
  state = strategy.init(config.seed)
  batches = data.Batches(data.mixture(data.load(config)), config.batch_size, config.seed)
  batch = strategy.shard(batches.read(0, strategy.rows(config.batch_size)), config.batch_size)
  jax.block_until_ready((state, batch))
  seconds = []
  for _ in range(spec["warmup"] + spec["steps"]):
    start = time.perf_counter()
    state, metrics = strategy.train_step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - start)
  loss = float(metrics["loss"])
  if not math.isfinite(loss):
    raise ConfigError(f"the loss is {loss}")
  peak = hardware.memory_in_use(devices).get("memory_peak_gib")
  return {
    "seconds": seconds[spec["warmup"] :],
    "loss": loss,
    "peak_bytes": peak and int(peak * 2**30),
  }


def measure_peaks(spec: dict[str, Any]) -> dict[str, float]:
  """The peak speeds of one device, or of all cores of a CPU: FLOP/s of a matrix product and bytes/s of a copy."""
  config = base.get_config("lm", "single")
  config.update(simulated_devices=1, compilation_cache_dir="")
  n, length = (2048, 1 << 26) if start_jax(config)[0].platform == "cpu" else (8192, 1 << 28)
  x, long = jax.random.normal(jax.random.key(0), (n, n), spec["dtype"]), jnp.ones(length, jnp.float32)
  return {
    "flops": 2 * n**3 / _best(jax.jit(lambda x: x @ x), x),
    "copy_bandwidth": 2 * long.nbytes / _best(jax.jit(lambda x: x + 1), long),  # read and written
    "dtype": x.dtype.name,
  }


def _best(work: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
  """The fewest seconds of ten calls, after one call that compiles."""
  taken = []
  for _ in range(11):
    start = time.perf_counter()
    jax.block_until_ready(work(x))
    taken.append(time.perf_counter() - start)
  return min(taken[1:])


TASKS = {
  "machine": describe_machine,
  "compile": compile_step,
  "steps": time_steps,
  "peaks": measure_peaks,
}


def main(tasks: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
  """Reads a specification and prints the result of its task."""
  spec = json.load(sys.stdin)
  try:
    result = tasks[spec["task"]](spec)
  except Exception as error:  # reported in this cell's row; the other rows do not depend on it
    if not isinstance(error, ConfigError):
      traceback.print_exc()
    result = {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
  print(json.dumps(result))


if __name__ == "__main__":
  main(TASKS)
