"""Step `blocks`: what `lm_1b` gains without a loop over its blocks, with larger chunks of the loss, and with float8.

Each way is timed in a process of its own. The first is the loop, so a run that ends early has what the others are
compared with. Several devices use FSDP, with a global batch as many times larger.
"""

import statistics
from typing import Any

from configs import base
from lab.benchmarks import cells, rounds
from lab.benchmarks.accelerator.step import Aim, Measurement, Values, Verdict, Where, say
from models.flops import palm_flops_per_example
from training import settings

PRESET = "lm_1b"
CHUNK = 1024  # tokens of a chunk of the loss, before GPUs took larger ones
LOOP, UNROLLED = "loop", "unrolled, larger chunks"
WAYS: dict[str, dict[str, Any]] = {
  LOOP: {"model.unroll": "scan", "model.loss_chunk": CHUNK},
  "unrolled": {"model.unroll": "all", "model.loss_chunk": CHUNK},
  UNROLLED: {"model.unroll": "all"},
  "float8": {"model.unroll": "all", "model.products": "float8"},
  "float8, Triton's kernels": {"model.unroll": "all", "model.products": "float8", "compiler_options": "default"},
}
FLOAT8 = tuple(name for name in WAYS if name.startswith("float8"))
WARM_UP, STEPS = 3, 12
MFU, GAIN, AIM_DEVICE = 0.60, 1.28, "NVIDIA H"  # as PaLM counts, in bfloat16; and how much faster float8 is


def spec(name: str, devices: int, preset: str = PRESET) -> dict[str, Any]:
  """The specification of a way (worker.py)."""
  asked = base.get_config(preset, "single")
  asked.update_from_flattened_dict(WAYS[name])
  asked.update(compilation_cache_dir="", batch_size=asked.batch_size * devices)
  made = cells.training(asked, "single" if devices == 1 else "fsdp", devices)
  return made | {"task": "steps", "warmup": WARM_UP, "steps": STEPS, "peaks": None}


def measure(where: Where, run: rounds.Run | None = None, preset: str = PRESET) -> Values:
  """For each way its times, or `error`, which says why there are none."""
  found = {}
  for name in WAYS:
    found[name] = made = where.run(cells.WORKER, spec(name, where.devices, preset), run=run)
    say(f"{name:<24} {made.get('error') or made['seconds']}")
  asked = base.get_config(preset, "single")
  flops = asked.batch_size * palm_flops_per_example(settings.program(asked, where.hardware["platform"]).sizes)
  return {"device": where.hardware["kind"], "peak": where.hardware["peak_flops"], "flops": flops, "ways": found}


def seconds(values: Values, *names: str) -> float | None:
  """The median time of a step in the fastest of some ways; None if none of them was measured."""
  known = [values["ways"][name] for name in names]
  return min((statistics.median(one["seconds"]) for one in known if "seconds" in one), default=None)


def judge(values: Values) -> Verdict:
  broken = tuple(f"{name}: {one['error']}" for name, one in values["ways"].items() if "error" in one)
  plain, fast = seconds(values, *(name for name in WAYS if name not in FLOAT8)), seconds(values, *FLOAT8)
  if not plain or not fast or not values["peak"]:
    return Verdict(broken)
  share, gain = values["flops"] / plain / values["peak"], plain / fast
  text = f"MFU {share:.1%} as PaLM counts, of {MFU:.0%}; float8 {gain:.2f} times as fast, of {GAIN}"
  for_it = values["device"].startswith(AIM_DEVICE)
  return Verdict(broken, Aim(text, share >= MFU and gain >= GAIN if for_it else None))


def row(values: Values) -> list[str]:
  """For each way the time of a step, to that of the loop, the peak memory, and the loss of the last step."""
  first = seconds(values, LOOP)

  def cell(name: str) -> str:
    made = values["ways"][name]
    taken, peak = seconds(values, name), made.get("peak_bytes")
    if taken is None:
      return "not measured"
    beside = f", {taken / first:.2f}" if first and name != LOOP else ""
    memory = [f"{peak / 2**30:.1f} GiB"] if peak else []
    return "; ".join([f"{1e3 * taken:,.0f} ms{beside}", *memory, f"{made['loss']:.2f}"])

  return [cell(name) for name in WAYS]


STEP = Measurement(
  name="blocks",
  about=f"a step of `{PRESET}` as a loop over blocks, without it, with larger chunks of the loss, and in float8",
  promise="one of the ways fails",
  aim=f"an MFU of {MFU:.0%} as PaLM counts in bfloat16, and float8 {GAIN} times as fast, on an H100 or H200",
  measure=measure,
  judge=judge,
  columns=tuple(WAYS),
  row=row,
  platforms=("gpu",),
)
