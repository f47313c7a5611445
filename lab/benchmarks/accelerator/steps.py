"""All steps, and how one runs: in a process of its own, which is ended with all that it started when its time is over.

python -m lab.benchmarks.accelerator.steps < SPEC      # the process of a step
"""

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from errors import ConfigError
from lab.benchmarks import rounds
from lab.benchmarks.accelerator import attention, blocks, cifar10, language_model, memory, parity, throughput
from lab.benchmarks.accelerator.step import LIMIT, Measurement, Values, Where, reason
from lab.benchmarks.pages import ROOT

STEPS: dict[str, Measurement] = {
  module.STEP.name: module.STEP for module in (parity, blocks, throughput, attention, memory, cifar10, language_model)
}
COMMAND = (sys.executable, "-m", "lab.benchmarks.accelerator.steps")
FOLDER = ROOT / "runs" / "accelerator"


def run(
  name: str, found: Mapping[str, Any], peer_python: str, limit: float = LIMIT, command: Sequence[str] = COMMAND
) -> Values:
  """Runs a step in a process of its own. Returns {"values": ...}, or {"error": WHY}. Its output is ours.

  Args:
    found: the `hardware` and `versions` of the machine.
    limit: seconds.
  """
  with tempfile.TemporaryDirectory() as folder:
    result = Path(folder) / "result.json"
    spec = {"step": name, "limit": limit, "result": str(result), "peer_python": peer_python, **found}
    # In a session of its own, so that everything it starts can be ended with it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True, text=True)
    try:
      process.communicate(json.dumps(spec), timeout=limit)
    except subprocess.TimeoutExpired:
      return {"error": f"not finished after {limit:.0f} s, the limit of a step"}
    finally:
      rounds.end(process)
    if result.exists():
      return json.loads(result.read_text())
  return {"error": f"its process ended with exit status {process.returncode}"}


def measure(spec: Mapping[str, Any], steps: Mapping[str, Measurement] = STEPS) -> Values:
  """What the process of a step does: {"values": ...}, or {"error": WHY}."""
  step = steps[spec["step"]]
  deadline = time.monotonic() + spec["limit"]
  where = Where(spec["hardware"], spec["versions"], FOLDER, spec["peer_python"], deadline)
  if not step.uses_devices:
    jax.config.update("jax_platforms", "cpu")  # leaves the accelerators to the processes that it starts
  try:
    return {"values": step.measure(where)}
  except Exception as error:
    if not isinstance(error, ConfigError):
      traceback.print_exc()
    return {"error": reason(error)}


def main() -> None:
  spec = json.load(sys.stdin)
  Path(spec["result"]).write_text(json.dumps(measure(spec)))


if __name__ == "__main__":
  main()
