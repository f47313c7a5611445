"""A machine's record, lab/benchmarks/results/accelerator-COUNT-KIND.json, with an entry for each step that has run.

A step that runs again replaces its own entry and no other.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.benchmarks import header, throughput
from lab.benchmarks.accelerator.step import Values
from lab.benchmarks.pages import RESULTS
from runtime import device_memory

KIND = "accelerator"
# Settings outside the command that change what is measured.
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *device_memory.SETTINGS)


def path(hardware: Mapping[str, Any], results: Path = RESULTS) -> Path:
  """The file of a machine's record."""
  words = f"{KIND}-{hardware['devices']}-{hardware['kind']}"
  return results / (re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") + ".json")


def entry(name: str, found: Mapping[str, Any], begun: Values, result: Values, seconds: float) -> Values:
  """The entry of a step: its `values`, or its `error`; what made it, when, and how many seconds it took."""
  return {
    "command": f"python -m tools.benchmark accelerator --step={name}",
    "machine": throughput.described(found["hardware"]),
    "versions": found["versions"],
    "environment": {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)},
    **begun,
    "seconds": round(seconds, 1),
    **result,
  }


def add(file: Path, hardware: Mapping[str, Any], name: str, made: Values) -> None:
  """Writes a step's entry into a record. What was measured before is not replaced by an error."""
  record: Values = json.loads(file.read_text()) if file.exists() else {"kind": KIND, "steps": {}}
  record |= {"device": hardware["kind"], "devices": hardware["devices"]}
  if "values" in made or "values" not in record["steps"].get(name, {}):
    record["steps"][name] = made
  file.parent.mkdir(parents=True, exist_ok=True)
  header.write(file, record)


def read(results: Path = RESULTS) -> list[Values]:
  """The records of all machines, in the order of their names."""
  records = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
  return [record for record in records if record.get("kind") == KIND]
