"""Step `cifar10`: trains the preset `cifar10_gpu` with train.py, as a user would; records the accuracy and the time.

A run that is longer than a step is stopped in time, and the next call of the step continues from its checkpoint.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import base
from lab.benchmarks import tables
from lab.benchmarks.accelerator.step import Aim, Measurement, Values, Verdict, Where, say
from lab.benchmarks.accelerator.training import TO_STOP, last, train
from reporting.metrics import read
from reporting.pages.units import mfu

PRESET, STRATEGY, ACCURACY = "cifar10_gpu", "data_parallel", 0.94
SPENT = "spent.json"  # in the run's folder: the seconds of each call, as a list


def measure(where: Where, train: Callable[..., list[dict[str, Any]]] = train) -> Values:
  """The accuracy on the test images, the steps done and the seconds of all calls together."""
  asked = base.get_config(PRESET, STRATEGY)
  workdir = folder(where.folder, asked)
  spent = seconds_of(workdir)
  if spent:
    say(f"continues the run in {workdir}, which has taken {sum(spent):.0f} s so far")
  start = time.monotonic()
  lines = train([f"--config=configs/{STRATEGY}.py:{PRESET}"], workdir, where.left() - TO_STOP - 30)
  spent = [*spent, time.monotonic() - start]
  (workdir / SPENT).write_text(json.dumps(spent) + "\n")
  trained, validated = last(lines, "train"), last(lines, "validation")
  return {
    "steps": asked.steps,
    "step": max((line["step"] for line in lines), default=0),
    "seconds": spent,
    "accuracy": validated and validated["accuracy"],
    "images_per_second": trained and trained["images_per_second"],
    "data_wait": trained and trained["data_wait"],
    "mfu": trained and trained.get("mfu"),
    "palm_mfu": trained and trained.get("palm_mfu"),
  }


def folder(root: Path, asked: Any) -> Path:
  """The folder of a run that has not ended yet, or else a new one. Another config gets folders of its own."""
  name = f"{PRESET}-{tables.digest(asked.to_dict())[:8]}"
  number = 1
  while finished(root / f"{name}-{number}", asked.steps):
    number += 1
  return root / f"{name}-{number}"


def finished(workdir: Path, steps: int) -> bool:
  """Whether a run has made its last evaluation."""
  ended = last(read(workdir / "metrics.jsonl"), "validation")
  return ended is not None and ended["step"] >= steps


def seconds_of(workdir: Path) -> list[float]:
  """The seconds of the calls so far; empty for a new run."""
  file = workdir / SPENT
  return json.loads(file.read_text()) if file.exists() else []


def judge(values: Values) -> Verdict:
  if values["step"] < values["steps"]:
    return Verdict((f"step {values['step']:,} of {values['steps']:,} so far; run this step again to continue",))
  accuracy = values["accuracy"]
  if accuracy is None:
    return Verdict(("the accuracy is not finite",))
  return Verdict(aim=Aim(f"{accuracy:.2%} of the test images, of {ACCURACY:.0%}", accuracy >= ACCURACY))


def row(values: Values) -> list[str]:
  """The cells of the table: accuracy, time, steps, speed."""
  accuracy = f"{values['accuracy']:.2%}" if values["accuracy"] else "–"
  calls = f" in {len(values['seconds'])} calls" if len(values["seconds"]) > 1 else ""
  speed = f"{values['images_per_second']:,.0f} images/s" if values["images_per_second"] else "–"
  share = mfu(values["mfu"], values["palm_mfu"]) if values["mfu"] is not None else "–"
  wait = f"{values['data_wait']:.1%}" if values["data_wait"] is not None else "–"
  done = f"{values['step']:,} of {values['steps']:,}"
  return [accuracy, f"{sum(values['seconds']) / 60:.1f} min{calls}", done, speed, share, wait]


STEP = Measurement(
  name="cifar10",
  about=f"the accuracy of `{PRESET}` on the 10,000 test images, and the time from the command to the end",
  promise="the run fails or has not ended; called again, it continues from its checkpoint",
  aim=f"{ACCURACY:.0%} of the test images",
  measure=measure,
  judge=judge,
  columns=("Accuracy", "Time", "Steps", "Speed", "MFU", "Waiting for data"),
  row=row,
)
