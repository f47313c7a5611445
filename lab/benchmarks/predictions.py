"""Compares our formulas with the compilers for TPUs and GPUs: a step's memory, operations, traffic and bytes sent.

    python -m tools.benchmark predictions tpu              # compiles all cases (an hour), fills docs/evidence.md
    python -m tools.benchmark predictions gpu              # the same for NVIDIA GPUs (5 minutes)
    python -m tools.benchmark predictions tpu --cases=0,3  # compiles these cases again
    python -m tools.benchmark predictions tpu --tables     # writes the tables from the existing record

Also compiles each case for GPUs without the recommended options, to show what they hide. Needs no TPU or GPU, only
their compilers: pip install '.[topology]' or '.[gpu-topology]'. A test compares the formulas with the records.
"""

import argparse
import collections
import functools
import json
import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

import strategies
from configs import base
from errors import ConfigError, one_of
from lab.analysis import memory, predict, theory
from lab.analysis.case import Case
from lab.analysis.compiled import compile_step
from lab.analysis.roofline import Roofline
from lab.analysis.shapes import LLAMA3
from lab.analysis.topology import Machine, machine_of
from lab.benchmarks.header import cpu, source, started, write
from lab.benchmarks.pages import RESULTS, ROOT, rewrite
from lab.benchmarks.sections import table
from runtime import command_line
from strategies.execution.mesh import abstract_mesh, resolve
from strategies.execution.options import CHOICES
from training import settings

PAGE, LARGE_PAGE = ROOT / "docs" / "evidence.md", ROOT / "docs" / "thousand-chips.md"
LARGE = 64  # devices of the smallest case on the second page
RECORDS = {name: RESULTS / f"predictions-{name}.json" for name in ("tpu", "gpu")}
COMPILER = {"tpu": "libtpu", "gpu": "jax-cuda13-pjrt"}  # the package that the compiler is part of

MODELS = {
  "1B": {"width": 2048, "depth": 16, "heads": 16, "kv_heads": 16, "mlp_width": 5632, "vocab_size": 32_000},
  "2B, GQA": {"width": 2048, "depth": 24, "heads": 32, "kv_heads": 8, "mlp_width": 8192, "vocab_size": 128_000},
  "7B": {"width": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "mlp_width": 11_008, "vocab_size": 32_000},
  "8B, GQA": LLAMA3["8B"],
  "70B, GQA": LLAMA3["70B"],
}
# Strategy, slice or cluster, model, sequence length, batch size, remat, other fields of the config.
Prediction = tuple[str, str, str, int, int, str, dict[str, Any]]
TPU: list[Prediction] = [
  ("fsdp", "v5p:2x2x4", "1B", 2048, 32, "full", {}),
  ("fsdp", "v5p:2x2x4", "1B", 2048, 32, "dots", {}),
  ("fsdp", "v5p:2x2x4", "1B", 2048, 16, "minimal", {}),
  ("data_parallel", "v5p:2x2x1", "1B", 1024, 8, "full", {}),
  ("data_parallel", "v5p:2x2x1", "1B", 1024, 8, "dots", {}),
  ("data_parallel", "v5p:2x2x1", "1B", 1024, 4, "minimal", {}),
  ("two_d", "v5p:4x4x4", "7B", 4096, 64, "full", {"mesh.model": 4}),
  ("two_d", "v5p:4x4x4", "7B", 2048, 64, "dots", {"mesh.model": 4}),
  ("two_d", "v5p:4x4x4", "7B", 2048, 32, "minimal", {"mesh.model": 4}),
  ("tensor_parallel", "v6e:2x4", "1B", 2048, 8, "full", {}),
  ("tensor_parallel", "v6e:2x4", "1B", 2048, 8, "dots", {}),
  ("hsdp", "v5e:4x8", "1B", 2048, 32, "full", {}),
  ("fsdp", "v6e:4x4", "2B, GQA", 2048, 16, "full", {}),
  ("fsdp", "v6e:4x4", "2B, GQA", 2048, 16, "dots", {}),
  ("fsdp", "tpu7x:2x2x2", "7B", 2048, 32, "dots", {}),
  ("fsdp", "v5p:8x8x16", "7B", 4096, 1024, "full", {}),
  ("fsdp", "v5p:8x8x16", "7B", 4096, 1024, "dots", {}),
  ("hsdp", "v5p:8x8x16", "7B", 4096, 1024, "dots", {"mesh.replica": 2}),
  ("fsdp", "v5p:4x4x4", "7B", 4096, 64, "dots", {}),
  ("fsdp", "v6e:8x8", "7B", 4096, 64, "dots", {}),
  ("fsdp", "v6e:16x16", "7B", 4096, 256, "dots", {}),
  ("fsdp", "tpu7x:4x4x4", "7B", 4096, 128, "dots", {}),
  ("pipeline", "v5p:2x2x4", "1B", 2048, 64, "full", {"pipeline.microbatches": 16}),
  ("three_d", "v5p:2x2x4", "1B", 2048, 64, "full", {"pipeline.microbatches": 16, "model.attention": "plain"}),
]
GPU: list[Prediction] = [
  ("fsdp", "h100:1x8", "1B", 2048, 32, "full", {}),
  ("fsdp", "h100:1x8", "1B", 2048, 32, "dots", {}),
  ("fsdp", "h100:1x8", "1B", 2048, 32, "minimal", {}),
  ("data_parallel", "h100:1x8", "1B", 2048, 32, "full", {}),
  ("data_parallel", "h100:1x8", "1B", 2048, 16, "minimal", {}),
  ("tensor_parallel", "h100:1x8", "1B", 2048, 8, "full", {}),
  ("tensor_parallel", "h100:1x8", "1B", 2048, 8, "minimal", {}),
  ("hsdp", "h100:2x8", "1B", 2048, 64, "minimal", {"mesh.replica": 2}),
  ("two_d", "a100:2x8", "2B, GQA", 2048, 32, "full", {"mesh.model": 4}),
  ("fsdp", "h200:1x8", "8B, GQA", 8192, 16, "full", {}),
  ("fsdp", "h100:1x8", "8B, GQA", 8192, 8, "full", {}),
  ("fsdp", "h100:128x8", "8B, GQA", 8192, 1024, "full", {}),
  ("two_d", "h100:16x8", "70B, GQA", 4096, 128, "full", {"mesh.model": 8}),
  ("two_d", "gb200:16x4", "70B, GQA", 4096, 64, "full", {"mesh.model": 8}),
  ("pipeline", "h100:1x8", "1B", 2048, 64, "full", {"pipeline.microbatches": 16}),
  ("three_d", "h100:2x8", "7B", 2048, 64, "full", {"pipeline.microbatches": 16, "mesh.stage": 2, "mesh.model": 4}),
  ("fsdp", "b200:1x8", "7B", 4096, 32, "dots", {}),
]
# Cases that no constant was fitted to: long texts, with kernels of attention and the loss in chunks. Host memory is
# there for GPUs alone, because the TPU compiler's figures mix it with the device's (`compiled.planned`).
HELD_OUT: dict[str, list[Prediction]] = {
  "tpu": [
    ("fsdp", "v5e:4x8", "1B", 4096, 64, "full", {}),
    ("fsdp", "v6e:4x4", "1B", 8192, 16, "full", {}),
    ("two_d", "v5p:4x4x4", "7B", 8192, 32, "dots", {"mesh.model": 4}),
    ("zero1", "v5p:2x2x4", "1B", 4096, 32, "minimal", {}),
  ],
  "gpu": [
    ("fsdp", "h100:1x8", "1B", 16_384, 8, "full", {}),
    ("two_d", "h200:2x8", "8B, GQA", 16_384, 16, "dots", {"mesh.model": 4}),
    ("fsdp", "h100:1x8", "1B", 2048, 32, "offload", {}),
    ("fsdp", "h100:1x8", "8B, GQA", 8192, 8, "offload", {"optimizer.on_host": True}),
  ],
}
CASES = {"tpu": TPU + HELD_OUT["tpu"], "gpu": GPU + HELD_OUT["gpu"]}


def config(case: list | tuple) -> Any:
  """The config of a case."""
  name, _, model, length, batch_size, remat, fields = case
  asked = base.get_config("lm", name)
  asked.model.update(MODELS[model] | {"seq_len": length, "remat": remat})
  asked.batch_size = batch_size
  asked.update_from_flattened_dict(fields)
  return asked


def measure(case: list | tuple, choices: Sequence[str] = CHOICES) -> dict[str, Any]:
  """Compiles a case with these choices of options, the recommended ones among them.

  Returns the compiler's figures for one device, with the bytes sent over each mesh axis.

  `exposed` has the seconds of exposed communication, with each choice of compiler options.
  """
  begun, asked, where = started(), config(case), machine_of(case[1])
  program, found = settings.program(asked, where.platform), where.devices()
  steps, overlaps, options = {}, {}, {}
  for choice in choices:
    asked.compiler_options = choice
    runner = strategies.create(asked, program, found)
    options[choice] = runner.compiler_options
    same = next((done for done in steps if options[done] == options[choice]), None)
    steps[choice] = steps[same] if same else compile_step(runner, asked.batch_size)
    overlaps[choice] = steps[choice].overlap(where.chip, where.links_of(runner.mesh))
  step, overlap = steps["recommended"], overlaps["recommended"]
  sent: collections.Counter = collections.Counter()
  for collective in step.collectives():
    sent["+".join(collective.axes)] += collective.sent_in_step
  return {
    "case": list(case),
    "memory": step.bytes,
    "flops": step.flops(),
    "traffic": step.traffic(),
    "sent": dict(sent),
    "kernels": overlap.kernels,
    "communication": overlap.sent,
    "exposed": {choice: found.exposed for choice, found in overlaps.items()},
    "compile_seconds": step.seconds,
    "machine": f"{os.cpu_count()} cores of {cpu()}",
    "commit": begun["commit"],
    "date": begun["date"],
  }


def case_on(where: Machine, asked: Any) -> Case:
  """The training step of a config on a slice or cluster, for the formulas. Needs no devices and no compiler."""
  layout = resolve(strategies.layout_of(asked.strategy), where.count, asked.mesh)
  runner = strategies.build(asked, layout, settings.program(asked, where.platform), abstract_mesh(layout))
  return Case.of(runner, asked.batch_size, where.platform)


def by_formula(case: list | tuple) -> dict[str, float]:
  """The same figures by our formulas, without the compiler and without devices."""
  return _by_formula(json.dumps(case))


@functools.cache
def _by_formula(written: str) -> dict[str, float]:
  case = json.loads(written)
  where = machine_of(case[1])
  step = case_on(where, config(case))
  times = predict.times(step, where.chip, where.links(step.layout.mesh))
  return {
    "memory": memory.of(step).total,
    "flops": predict.flops(step),
    "traffic": predict.traffic(step),
    "sent": sum(row.bytes for row in theory.sent(step)),
    "communication": times.communication,
    "exposed": times.exposed,
  }


def tables(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/evidence.md that comes from one record: steps on fewer than 64 devices."""
  return _part("predictions", record, [found for found in record["cases"] if _count(found) < LARGE], [])


def large(record: dict[str, Any]) -> dict[str, str]:
  """The generated part of docs/thousand-chips.md: the other steps, with what they send and how fast they can be."""
  heads = ["Sent, GB", "Links, ms", "At best, ms", "MFU at most"]
  return _part("large", record, [found for found in record["cases"] if _count(found) >= LARGE], heads)


def _count(found: dict[str, Any]) -> int:
  return machine_of(found["case"][1]).count


def _part(name: str, record: dict[str, Any], cases: Sequence[dict[str, Any]], more: list[str]) -> dict[str, str]:
  """A table of cases. Ratios are predicted figures to the compiler's; what is always close to 1 is said below."""
  platform = machine_of(record["cases"][0]["case"][1]).platform
  heads = ["Strategy", "Devices", "Model, sequence", "Batch", "Remat", "Memory, GB", "Predicted", "Traffic, predicted"]
  heads += ["Exposed, ms: default", "Recommended", "By formula", *more]
  rows, exact = [], collections.defaultdict(list)
  for found in cases:
    strategy, topology, model, length, batch_size, remat, _ = found["case"]
    ours, theirs = by_formula(found["case"]), found | {"sent": sum(found["sent"].values())}
    ratios = {what: ours[what] / theirs[what] for what in ("memory", "flops", "traffic", "sent")}
    for what in ("flops", "sent"):
      exact[what].append(ratios[what])
    held_out = " (held out)" if tuple(found["case"]) in HELD_OUT[platform] else ""
    row = [
      f"{strategy}{held_out}",
      devices(topology) if more else topology,
      f"{model}, {length}",
      str(batch_size),
      remat,
    ]
    row += [f"{theirs['memory'] / 1e9:.2f}", f"{ratios['memory']:.2f}", f"{ratios['traffic']:.2f}"]
    row += [_ms(s) for s in (found["exposed"]["default"], found["exposed"]["recommended"], ours["exposed"])]
    rows.append(row + (_at_best(found, theirs["sent"]) if more else []))
  span = {what: " to ".join(sorted({f"{min(ratios):.2f}", f"{max(ratios):.2f}"})) for what, ratios in exact.items()}
  seconds = [found["compile_seconds"] for found in cases]
  below = f"Predicted operations are {span['flops']} of the compiler's, and predicted bytes {span['sent']}. "
  below += f"Compiling a step took {min(seconds):.0f} to {max(seconds):.0f} s."
  return {f"{name}-{platform}": "\n".join([*table(heads, rows), "", below, "", source(record)])}


def _at_best(found: dict[str, Any], sent: float) -> list[str]:
  """The last cells of a large step: bytes, time of the links, and the lower bound of the step."""
  case, chip = case_on(machine_of(found["case"][1]), config(found["case"])), machine_of(found["case"][1]).chip
  times = Roofline(
    found["flops"] / chip.flops, found["traffic"] / chip.bandwidth, found["communication"],
    exposed=found["exposed"]["recommended"], idle=case.idle,
  )  # fmt: skip
  mfu = f"{times.mfu(case.model_flops, chip):.1%}"
  return [f"{sent / 1e9:.1f}", _ms(times.communication), _ms(times.seconds), mfu]


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:,.1f}"


def devices(topology: str) -> str:
  """A machine and its number of devices."""
  return f"{topology} ({machine_of(topology).count:,})"


def with_source(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], record: dict[str, Any]) -> str:
  """A table of a record, and below it where it comes from."""
  return "\n".join([*table(heads, rows), "", source(record)])


def compile_cases(platform: str, asked: str | None) -> None:
  """Compiles the cases with these numbers, or all cases, and writes each into the record when it is done.

  Raises ConfigError for an unknown number, and if the record's other cases were compiled with other versions.
  """
  file, known_cases, package = RECORDS[platform], CASES[platform], COMPILER[platform]
  numbers = [str(number) for number in range(len(known_cases))]
  chosen = [int(one_of("cases", number, numbers)) for number in asked.split(",")] if asked else range(len(known_cases))
  versions = {"jax": jax.__version__, package: metadata.version(package)}
  known = json.loads(file.read_text()) if file.exists() else {"versions": versions, "cases": []}
  same = known["versions"] == versions
  if asked and not same:
    raise ConfigError(
      f"cases={asked!r} cannot be added to a record of other versions, {known['versions']}; leave out --cases"
    )
  cases = {json.dumps(found["case"]): found for found in known["cases"] if same}
  begun = started()
  for number in chosen:
    cases[json.dumps(list(known_cases[number]))] = measure(known_cases[number])
    kept = [cases[key] for case in known_cases if (key := json.dumps(list(case))) in cases]
    record = {
      "command": f"python -m tools.benchmark predictions {platform}",
      "machine": f"compiled for {platform.upper()}s on {' and '.join(sorted({found['machine'] for found in kept}))}",
      "versions": versions,
      **begun,
      "cases": kept,
    }
    write(file, record)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("platform", choices=RECORDS, help="whose compiler to use")
  parser.add_argument("--tables", action="store_true", help="write the tables from the existing record")
  parser.add_argument("--cases", help="numbers of the cases to compile, separated by commas (default: all)")
  options = parser.parse_args()
  if not options.tables:
    with command_line.bad_input_ends_the_program():
      compile_cases(options.platform, options.cases)
  for page, made in ((PAGE, tables), (LARGE_PAGE, large)):
    for written in rewrite(page, RECORDS[options.platform], made).values():
      print(written)
