"""Step `memory`: the memory that our formulas predict and that the compiler plans, against the real peak.

    python -m lab.benchmarks.accelerator.memory < SPEC      # one case, as lab/benchmarks/worker.py measures a cell

Each case runs a few steps in a process of its own, because a process's peak never falls. Its batch is as large as the
prediction lets fit into a good half of the device.
"""

import tempfile
from collections.abc import Callable
from typing import Any

from configs import base
from errors import ConfigError
from lab.analysis import memory
from lab.analysis.case import Case
from lab.benchmarks import cells, rounds, worker
from lab.benchmarks.accelerator.step import Measurement, Values, Verdict, Where, say
from strategies import Strategy

SHARE = 0.6  # of a device's memory: large enough to matter, and room for a prediction that is too low
BOUND = 0.15  # how far a prediction may be from the real peak
LARGEST = 1024  # examples of one device, and on eight as many as the synthetic data has
COMMAND = (*cells.WORKER[:-1], "lab.benchmarks.accelerator.memory")

# A preset, and the fields to change.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
  "256M": ("throughput_gpu", {}),
  "256M, documents": ("throughput_gpu", {"data.packing": "documents"}),
  "256M, large vocabulary": ("throughput_gpu", {"model.vocab_size": 131_072}),
  "1B, remat dots": ("lm_1b", {"model.remat": "dots"}),
  "1B, remat full": ("lm_1b", {"model.remat": "full"}),
  "images": ("cifar10_gpu", {"model.pixel_mean": (0.5,) * 3, "model.pixel_std": (0.5,) * 3}),
}


def spec(name: str, where: Where, cache: str) -> dict[str, Any]:
  """The specification of a case. Devices are used as they would be: several of them shard the weights, too."""
  preset, fields = CASES[name]
  asked = base.get_config(preset, "single")
  asked.update_from_flattened_dict(fields)
  asked.update(compilation_cache_dir=cache, batch_size=where.devices)
  strategy = "single" if where.devices == 1 else "fsdp"
  made = cells.training(asked, strategy, where.devices)
  return made | {"task": "case", "room": int(SHARE * where.hardware["device_memory_bytes"])}


def measure_case(asked: dict[str, Any]) -> dict[str, Any]:
  """The bytes of a case on one device: `predicted`, `compiler` and `real` (None: the backend reports no peak).

  If even the smallest batch does not fit, `left_out` says so.
  """
  config, devices, strategy = worker.set_up(asked)
  batch_size = largest(lambda size: predicted(strategy, size), len(devices), asked["room"])
  if not batch_size:
    needed = predicted(strategy, len(devices))
    return {"left_out": f"too large: needs {needed / 1e9:.1f} GB, of {asked['room'] / 1e9:.1f} GB to use here"}
  config.batch_size = batch_size
  asked = asked | {"config": config.to_dict(), "warmup": 1, "steps": 2, "peaks": None}
  compiled = worker.compile_step(asked)
  return {
    "batch_size": batch_size,
    "remat": config.model.remat,
    "predicted": predicted(strategy, batch_size),
    "compiler": compiled["bytes"]["total"],
    "real": worker.time_steps(asked)["peak_bytes"],
  }


def predicted(strategy: Strategy, batch_size: int) -> float:
  """The bytes that our formulas predict for one device."""
  platform = strategy.mesh.devices.flat[0].platform
  return memory.of(Case.of(strategy, batch_size, platform)).total


def largest(needed: Callable[[int], float], devices: int, room: float) -> int:
  """The largest batch, of a power of two of examples a device, that needs at most `room` bytes; 0 if none does."""
  if needed(devices) > room:
    return 0
  size = devices
  while size < LARGEST * devices and needed(2 * size) <= room:
    size *= 2
  return size


def measure(where: Where, run: rounds.Run | None = None) -> Values:
  """The values of all cases; of one that could not be measured, `error` or `left_out`, which say why."""
  if not where.hardware["device_memory_bytes"]:
    raise ConfigError("the backend does not report the memory of a device, so nothing can be compared with it")
  found = {}
  for name in CASES:
    with tempfile.TemporaryDirectory() as cache:
      found[name] = made = where.run(COMMAND, spec(name, where, cache), run=run)
    say(f"{name:<24} {shown(made)}")
  return {"limit": where.hardware["device_memory_bytes"], "bound": BOUND, "cases": found}


def judge(values: Values) -> Verdict:
  broken = []
  if all("left_out" in case for case in values["cases"].values()):
    broken.append("every case is too large for this device")
  for name, case in values["cases"].items():
    if "left_out" in case:
      continue
    if "error" in case:
      broken.append(f"{name}: {case['error']}")
    elif not case["real"]:
      broken.append(f"{name}: the backend reports no peak")
    elif abs(case["predicted"] / case["real"] - 1) > values["bound"]:
      ratio = case["predicted"] / case["real"]
      broken.append(f"{name}: predicted {ratio:.2f} of the real peak, more than {values['bound']:.0%} off")
  return Verdict(tuple(broken))


def shown(case: Values) -> str:
  """The peak of a case and both ratios, or why there are none."""
  if why := case.get("error") or case.get("left_out"):
    return why
  if not case["real"]:
    return "no peak reported"
  ratios = (f"{case[what] / case['real']:.2f}" for what in ("predicted", "compiler"))
  return f"{case['real'] / 1e9:.1f} GB: {' / '.join(ratios)}"


def row(values: Values) -> list[str]:
  return [shown(values["cases"][name]) if name in values["cases"] else "–" for name in CASES]


STEP = Measurement(
  name="memory",
  about=f"the real peak of a step's memory in {len(CASES)} cases, beside the prediction and the compiler's plan",
  promise=f"a prediction is more than {BOUND:.0%} from the real peak, or a case that fits cannot be measured",
  aim="",
  measure=measure,
  judge=judge,
  columns=tuple(f"{name}: peak; predicted / compiler" for name in CASES),
  row=row,
)

if __name__ == "__main__":
  worker.main({"case": measure_case})
