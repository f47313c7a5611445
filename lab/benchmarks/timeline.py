"""Records when kernels and links of a step work, with the recommended compiler options and without.

    python -m tools.benchmark timeline        # compiles FSDP of 7 billion parameters for 64 TPUs twice (a few minutes)

Writes lab/benchmarks/results/timeline.json, which the site draws (lab/views/step_timeline.py). Needs no TPU, only its
compiler: pip install '.[topology]'.
"""

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

import strategies
from lab.analysis import spans
from lab.analysis.compiled import compile_step
from lab.analysis.overlap import Overlap
from lab.analysis.topology import machine_of
from lab.benchmarks.header import cpu, started, write
from lab.benchmarks.pages import RESULTS
from lab.benchmarks.predictions import COMPILER, Prediction, config
from strategies.execution.options import CHOICES
from training import settings

FILE = RESULTS / "timeline.json"
CASE: Prediction = ("fsdp", "v5p:4x4x4", "7B", 4096, 64, "dots", {})


def record(found: Mapping[str, Overlap], begun: dict[str, Any]) -> dict[str, Any]:
  """What the file holds: for each choice of compiler options, the step's seconds and its panels.

  Args:
    begun: what `header.started` returned before.
  """
  package = COMPILER[machine_of(CASE[1]).platform]
  return {
    "command": "python -m tools.benchmark timeline",
    "machine": f"compiled on {os.cpu_count()} cores of {cpu()}",
    "versions": {"jax": jax.__version__, package: metadata.version(package)},
    **begun,
    "case": list(CASE),
    "choices": {
      choice: {
        "kernels": overlap.kernels,
        "sent": overlap.sent,
        "exposed": overlap.exposed,
        "panels": spans.panels(overlap),
      }
      for choice, overlap in found.items()
    },
  }


def measure(choice: str) -> Overlap:
  """Compiles the step with one of CHOICES, and follows it."""
  asked, where = config(CASE), machine_of(CASE[1])
  asked.compiler_options = choice
  strategy = strategies.create(asked, settings.program(asked, where.platform), where.devices())
  links = where.links_of(strategy.mesh)
  return compile_step(strategy, asked.batch_size).overlap(where.chip, links)


def main() -> None:
  begun = started()
  write(FILE, record({choice: measure(choice) for choice in reversed(CHOICES)}, begun), indent=None)
