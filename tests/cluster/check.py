"""Compares the files of jobs that were hurt or interrupted with those of an undisturbed one; slurm.sh runs it.

python tests/cluster/check.py FOLDER STEPS, where FOLDER holds the workdirs and logs of all.
"""

import json
import math
import re
import sys
from pathlib import Path

# Time and memory, which differ between runs. Everything else in a line of metrics.jsonl must be equal, bit for bit.
MEASURED = {"tokens_per_second", "step_ms", "data_wait", "tflops_per_second", "memory_gib", "memory_peak_gib"}


def lines(workdir: Path) -> list[dict]:
  """The lines of a run's metrics.jsonl, without time and memory. Those of the split "job" hold nothing else."""
  found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{name: x for name, x in line.items() if name not in MEASURED} for line in found if line["split"] != "job"]


def interrupted(folder: Path, steps: int) -> list[str]:
  """What is wrong with how the interrupted job was stopped and resumed: one sentence for each mistake."""
  log = (folder / "interrupted.log").read_text()
  stopped, resumed = (
    [int(n) for n in re.findall(what, log)] for what in (r"after step (\d+);", r"resumed   at step (\d+)")
  )
  found = []
  if len(resumed) != 2 or not 0 < resumed[0] < resumed[1] < steps:
    found.append(f"it resumed at steps {resumed}, but two increasing steps between 0 and {steps} are expected")
  # SLURM may cut off what tasks print while it requeues their job, so the first line can be missing.
  if stopped not in (resumed, resumed[1:]):
    found.append(f"it stopped at steps {stopped}, but resumed at steps {resumed}")
  if not found:
    print(f"the interrupted job resumed at steps {resumed[0]} and {resumed[1]} of {steps}")
  return found


def hurt(folder: Path, steps: int) -> list[str]:
  """What is wrong with how the job that was hurt healed."""
  log = (folder / "hurt.log").read_text()
  said = re.findall(
    r"^restart   process (\d) of 2 on \S+ (was killed by SIGKILL|made no progress).*", log, re.MULTILINE
  )
  if said != [("1", "was killed by SIGKILL"), ("0", "made no progress")]:
    return [f"its supervisor said {said}, but a killed task 1 and a task 0 that hangs are expected"]
  if log.count("resumed   at step") != 3:
    return [f"it resumed {log.count('resumed   at step')} times, but 3 times are expected"]
  print("\n".join(re.findall("^restart .*", log, re.MULTILINE)))
  return []


def fewer(folder: Path, steps: int) -> list[str]:
  """What is wrong with how a job went on when one of its nodes was gone."""
  log = (folder / "fewer.log").read_text()
  print("\n".join(re.findall("^restart .*", log, re.MULTILINE)))
  return [] if "processes was 2 and is now 1" in log else ["it did not go on with one process"]


def equal(a: dict, b: dict, relative: float) -> bool:
  """Whether two lines are equal, with a relative error of their numbers."""
  close = lambda x, y: math.isclose(x, y, rel_tol=relative) if isinstance(x, float) and isinstance(y, float) else x == y
  return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)


def mistakes(folder: Path, name: str, steps: int) -> list[str]:
  """What is wrong with a job's metrics, and with how it was disturbed."""
  check, relative = JOBS[name]
  found = check(folder, steps)
  if (folder / name / "previous-1").exists():
    found.append("it started over: there is a folder previous-1")
  want, have = lines(folder / "uninterrupted"), lines(folder / name)
  if [line["step"] for line in want if line["split"] == "train"] != list(range(1, steps + 1)):
    found.append("the uninterrupted job has not written a line for each step")
  if len(have) != len(want):
    found.append(f"it wrote {len(have)} lines of metrics, but the uninterrupted job wrote {len(want)}")
  pairs = zip(want, have, strict=False)
  found += [f"{a} in the uninterrupted job is {b} in this one" for a, b in pairs if not equal(a, b, relative)][:3]
  if not found:
    print(f"the {name} job: all {len(want)} lines of metrics are the same" + (f" to {relative:g}" if relative else ""))
  return found


# What must be right besides the metrics, and their relative error: other numbers of devices sum in other orders.
JOBS = {"hurt": (hurt, 0.0), "fewer": (fewer, 1e-5), "interrupted": (interrupted, 0.0)}


if __name__ == "__main__":
  wrong = [(name, text) for name in JOBS for text in mistakes(Path(sys.argv[1]), name, int(sys.argv[2]))]
  for name, sentence in wrong:
    print(f"error: the {name} job: {sentence}", file=sys.stderr)
  sys.exit(bool(wrong))
