"""Workdirs of runs that nobody ran, for tests of their pages."""

import json
import math
from pathlib import Path
from typing import Any

from configs import base

PARTS = {"set-up": 2.0, "train": 30.5, "other": 0.5}


def made(workdir: Path, steps: int = 100, **config: Any) -> Path:
  """A run that was stopped at step 40 and started again from there, with one value that was not finite."""
  workdir.mkdir(parents=True, exist_ok=True)
  fields = base.get_config("tiny", "fsdp").to_dict() | {"steps": steps} | config
  fields["init_from"] = "/a/very/long/path/without/a/space/" + 20 * "in-which-nothing-can-be-broken-"
  (workdir / "config.json").write_text(json.dumps(fields))
  lines = []
  for step in range(10, steps + 1, 10):
    values = {"loss": 2 + math.exp(-step / 30), "learning_rate": 1e-3 / step, "grad_norm": 1.5, "step_ms": 7.25}
    values |= {"tokens_per_second": 1000.0 + step, "memory_gib": 1.5} | ({"skipped_updates": 2} if step == 30 else {})
    lines.append({"step": step, "split": "train", **values} | ({"loss": None} if step == 30 else {}))
    if step % 20 == 0:
      several = {"loss/code": 2.5, "loss/prose": 3.5, "epochs/code": step / 50}
      several |= {f"loss_at/{position}": 4 - position / step for position in (1, 2, 16, 4, 8)}
      lines.append({"step": step, "split": "validation", "loss": 3 + 1 / step, "bits_per_byte": 4.0, **several})
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  about = {"devices": "8 × CPU device, simulated", "strategy": "fsdp on mesh data=8", "versions": {"jax": "1.2.3"}}
  about["command"] = f"python train.py --config.init_from={fields['init_from']}"
  events = [
    {"event": "start", "step": 0, "time": 1e9, "wall_time": {"set-up": 1.0}, **about},
    {"event": "healed", "step": 20, "time": 1e9 + 30, "pieces": [{"array": "params/head", "device": 3}]},
    {"event": "stop", "step": 40, "time": 1e9 + 60, "wall_time": PARTS, "by": "SIGTERM"},
    {"event": "start", "step": 40, "time": 1e9 + 99, "wall_time": {"set-up": 1.0}, **about},
    {"event": "end", "step": steps, "time": 1e9 + 150, "wall_time": PARTS, "sample": "def f(<x>):\n  pass" + 300 * "x"},
  ]
  (workdir / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
  for step in (80, 100):
    (workdir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
  return workdir
