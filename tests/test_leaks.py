"""A long run needs no more than a short one: memory, arrays, open files and threads stay what they were."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

STEPS, EVERY, WARM = 3000, 100, 1000
RUN = (
  "--config=configs/fsdp.py:tiny", "--config.data.name=synthetic", "--config.model.depth=1", "--config.model.width=32",
  "--config.model.heads=2", "--config.model.kv_heads=2", "--config.model.mlp_width=32", "--config.model.seq_len=8",
  "--config.simulated_devices=2", f"--config.steps={STEPS}", "--config.eval_every=250", "--config.eval_examples=32",
  "--config.checkpoint.every=250", "--config.checkpoint.keep=2", "--config.compilation_cache_dir=",
)  # fmt: skip
# Writes what the process holds after some steps, and leaks if a test asks for it.
MEASURED = """
import gc, json, os, runpy, sys, threading
import jax, numpy as np
from pathlib import Path
from checkpointing.save import Checkpoints
from reporting.reporter import Reporter

file, every, leaks = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
del sys.argv[1:4]
kept, after, entered, opened = [], Reporter.after, Checkpoints.__enter__, []

def remembered(self):
  opened.append(self)
  return entered(self)

def measured(self, step, metrics):
  if leaks:
    kept.append((np.ones(6000), metrics, open(os.devnull)))
  if step % every == 0:
    for checkpoints in opened:
      checkpoints.finish()  # a save holds copies of all arrays, for as long as the disk needs
    gc.collect()
    status = Path("/proc/self/status").read_text()
    held = {
      "step": step, "bytes": 1024 * int(status.partition("VmRSS:")[2].split()[0]), "arrays": len(jax.live_arrays()),
      "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
      "tasks": len(os.listdir("/proc/self/task")),
    }
    with open(file, "a") as out:
      print(json.dumps(held), file=out)
  return after(self, step, metrics)

Reporter.after, Checkpoints.__enter__ = measured, remembered
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what a process holds in /proc")
@pytest.mark.parametrize("leaks, grows", [(False, []), (True, ["arrays", "bytes", "files"])])
def test_a_run_of_3000_steps_holds_as_much_at_its_end_as_when_it_was_warm(leaks: bool, grows: list, tmp_path: Path):
  """To 5%. The second run keeps 48 kB of memory, the metrics and a file of each step, which the test must see."""
  file = tmp_path / "held.jsonl"
  command = [sys.executable, "-c", MEASURED, str(file), str(EVERY), str(leaks), *RUN, f"--workdir={tmp_path / 'run'}"]
  done = subprocess.run(
    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )  # fmt: skip
  assert done.returncode == 0, done.stdout
  held = [line for line in map(json.loads, file.read_text().splitlines()) if line["step"] >= WARM]
  assert held[-1]["step"] == STEPS - EVERY
  third = len(held) // 3
  usual = lambda lines, name: statistics.median(line[name] for line in lines)  # some arrays come and go with each step
  warm, last = held[:third], held[-third:]
  some = {"bytes": 0, "arrays": 0}  # of files and threads there are so few that a late pool of threads is many percents
  allowed = {name: max(1.05 * usual(warm, name), usual(warm, name) + some.get(name, 4)) for name in held[0]}
  assert sorted(name for name in held[0].keys() - {"step"} if usual(last, name) > allowed[name]) == grows, held
