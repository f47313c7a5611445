"""What tests ask of compiled steps, with the laboratory. helpers.py does without it."""

import collections
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import ROOT

from lab.analysis import theory
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep
from lab.analysis.hlo import Module

# Runs a command and prints the most memory that it had, in kB.
LAUNCHER = """
import resource, subprocess, sys
# Linux counts the memory of the process that starts another as the other's, so a small one stands between.
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def loops_beside_sends(module: Module) -> list[set[str]]:
  """For each permute of a compiled program, the scopes of the loops that run between its start and its end."""
  found = []
  for computation in module.computations.values():
    names = list(computation)
    for end in (one for one in computation.values() if one.operation == "collective-permute-done"):
      between = names[names.index(end.operands[0]) : names.index(end.name)]
      loops = (computation[name].op_name.split("/") for name in between if computation[name].operation == "while")
      found.append({path[-2] for path in loops if len(path) > 1})
  return found


def explained_in_8_gb(folder: Path, model: Mapping[str, Any], *arguments: str) -> dict[str, Any]:
  """What the command `explain` finds for FSDP with these sizes of the model. Fails if it takes more than 8 GB."""
  file, sizes = folder / "found.json", [f"--config.model.{name}={size}" for name, size in model.items()]
  command = [sys.executable, "-m", "tools.explain", "--config=configs/fsdp.py", f"--json={file}", *sizes, *arguments]
  measured = subprocess.run([sys.executable, "-c", LAUNCHER, *command], cwd=ROOT, stdout=subprocess.PIPE, check=True)
  assert int(measured.stdout) < 8e6  # kB
  return json.loads(file.read_text())


def holds_all_logits(case: Case, step: CompiledStep) -> bool:
  """Whether a compiled step has an array in memory with the logits of all tokens of one part on one device."""
  tokens = case.examples * case.sizes.positions
  others = {case.sizes.width, case.sizes.mlp_width}
  assert not {case.outputs, tokens} & others, "another array would have the same shape"
  found = (shape for visit in step.module.walk(step.rounds) if not visit.fused for shape in visit.instruction.shapes)
  return any(shape.size == tokens * case.outputs and case.outputs in shape.dims for shape in found)


def sent_and_wanted(case: Case, step: CompiledStep) -> tuple[dict, dict]:
  """Bytes that a device sends in a step by (kind, axes): in the compiled program, and by the formulas."""
  ours: collections.Counter = collections.Counter()
  for collective in step.collectives():
    assert collective.times, f"nothing says how often {collective} runs"
    ours[collective.kind, collective.axes] += collective.sent_in_step
  wanted: collections.Counter = collections.Counter()
  for row in theory.sent(case):
    wanted[row.kind, row.axes] += row.bytes
  return ours, wanted
