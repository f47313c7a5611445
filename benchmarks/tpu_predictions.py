"""Compares our formulas with the TPU compiler: a step's memory, operations, memory traffic and bytes sent.

    python -m benchmarks.tpu_predictions              # compiles all cases (15 minutes), writes docs/explain.md's table
    python -m benchmarks.tpu_predictions --cases=0,3  # compiles these cases again
    python -m benchmarks.tpu_predictions --tables     # writes the table from the existing record

Needs no TPU, only the TPU compiler: pip install '.[topology]'. A test compares the formulas with the record.
"""

import argparse
import collections
import json
import os
from importlib import metadata
from typing import Any

import jax

import strategies
from analysis import predict, theory
from analysis.case import Case
from analysis.compiled import compile_step
from analysis.topology import devices, slice_of
from benchmarks.pages import ROOT, cpu, rewrite, source
from configs import base
from errors import ConfigError, one_of
from runtime import command_line
from strategies.mesh import abstract_mesh, resolve
from training import settings

RECORD, PAGE = ROOT / "benchmarks" / "results" / "predictions.json", ROOT / "docs" / "explain.md"

MODELS = {
  "1B": {"width": 2048, "depth": 16, "heads": 16, "kv_heads": 16, "mlp_width": 5632, "vocab_size": 32_000},
  "2B, GQA": {"width": 2048, "depth": 24, "heads": 32, "kv_heads": 8, "mlp_width": 8192, "vocab_size": 128_000},
  "7B": {"width": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "mlp_width": 11_008, "vocab_size": 32_000},
}
# Strategy, slice, model, sequence length, batch size, remat, other fields of the config.
CASES: list[tuple[str, str, str, int, int, str, dict[str, Any]]] = [
  ("fsdp", "v5p:2x2x4", "1B", 2048, 32, "full", {}),
  ("fsdp", "v5p:2x2x4", "1B", 2048, 32, "dots", {}),
  ("fsdp", "v5p:2x2x4", "1B", 2048, 16, "minimal", {}),
  ("data_parallel", "v5p:2x2x1", "1B", 1024, 8, "full", {}),
  ("data_parallel", "v5p:2x2x1", "1B", 1024, 8, "dots", {}),
  ("data_parallel", "v5p:2x2x1", "1B", 1024, 4, "minimal", {}),
  ("two_d", "v5p:4x4x4", "7B", 4096, 64, "full", {"mesh.model": 4}),
  ("two_d", "v5p:4x4x4", "7B", 2048, 64, "dots", {"mesh.model": 4}),
  ("two_d", "v5p:4x4x4", "7B", 2048, 32, "minimal", {"mesh.model": 4}),
  ("tensor_parallel", "v5p:2x2x2", "1B", 2048, 8, "full", {}),
  ("tensor_parallel", "v5p:2x2x2", "1B", 2048, 8, "dots", {}),
  ("hsdp", "v5e:4x8", "1B", 2048, 32, "full", {}),
  ("fsdp", "v6e:4x4", "2B, GQA", 2048, 16, "full", {}),
  ("fsdp", "v6e:4x4", "2B, GQA", 2048, 16, "dots", {}),
  ("fsdp", "tpu7x:2x2x2", "7B", 2048, 32, "dots", {}),
  ("fsdp", "v5p:8x8x16", "7B", 4096, 1024, "full", {}),
  ("pipeline", "v5p:2x2x4", "1B", 2048, 64, "full", {"pipeline.microbatches": 16}),
  ("three_d", "v5p:2x2x4", "1B", 2048, 64, "full", {"pipeline.microbatches": 16}),
]


def config(case: list | tuple) -> Any:
  """The config of a case."""
  name, _, model, length, batch_size, remat, fields = case
  asked = base.get_config("lm", name)
  asked.model.update(MODELS[model] | {"seq_len": length, "remat": remat})
  asked.batch_size = batch_size
  asked.update_from_flattened_dict(fields)
  return asked


def measure(case: list | tuple) -> dict[str, Any]:
  """Compiles a case. Returns the compiler's figures for one device, with the bytes sent over each mesh axis."""
  asked = config(case)
  runner = strategies.create(asked, settings.program(asked, "tpu"), devices(case[1]))
  step = compile_step(runner, asked.batch_size)
  sent: collections.Counter = collections.Counter()
  for collective in step.collectives():
    sent["+".join(collective.axes)] += collective.sent_in_step
  return {
    "case": list(case),
    "memory": step.bytes,
    "flops": step.flops(),
    "traffic": step.traffic(),
    "sent": dict(sent),
    "compile_seconds": step.seconds,
    "machine": f"{os.cpu_count()} cores of {cpu()}",
  }


def by_formula(case: list | tuple) -> dict[str, float]:
  """The same figures by our formulas, without the TPU compiler and without devices."""
  asked = config(case)
  layout = resolve(strategies.layout_of(asked.strategy), slice_of(case[1]).devices, asked.mesh)
  runner = strategies.build(asked, layout, settings.program(asked, "tpu"), abstract_mesh(layout))
  step = Case.of(runner, asked.batch_size, "tpu")
  return {
    "memory": predict.memory(step).total,
    "flops": predict.flops(step),
    "traffic": predict.traffic(step),
    "sent": sum(row.bytes for row in theory.sent(step)),
  }


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/explain.md."""
  rows = [
    "| Strategy | Slice | Model, sequence | Batch | Remat "
    "| Memory by the compiler | Memory, ratio | FLOPs, ratio | Traffic, ratio | Sent, ratio | Compile time |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  for found in record["cases"]:
    name, topology, model, length, batch_size, remat, _ = found["case"]
    ours = by_formula(found["case"])
    theirs = found | {"sent": sum(found["sent"].values())}
    ratios = [f"{ours[what] / theirs[what]:.2f}" for what in ("memory", "flops", "traffic", "sent")]
    rows.append(
      f"| {name} | {topology} | {model}, {length} | {batch_size} | {remat} | {theirs['memory'] / 1e9:.2f} GB "
      f"| {' | '.join(ratios)} | {found['compile_seconds']:.0f} s |"
    )
  return {"predictions": "\n".join([*rows, "", source(record)])}


def compile_cases(asked: str | None) -> None:
  """Compiles the cases with these numbers, or all cases, and writes each into the record when it is done.

  Raises ConfigError for an unknown number, and if the record's other cases were compiled with other versions.
  """
  numbers = [str(number) for number in range(len(CASES))]
  chosen = [int(one_of("cases", number, numbers)) for number in asked.split(",")] if asked else range(len(CASES))
  versions = {"jax": jax.__version__, "libtpu": metadata.version("libtpu")}
  known = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": versions, "cases": []}
  same = known["versions"] == versions
  if asked and not same:
    raise ConfigError(
      f"cases={asked!r} cannot be added to a record of other versions, {known['versions']}; leave out --cases"
    )
  cases = {json.dumps(found["case"]): found for found in known["cases"] if same}
  for number in chosen:
    cases[json.dumps(list(CASES[number]))] = measure(CASES[number])
    kept = [cases[key] for case in CASES if (key := json.dumps(list(case))) in cases]
    record = {
      "command": "python -m benchmarks.tpu_predictions",
      "machine": f"compiled for TPUs on {' and '.join(sorted({found['machine'] for found in kept}))}",
      "versions": versions,
      "cases": kept,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--tables", action="store_true", help="write the table from the existing record")
  parser.add_argument("--cases", help="numbers of the cases to compile, separated by commas (default: all)")
  options = parser.parse_args()
  if not options.tables:
    with command_line.bad_input_ends_the_program():
      compile_cases(options.cases)
  print(rewrite(PAGE, RECORD, tables)["predictions"])


if __name__ == "__main__":
  main()
