"""Step `language_model`: the speed and memory of `lm_1b`, a language model of 1B parameters, trained with train.py.

It makes as many steps as give a steady speed, and reads its data as any run does. Several devices use FSDP, with a
global batch as many times larger.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs import base
from errors import ConfigError
from lab.benchmarks.accelerator.step import RESERVE, Aim, Measurement, Values, Verdict, Where
from lab.benchmarks.accelerator.training import TO_STOP, train
from reporting.pages.units import mfu

PRESET, STRATEGY = "lm_1b", "fsdp"  # on one device, fsdp is the single-device run
STEPS, EVERY = 60, 5  # steps to train, and between two lines of metrics
WARM_UP = 2  # lines that do not count
MFU, AIM_DEVICE = 0.60, "NVIDIA H200"  # as PaLM counts, like the published figures that it was chosen by


def measure(where: Where, train: Callable[..., list[dict[str, Any]]] = train, preset: str = PRESET) -> Values:
  """The speed, MFU and waiting for data: medians over the lines of metrics after the warm-up. And the peak memory."""
  asked = base.get_config(preset, STRATEGY)
  fields = {
    "batch_size": asked.batch_size * where.devices,
    "stop_after": STEPS, "log_every": EVERY, "eval_every": 0, "eval_examples": asked.eval_batch_size,
    "sample_length": 0, "checkpoint.minutes": 0.0,
  }  # fmt: skip
  arguments = [f"--config.{name}={value}" for name, value in fields.items()]
  with tempfile.TemporaryDirectory() as workdir:
    seconds = where.left() - TO_STOP - RESERVE
    lines = train([f"--config=configs/{STRATEGY}.py:{preset}", *arguments], Path(workdir), seconds)
  return {"preset": preset, "device": where.hardware["kind"], "batch_size": fields["batch_size"]} | steady(lines)


def steady(lines: Sequence[dict[str, Any]]) -> Values:
  """The medians of a run's lines of metrics. Raises ConfigError if too few were written."""
  trained = [line for line in lines if line["split"] == "train"]
  counted = trained[WARM_UP:]
  if not counted:
    raise ConfigError(f"the run ended after {len(trained)} lines of metrics, and the first {WARM_UP} do not count")
  median = lambda name: statistics.median(line[name] for line in counted) if name in counted[0] else None
  return {
    "steps": counted[-1]["step"],
    "tokens_per_second": median("tokens_per_second"),
    "step_ms": median("step_ms"),
    "all_step_ms": [line["step_ms"] for line in counted],
    "data_wait": median("data_wait"),
    "mfu": median("mfu"),
    "palm_mfu": median("palm_mfu"),
    "peak_gib": counted[-1].get("memory_peak_gib"),
    "loss": counted[-1]["loss"],
  }


def judge(values: Values) -> Verdict:
  broken = ("the loss is not finite",) if values["loss"] is None else ()
  reached = values["palm_mfu"]
  for_it = values["device"].startswith(AIM_DEVICE) and reached is not None
  got = "MFU unknown" if reached is None else f"MFU {reached:.1%} as PaLM counts"
  return Verdict(broken, Aim(f"{got}, of {MFU:.0%} on an {AIM_DEVICE}", reached >= MFU if for_it else None))


def row(values: Values) -> list[str]:
  """The cells of the table: speed, step time with its range, MFU, memory, batch."""
  low, high = min(values["all_step_ms"]), max(values["all_step_ms"])
  return [
    f"{values['tokens_per_second']:,.0f}",
    f"{values['step_ms']:,.0f} ({low:,.0f}–{high:,.0f}) ms",
    mfu(values["mfu"], values["palm_mfu"]) if values["mfu"] is not None else "–",
    f"{values['peak_gib']:.1f} GiB" if values["peak_gib"] is not None else "–",
    f"{values['data_wait']:.1%}",
    f"{values['batch_size']}",
  ]


STEP = Measurement(
  name="language_model",
  about=f"the speed and memory of `{PRESET}`, trained with train.py; on several devices with FSDP",
  promise="the run fails, or its loss is not finite",
  aim=f"an MFU of {MFU:.0%}, as PaLM counts, on an {AIM_DEVICE}",
  measure=measure,
  judge=judge,
  columns=("tokens/s", "Step", "MFU", "Peak memory", "Waiting for data", "Batch"),
  row=row,
)
