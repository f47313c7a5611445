"""Compares what a fixed list of steps needs with two versions of jax: memory, FLOPs, traffic, bytes sent, exposed time.

    python -m tools.benchmark upgrade                              # the jax of this Python, beside the record
    python -m tools.benchmark upgrade .venv/bin/python .venv-3.13/bin/python    # the jax of each of these
    python -m tools.benchmark upgrade --record .venv/bin/python .venv-3.13/bin/python    # writes it as the record
    python -m tools.benchmark upgrade --tables                     # writes the page's list from the existing record

`make upgrade-check` runs it with every environment that is there. Compiles for CPUs, TPUs and GPUs without running
anything (some minutes a Python), and leaves out those whose compiler is not installed.

Ends with status 1 if the newest jax needs over a tenth more than the lowest figure of the record. A known case has a
note in the record, `notes[step][figure]`, that says why; then it may need a tenth more than the highest figure. Writing
the record keeps a note as long as its figure stays within this limit, and drops it once nobody needs it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

import strategies
from configs import base
from errors import ConfigError
from lab.analysis.compiled import compile_step
from lab.analysis.topology import machine_of
from lab.benchmarks.header import cpu, source, started, write
from lab.benchmarks.pages import RESULTS, ROOT, rewrite
from lab.benchmarks.predictions import MODELS
from runtime import command_line
from runtime.devices import has_gpu_compiler
from training import settings

PAGE, RECORD = ROOT / "docs" / "thousand-chips.md", RESULTS / "upgrade.json"
COMMAND = "make upgrade-check RECORD=1"
MORE = 1.1  # a figure may be so many times the recorded one
NOTHING = 1e-5  # seconds: a shorter exposed time is as good as none
UNITS = {
  "memory": (1e9, "GB"),
  "flops": (1e12, "TFLOP"),
  "traffic": (1e9, "GB"),
  "sent": (1e9, "GB"),
  "exposed": (1e-3, "ms"),
}
PACKAGES = ("jax", "libtpu", "jax-cuda13-pjrt")
CPUS = "cpu:8"  # simulated; other machines are those of lab/analysis/topology.py

Record = dict[str, Any]
Figures = Mapping[str, Mapping[str, float]]  # by step and figure; CPUs have no exposed time


class Step(NamedTuple):
  """A training step, by the flags with which `tools.explain` explains it."""

  strategy: str
  machine: str
  preset: str
  fields: dict[str, Any]

  @property
  def command(self) -> str:
    """The command that explains this step."""
    where = "" if self.machine == CPUS else f" --topology={self.machine}"
    fields = "".join(f" --config.{name}={value}" for name, value in self.fields.items())
    return f"python -m tools.explain --config=configs/{self.strategy}.py:{self.preset}{where}{fields}"


def _large(model: str, length: int, batch_size: int, remat: str) -> dict[str, Any]:
  sizes = {f"model.{name}": size for name, size in MODELS[model].items()}
  return sizes | {"model.seq_len": length, "model.remat": remat, "batch_size": batch_size}


_SMALL = {"model.width": 1024, "model.depth": 4, "model.heads": 8, "model.kv_heads": 8, "model.mlp_width": 4096}
_SMALL |= {"model.vocab_size": 4096, "model.seq_len": 512, "batch_size": 64}
STEPS = {
  "fsdp on CPUs": Step("fsdp", CPUS, "throughput", {}),
  "tensor_parallel on CPUs": Step("tensor_parallel", CPUS, "throughput", {}),
  "pipeline on CPUs": Step("pipeline", CPUS, "throughput", {}),
  "fsdp on v5e:2x4": Step("fsdp", "v5e:2x4", "lm", _SMALL),
  "fsdp on v5p:4x4x4": Step("fsdp", "v5p:4x4x4", "lm", _SMALL),
  "two_d on v5p:4x4x4": Step("two_d", "v5p:4x4x4", "lm", _SMALL | {"mesh.model": 4}),
  "lm_1b on h100:1x1, unrolled": Step("single", "h100:1x1", "lm_1b", {"model.unroll": "all"}),
  "fsdp of lm_1b on h100:1x8": Step("fsdp", "h100:1x8", "lm_1b", {"batch_size": 64, "model.unroll": "scan"}),
  "fsdp of lm_1b on h100:1x8, unrolled": Step("fsdp", "h100:1x8", "lm_1b", {"batch_size": 64, "model.unroll": "all"}),
  "fsdp of 7B on h100:32x8": Step("fsdp", "h100:32x8", "lm", _large("7B", 4096, 256, "dots")),
  "fsdp of 8B on h100:128x8": Step("fsdp", "h100:128x8", "lm", _large("8B, GQA", 8192, 1024, "full")),
  "two_d of 70B on h100:16x8": Step(
    "two_d", "h100:16x8", "lm", _large("70B, GQA", 4096, 128, "full") | {"mesh.model": 8}
  ),
}


def has_compiler(machine: str) -> bool:
  if machine == CPUS:
    return True
  return _is_installed("libtpu") if machine_of(machine).platform == "tpu" else has_gpu_compiler()


def measure(step: Step) -> dict[str, float]:
  """The compiler's figures of a step for one device."""
  asked = base.get_config(step.preset, step.strategy)
  asked.update_from_flattened_dict(step.fields)
  where = None if step.machine == CPUS else machine_of(step.machine)
  found = where.devices() if where else jax.devices()
  runner = strategies.create(asked, settings.program(asked, where.platform if where else "cpu"), found)
  compiled = compile_step(runner, asked.batch_size)
  links = where and where.links_of(runner.mesh)
  return {
    "memory": compiled.bytes,
    "flops": compiled.flops(),
    "traffic": compiled.traffic(),
    "sent": sum(one.sent_in_step for one in compiled.collectives()),
  } | ({"exposed": compiled.overlap(where.chip, links).exposed} if where and links else {})


def stack(steps: Mapping[str, Step] = STEPS) -> Record:
  """The figures of the steps with this Python's jax, and what made them. Uses the CPU, whatever else is there."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", int(CPUS.partition(":")[2]))
  begun, start, figures = started(), time.perf_counter(), {}
  for name, step in steps.items():
    if has_compiler(step.machine):
      figures[name] = measure(step)
      print(f"{time.perf_counter() - start:4.0f} s: {name}", file=sys.stderr, flush=True)
    else:
      print(f"left out, because its compiler is not installed: {name}", file=sys.stderr, flush=True)
  return {
    "versions": {name: metadata.version(name) for name in PACKAGES if _is_installed(name)},
    "machine": f"{os.cpu_count()} cores of {cpu()}",
    "command": COMMAND,
    **begun,
    "seconds": round(time.perf_counter() - start),
    "figures": figures,
  }


def _is_installed(package: str) -> bool:
  return any(metadata.distributions(name=package))


def of(pythons: Iterable[str]) -> list[Record]:
  """What each of these Pythons finds. Raises ConfigError for one that cannot compile the steps."""
  found = []
  # JAX tells its children where its own TPU compiler is, which is not that of another Python.
  own = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
  for python in pythons:
    try:
      command = [python, "-m", "lab.benchmarks.upgrade"]
      done = subprocess.run(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
      raise ConfigError(
        f"python={python!r} cannot compile the steps ({error}); name one that has this project's packages"
      ) from error
    found.append(json.loads(done.stdout))
  return found


def version(stack: Record) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", stack["versions"]["jax"])[:3]))


def recorded(record: Record, step: str, figure: str) -> float | None:
  """The figure that a new one is compared with: the lowest; with a note, the highest. None if there is none."""
  known = [value for stack in record["stacks"] if (value := stack["figures"].get(step, {}).get(figure)) is not None]
  of_record = max if figure in record["notes"].get(step, {}) else min
  return of_record(known) if known else None


class Worse(NamedTuple):
  """A figure that is over a tenth more than it was."""

  step: str
  figure: str
  old: float
  new: float

  def __str__(self) -> str:
    command = STEPS[self.step].command if self.step in STEPS else ""
    return (
      f"{self.step}: {self.figure} was {shown(self.figure, self.old)} and is {shown(self.figure, self.new)}; look with "
      f"{command}, then change the step or say why in `notes` of {RECORD.relative_to(ROOT)}"
    )


def worse(record: Record, figures: Figures) -> list[Worse]:
  """The figures that are over a tenth more than those of a record."""
  found = []
  for step, values in figures.items():
    for figure, new in values.items():
      old = recorded(record, step, figure)
      if old is not None and new > max(MORE * old, NOTHING if figure == "exposed" else 0):
        found.append(Worse(step, figure, old, new))
  return found


def judged(record: Record, found: Sequence[Record]) -> list[Worse]:
  """What is worse with the newest of these stacks; nothing if the record has a newer one."""
  newest = max(found, key=version)
  return worse(record, newest["figures"]) if version(newest)[:2] >= max(map(version, record["stacks"]))[:2] else []


def written(record: Record, found: Sequence[Record]) -> Record:
  """The record with these stacks. Of its notes those are kept that are still needed, and were within their limits."""
  newest = max(found, key=version)["figures"]
  bad = {(one.step, one.figure) for one in worse(record, newest)}
  needed = {(one.step, one.figure) for one in worse({"stacks": found, "notes": {}}, newest)}
  notes: dict[str, dict[str, str]] = {}
  for step, of_step in record["notes"].items():
    for figure, why in of_step.items():
      if (step, figure) in needed - bad:
        notes.setdefault(step, {})[figure] = why
  return {"kind": "upgrade", "stacks": sorted(found, key=version), "notes": notes}


def shown(figure: str, value: float | None) -> str:
  if value is None:
    return "-"
  size, unit = UNITS[figure]
  return f"{value / size:,.4g} {unit}"


def side_by_side(record: Record, found: Sequence[Record]) -> str:
  """Every figure with each stack, those of the record first."""
  stacks = [*record["stacks"], *found]
  heads = [f"record, jax {stack['versions']['jax']}" for stack in record["stacks"]]
  heads += [f"now, jax {stack['versions']['jax']}" for stack in found]
  lines = [f"{'':<44}" + "".join(f"{head:>22}" for head in heads)]
  for step in STEPS:
    for figure in UNITS:
      values = [stack["figures"].get(step, {}).get(figure) for stack in stacks]
      if any(value is not None for value in values):
        note = f"  {record['notes'].get(step, {}).get(figure, '')}".rstrip()
        lines.append(f"{step:<36}{figure:<8}" + "".join(f"{shown(figure, value):>22}" for value in values) + note)
  return "\n".join(lines)


def tables(record: Record) -> dict[str, str]:
  """The generated part of docs/thousand-chips.md: what the newest stack takes back, and why."""
  first, last = record["stacks"][0], record["stacks"][-1]
  old, new = first["versions"]["jax"], last["versions"]["jax"]
  lines = [f"Of {len(STEPS)} steps, jax {new} takes over a tenth more than jax {old} in these figures of a device:", ""]
  for one in worse({"stacks": [first], "notes": {}}, last["figures"]):
    what = f"{one.figure} {shown(one.figure, one.old)} → {shown(one.figure, one.new)}"
    lines.append(f"- {one.step}: {what}. {record['notes'][one.step][one.figure]}")
  made = {"command": COMMAND, "date": last["date"], "machine": f"compiled on {last['machine']}"}
  versions = {name: f"{first['versions'][name]} and {last['versions'][name]}" for name in last["versions"]}
  end = f"{source(made | {'versions': versions})} Commit {last['commit']}."
  return {"upgrade": "\n".join([*lines, "", end])}


def read(file: Path = RECORD) -> Record:
  return json.loads(file.read_text()) if file.exists() else {"kind": "upgrade", "stacks": [], "notes": {}}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("pythons", nargs="*", default=[sys.executable], help="whose jax to use (default: this Python's)")
  parser.add_argument("--record", action="store_true", help="write the figures as the record")
  parser.add_argument("--tables", action="store_true", help="write the list of the page from the existing record")
  options = parser.parse_args()
  if options.tables:
    return print(*rewrite(PAGE, RECORD, tables).values())
  with command_line.bad_input_ends_the_program():
    record, found = read(), of(options.pythons or [sys.executable])
  print(side_by_side(record, found))
  if options.record:
    record = written(record, found)
    write(RECORD, record)
  bad = judged(record, found)
  print(*(bad or ["Nothing needs over a tenth more than the record, except what has a note."]), sep="\n")
  if options.record and not bad:
    rewrite(PAGE, RECORD, tables)
  sys.exit(bool(bad))


if __name__ == "__main__":
  print(json.dumps(stack()))
