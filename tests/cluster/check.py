"""Compares the files of an interrupted job with those of an uninterrupted one; slurm.sh runs it.

python tests/cluster/check.py FOLDER STEPS, where FOLDER holds the workdirs and logs of both.
"""

import json
import re
import sys
from pathlib import Path

# Time and memory, which differ between runs. Everything else in a line of metrics.jsonl must be equal, bit for bit.
MEASURED = {"tokens_per_second", "step_ms", "data_wait", "tflops_per_second", "memory_gib", "memory_peak_gib"}


def lines(workdir: Path) -> list[dict]:
  """The lines of a run's metrics.jsonl, without time and memory. Those of the split "job" hold nothing else."""
  found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{name: x for name, x in line.items() if name not in MEASURED} for line in found if line["split"] != "job"]


def mistakes(folder: Path, steps: int) -> list[str]:
  """What is wrong with the interrupted job: one sentence for each mistake."""
  log = (folder / "interrupted.log").read_text()
  stopped, resumed = (
    [int(n) for n in re.findall(what, log)] for what in (r"after step (\d+);", r"resumed   at step (\d+)")
  )
  found = []
  if len(resumed) != 2 or not 0 < resumed[0] < resumed[1] < steps:
    found.append(f"it resumed at steps {resumed}, but two increasing steps between 0 and {steps} are expected")
  if stopped != resumed:
    found.append(f"it stopped at steps {stopped}, but resumed at steps {resumed}")
  if (folder / "interrupted" / "previous-1").exists():
    found.append("it started over: there is a folder previous-1")
  want, have = lines(folder / "uninterrupted"), lines(folder / "interrupted")
  if [line["step"] for line in want if line["split"] == "train"] != list(range(1, steps + 1)):
    found.append("the uninterrupted job has not written a line for each step")
  if len(have) != len(want):
    found.append(f"it wrote {len(have)} lines of metrics, but the uninterrupted job wrote {len(want)}")
  found += [f"{a} in the uninterrupted job is {b} in this one" for a, b in zip(want, have, strict=False) if a != b][:3]
  if not found:
    print(f"stopped at steps {stopped[0]} and {stopped[1]} of {steps}; all {len(want)} lines of metrics are the same")
  return found


if __name__ == "__main__":
  wrong = mistakes(Path(sys.argv[1]), int(sys.argv[2]))
  for sentence in wrong:
    print(f"error: {sentence}", file=sys.stderr)
  sys.exit(bool(wrong))
