"""Compares plan's three best rows with the compiled step, and the bytes of more strategies on 64 chips with theory.

    python -m tools.benchmark planned tpu             # compiles all cases for TPUs, 1 to 4 minutes each
    python -m tools.benchmark planned gpu             # the same for GPUs
    python -m tools.benchmark planned tpu --tables    # writes the tables of docs/thousand-chips.md from the record

Compiles with the recommended options alone. Needs no TPU or GPU, only their compilers: pip install '.[topology]' or
'.[gpu-topology]'. predictions.py has the other large cases.
"""

import argparse
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

import strategies
from lab.analysis import predict
from lab.analysis.roofline import Roofline
from lab.analysis.search import Candidate, best, doubt, search
from lab.analysis.topology import machine_of
from lab.benchmarks import header, predictions
from lab.benchmarks.pages import RESULTS, rewrite
from lab.benchmarks.predictions import (
  COMPILER,
  LARGE_PAGE,
  Prediction,
  by_formula,
  case_on,
  config,
  devices,
  with_source,
)  # fmt: skip
from runtime import command_line
from training import settings

RECORDS = {name: RESULTS / f"planned-{name}.json" for name in ("tpu", "gpu")}
MACHINES = {"tpu": ("v5p:4x4x4", "v5p:8x8x16", "v6e:8x8"), "gpu": ("h100:32x8",)}
ROWS = 3  # of a plan
_STAGES = {"pipeline.microbatches": 16, "mesh.stage": 4, "mesh.model": 4}
BYTES: dict[str, list[Prediction]] = {
  "tpu": [
    ("zero1", "v5p:4x4x4", "7B", 4096, 64, "dots", {}),
    ("zero1", "v6e:8x8", "1B", 4096, 64, "dots", {}),
    ("zero1", "tpu7x:4x4x4", "7B", 4096, 128, "dots", {}),
    ("hsdp", "tpu7x:4x4x4", "7B", 4096, 128, "dots", {"mesh.replica": 2}),
    ("two_d", "v6e:8x8", "7B", 4096, 64, "dots", {"mesh.model": 4}),
    ("two_d", "tpu7x:4x4x4", "7B", 4096, 128, "dots", {"mesh.model": 4}),
    ("three_d", "v5p:4x4x4", "7B", 4096, 64, "full", _STAGES),
    ("three_d", "v6e:8x8", "7B", 4096, 64, "full", _STAGES),
    ("three_d", "tpu7x:4x4x4", "7B", 4096, 128, "full", _STAGES),
  ],
  "gpu": [],
}


def plans(topology: str) -> list[Prediction]:
  """The best rows of `plan` for 7 billion parameters and a sequence of 4,096 positions for each device.

  Of the strategies that leave a sequence on one device: the others were not compiled for these machines.
  """
  where = machine_of(topology)
  asked = config(("fsdp", topology, "7B", 4096, where.count, "dots", {}))
  names = [name for name in strategies.names() if not strategies.layout_of(name).axes("positions")]
  found = search(_sizes(asked, where), asked.batch_size, where, names)
  return [_case(topology, one) for one in best(found, ROWS)]


def _sizes(asked: Any, where: Any) -> Any:
  return settings.program(asked, where.platform).sizes


def _case(topology: str, found: Candidate) -> Prediction:
  fields = {name: value for name, value in found.fields.items() if name != "model.remat"}
  return found.strategy, topology, "7B", 4096, found.case.batch_size, str(found.fields["model.remat"]), fields


def beside(found: dict[str, Any]) -> tuple[float, float, str]:
  """The seconds of a recorded step by formula and compiled, and why plan cannot vouch for its own, if so."""
  where, asked = machine_of(found["case"][1]), config(found["case"])
  case = case_on(where, asked)
  ours = predict.times(case, where.chip, where.links(case.layout.mesh))
  theirs = Roofline(
    found["flops"] / where.chip.flops, found["traffic"] / where.chip.bandwidth, found["communication"],
    found["exposed"]["recommended"], case.idle, ours.host, ours.update,
  )  # fmt: skip
  return ours.seconds, theirs.seconds, doubt(case, ours, where)


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated parts of docs/thousand-chips.md that come from one record."""
  platform = machine_of(record["plans"][0]["case"][1]).platform
  return {f"planned-{platform}": planned(record)} | ({f"bytes-{platform}": sent(record)} if record["bytes"] else {})


def planned(record: dict[str, Any]) -> str:
  """Plan's rows beside the compiled steps."""
  heads, rows = ("Devices", "Plan", "Remat", "Its step, ms", "Compiled, at best", "Ratio", "Marked by `plan`"), []
  for found in record["plans"]:
    name, topology, _, _, _, remat, fields = found["case"]
    ours, theirs, reason = beside(found)
    times = f"{1e3 * ours:,.1f}", f"{1e3 * theirs:,.1f}", f"{ours / theirs:.2f}"
    rows.append((devices(topology), f"{name}, {_mesh(fields)}", remat, *times, reason))
  if not any(row[-1] for row in rows):  # the last column says nothing
    heads, rows = heads[:-1], [row[:-1] for row in rows]
  return with_source(heads, rows, record)


def sent(record: dict[str, Any]) -> str:
  """What strategies send on 64 chips, beside theory."""
  heads, rows = (
    ("Strategy", "Devices", "Model, sequence, remat", "Sent, GB", "Of theory", "Links, ms", "Exposed, ms"),
    [],
  )
  for found in record["bytes"]:
    name, topology, model, length, _, remat, fields = found["case"]
    size = sum(found["sent"].values())
    sizes = f"{size / 1e9:.1f}", f"{size / by_formula(found['case'])['sent']:.2f}"
    times = [f"{1e3 * s:,.1f}" for s in (found["communication"], found["exposed"]["recommended"])]
    what = ", ".join(filter(None, (name, _mesh(fields))))
    rows.append((what, devices(topology), f"{model}, {length}, {remat}", *sizes, *times))
  return with_source(heads, rows, record)


def _mesh(fields: dict[str, Any]) -> str:
  return " × ".join(f"{name[5:]}={size}" for name, size in fields.items() if name.startswith("mesh."))


def record(
  platform: str, begun: dict[str, Any], plan_rows: Sequence[dict], bytes_rows: Sequence[dict]
) -> dict[str, Any]:
  """The record. `begun` is what `header.started` returned before."""
  package = COMPILER[platform]
  return {
    "command": f"python -m tools.benchmark planned {platform}",
    "machine": f"compiled on {' and '.join(sorted({found['machine'] for found in [*plan_rows, *bytes_rows]}))}",
    "versions": {"jax": jax.__version__, package: metadata.version(package)},
    **begun,
    "plans": list(plan_rows),
    "bytes": list(bytes_rows),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("platform", choices=RECORDS, help="whose compiler to use")
  parser.add_argument("--tables", action="store_true", help="write the tables from the existing record")
  options = parser.parse_args()
  with command_line.bad_input_ends_the_program():
    if not options.tables:
      begun = header.started()
      compiled = lambda cases: [predictions.measure(case, ("recommended",)) for case in cases]
      rows = compiled(case for topology in MACHINES[options.platform] for case in plans(topology))
      header.write(RECORDS[options.platform], record(options.platform, begun, rows, compiled(BYTES[options.platform])))
    print(*rewrite(LARGE_PAGE, RECORDS[options.platform], tables).values(), sep="\n\n")
