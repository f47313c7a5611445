"""A stand-in for the processes that measure throughput. It answers immediately."""

from collections.abc import Sequence
from typing import Any

import strategies
from configs import base
from lab.benchmarks import figures, throughput
from strategies.execution.mesh import fitted, resolve

HARDWARE = {
  "simulated": True, "platform": "cpu", "kind": "cpu", "devices": None, "device_memory_bytes": None,
  "peak_flops": None, "cpu": "made up", "cores": 2, "memory_bytes": 2**34,
}  # fmt: skip
FOUND = {"hardware": HARDWARE, "versions": {"python": "3", "jax": "0"}}
GPUS = {"hardware": HARDWARE | {"simulated": False, "platform": "gpu", "devices": 4, "kind": "NVIDIA H100"}} | {
  "versions": {}
}


class Machine:
  """Answers like the processes that measure, with the same seconds for a cell each time.

  `slower` maps a cell's name to how many times slower than the reference it is. Other cells are as fast as it.
  """

  def __init__(self, slower: dict[str, float] | None = None, found: dict[str, Any] = FOUND):
    self.slower, self.found, self.asked = slower or {}, found, []

  def __call__(self, command: Sequence[str], spec: dict[str, Any]) -> dict[str, Any]:
    task, devices = spec.get("task"), spec.get("devices")
    name = f"{spec['config']['strategy']}/{devices}" if "config" in spec else str(task)
    self.asked.append((task, name))
    if task == "machine":
      return self.found
    if task == "peaks":
      return {"flops": 4e11, "copy_bandwidth": 2e10, "dtype": "float32"}
    if task == "compile":
      mesh = dict(resolve(fitted(strategies.layout_of(spec["config"]["strategy"]), devices), devices).mesh)
      return {"mesh": mesh, "said": "", "compile_seconds": 3.0, "bytes": {"total": 10**8 // devices}, "predicted": None}
    factor = self.slower.get(name, 1.0)
    return {"seconds": [factor * s for s in (1.0, 0.9, 1.1)][: spec["steps"]], "loss": 4.5, "versions": {}} | (
      {"precision": f"float32, {'compiled' if spec['compiled'] else 'eager'}"} if "attention" in spec else {}
    )


def measured(*arguments: str, run: Machine | None = None, preset: str = "throughput") -> figures.Record:
  """The record that the throughput command makes with these options on `run`."""
  run = run or Machine()
  options, rest = throughput.parse(list(arguments))
  assert not rest
  return throughput.measure(base.get_config(preset, "single"), options, run.found, run)
