"""Compares our bounds with speeds that other projects have published.

    python -m tools.benchmark published              # writes its tables into docs/explain.md
    python -m tools.benchmark published --compile    # first compiles our ways to share positions for TPUs (30 minutes)

Needs no devices: the bounds come from the formulas of lab/analysis/predict.py. Each is the longest of the times that
arithmetic, memory and communication take alone, as if a perfect program overlapped all three. So a bound below a
published speed would be wrong. A test checks this.
"""

import argparse
import dataclasses
import json
from importlib import metadata
from typing import Any

import jax

from configs import base
from lab.analysis import memory, predict
from lab.analysis.roofline import Roofline
from lab.analysis.search import model_of
from lab.analysis.topology import machine_of
from lab.benchmarks import sections
from lab.benchmarks.pages import RESULTS, fill
from lab.benchmarks.predictions import MODELS, PAGE, Prediction, case_on, config, measure, with_source
from models.flops import palm_flops_per_example
from runtime import command_line

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
RECORD = RESULTS / "ways-tpu.json"
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/README.md"


@dataclasses.dataclass(frozen=True)
class Published:
  """A published measurement, and a run of ours that is as close to it as our configs allow.

  Attributes:
    what: the published setup, in its own words.
    fields: of our config.
    tokens: tokens/s of a device; 0 if the source gives FLOP/s instead.
    palm_flops: model FLOP/s of a device as PaLM counts them. MaxText counted all pairs of attention, too, when it
      published these (its pull request 1988 changed that later).
    memory: GiB of a device; 0 if not stated.
  """

  source: str
  what: str
  strategy: str
  topology: str
  fields: dict[str, Any]
  tokens: float = 0.0
  palm_flops: float = 0.0
  memory: float = 0.0


def llama(name: str, length: int, batch_size: int, **fields: Any) -> dict[str, Any]:
  model = {f"model.{field}": size for field, size in (MODELS[name] | {"seq_len": length}).items()}
  return model | {"batch_size": batch_size} | fields


def shaped(params: float, batch_size: int) -> dict[str, Any]:
  """A model of Llama's proportions in place of MaxText's, whose shape its table does not state."""
  model = {f"model.{field}": size for field, size in model_of(params, 2048).items()}
  return model | {"batch_size": batch_size, "model.remat": "minimal", "mesh.model": 4}


EIGHT = llama("8B, GQA", 8192, 16, **{"model.remat": "dots"})
MANY = llama("8B, GQA", 8192, 256, **{"model.remat": "dots"})
LARGE = llama("70B, GQA", 8192, 512, **{"model.remat": "full", "mesh.model": 8})
ROWS = [
  Published(TORCHTITAN, "Llama 3.1 8B on 8 H100, FSDP", "fsdp", "h100:1x8", EIGHT, tokens=5762, memory=82.4),
  Published(TORCHTITAN, "the same, torch.compile", "fsdp", "h100:1x8", EIGHT, tokens=6667, memory=77.0),
  Published(TORCHTITAN, "the same, torch.compile and float8", "fsdp", "h100:1x8", EIGHT, tokens=8532, memory=76.8),
  Published(
    TORCHTITAN, "Llama 3.1 8B on 128 H100, FSDP, torch.compile", "fsdp", "h100:16x8", MANY, tokens=6514, memory=62.0
  ),
  Published(
    TORCHTITAN,
    "Llama 3.1 70B on 256 H100, FSDP 32 × TP 8, float8, async TP",
    "two_d",
    "h100:32x8",
    LARGE,
    tokens=876,
    memory=67.6,
  ),
  Published(MAXTEXT, "32B on v5p-128 (64 chips)", "two_d", "v5p:4x4x4", shaped(32e9, 448), palm_flops=328e12),
  Published(MAXTEXT, "64B on v5p-128 (64 chips)", "two_d", "v5p:4x4x4", shaped(64e9, 448), palm_flops=323e12),
  Published(MAXTEXT, "128B on v5p-256 (128 chips)", "two_d", "v5p:4x4x8", shaped(128e9, 896), palm_flops=315e12),
]


def bound(row: Published) -> dict[str, float]:
  """By our formulas, of one device: at most `tokens` and `palm_flops` per second, and bytes of `memory`."""
  config, where = base.get_config("lm", row.strategy), machine_of(row.topology)
  config.update_from_flattened_dict(row.fields)
  case = case_on(where, config)
  times = predict.times(case, where.chip, where.links(case.layout.mesh))
  examples = config.batch_size / where.count / max(times.compute, times.memory, times.communication)
  return {
    "tokens": examples * case.sizes.positions,
    "palm_flops": examples * palm_flops_per_example(case.sizes),
    "memory": memory.of(case).total,
  }


def table() -> str:
  rows = [
    "| Published | Speed of a device | Our bound | Share of it | Memory of a device | Ours, predicted |",
    "|---|---|---|---|---|---|",
  ]
  for row in ROWS:
    ours = bound(row)
    if row.tokens:
      theirs, limit, share = (
        f"{row.tokens:,.0f} tokens/s",
        f"{ours['tokens']:,.0f} tokens/s",
        row.tokens / ours["tokens"],
      )
    else:
      speeds = (row.palm_flops, ours["palm_flops"])
      theirs, limit = (f"{flops / 1e12:.0f} TFLOP/s as PaLM counts" for flops in speeds)
      share = row.palm_flops / ours["palm_flops"]
    project = "torchtitan" if row.source == TORCHTITAN else "MaxText"
    memory = f"{row.memory * 2**30 / 1e9:.1f} GB" if row.memory else ""
    rows.append(
      f"| [{project}]({row.source}): {row.what} | {theirs} | {limit} | {share:.0%} | {memory} "
      f"| {ours['memory'] / 1e9:.1f} GB |"
    )
  return "\n".join([*rows, "", "`python -m tools.benchmark published`, by formula."])


@dataclasses.dataclass(frozen=True)
class Way:
  """A way to share the positions of a text, as MaxText measured it, and the same of ours.

  Attributes:
    theirs: its name there.
    seconds: of a step.
    mfu: the published share of the peak, of a causal model's arithmetic; 0 if not given.
  """

  theirs: str
  seconds: float
  mfu: float
  case: Prediction


def way(theirs: str, ours: str, seconds: float, mfu: float, model: str, length: int, context: int) -> Way:
  """On 64 chips, with 2 million tokens in a step and attention's result kept for the backward pass, as there."""
  fields = {"model.saved": "attended", "mesh.data": 64 // context, "mesh.context": context}
  fields["model.attention_context"] = ours
  case: Prediction = ("long_context", "v5p:4x4x4", model, length, 2**21 // length, "full", fields)
  return Way(theirs, seconds, mfu, case)


WAYS = [
  way("all-gather", "gather", 8.83, 0.529, "7B", 32_768, 16),
  way("Ulysses", "exchange", 8.90, 0.522, "7B", 32_768, 16),
  way("ring", "ring", 16.38, 0.285, "7B", 32_768, 16),
  way("all-gather", "gather", 9.71, 0.0, "8B, GQA", 262_144, 64),
  way("ring", "ring", 10.78, 0.0, "8B, GQA", 262_144, 64),
]


def predicted(one: Way) -> tuple[Roofline, float]:
  """The times of our step by formula, and its MFU at most."""
  where = machine_of(one.case[1])
  case = case_on(where, config(one.case))
  times = predict.times(case, where.chip, where.links(case.layout.mesh))
  return times, times.mfu(case.model_flops, where.chip)


def compiled(found: dict[str, Any]) -> tuple[Roofline, float]:
  """The same of a recorded step."""
  where = machine_of(found["case"][1])
  case = case_on(where, config(found["case"]))
  times = Roofline(
    found["flops"] / where.chip.flops, found["traffic"] / where.chip.bandwidth, found["communication"],
    exposed=found["exposed"]["recommended"],
  )  # fmt: skip
  return times, times.mfu(case.model_flops, where.chip)


def ways(record: dict[str, Any]) -> str:
  """A table of the ways to share positions, MaxText's beside ours. Times are relative to those of the all-gather."""
  recorded = {json.dumps(found["case"]): found for found in record["cases"]}
  heads = ("Tokens of a text", "Shared by", "MaxText", "Its MFU", "Its time", "Ours", "MFU at most, by formula", "Time")
  heads, rows = (*heads, "MFU at most, compiled", "Time"), []
  shown = lambda times, mfu, first: (f"{mfu:.1%}", f"{times.seconds / first[0].seconds:.2f}")
  for one in WAYS:
    first = next(other for other in WAYS if other.case[3] == one.case[3])  # the all-gather
    found, of_first = (recorded.get(json.dumps(list(each.case))) for each in (one, first))
    fields = one.case[6]
    rows.append(
      (
        f"{one.case[3]:,}", str(fields["mesh.context"]),
        one.theirs, f"{one.mfu:.1%}" if one.mfu else sections.NONE, f"{one.seconds / first.seconds:.2f}",
        fields["model.attention_context"], *shown(*predicted(one), predicted(first)),
        *(shown(*compiled(found), compiled(of_first)) if found and of_first else 2 * (sections.NONE,)),
      )
    )  # fmt: skip
  return with_source(heads, rows, record)


def compile_ways() -> None:
  """Compiles our ways, and writes each into the record when it is done."""
  versions = {"jax": jax.__version__, "libtpu": metadata.version("libtpu")}
  cases: list[dict[str, Any]] = []
  for one in WAYS:
    cases.append(measure(one.case, ("recommended",)))
    machine = f"compiled for TPUs on {' and '.join(sorted({found['machine'] for found in cases}))}"
    record = {"command": "python -m tools.benchmark published --compile", "machine": machine, "versions": versions}
    RECORD.write_text(json.dumps(record | {"cases": cases}, indent=1) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--compile", action="store_true", help="compile our ways to share positions first")
  if parser.parse_args().compile:
    with command_line.bad_input_ends_the_program():
      compile_ways()
  parts = {"published": table(), "ways": ways(json.loads(RECORD.read_text()))}
  PAGE.write_text(fill(PAGE.read_text(), parts))
  print(*parts.values(), sep="\n\n")
