"""Speeds that other projects have published, and our bounds for the same steps.

    python -m tools.benchmark published              # writes the table of ways to share positions into docs/evidence.md
    python -m tools.benchmark published --compile    # first compiles our ways to share positions for TPUs (30 minutes)

Needs no devices: the bounds come from the formulas of lab/analysis/predict.py. Each is the longest of the times that
arithmetic, memory and communication take alone, as if a perfect program overlapped all three. So a step that somebody
measured below its bound would show an error of ours. A test checks this. rates.py fits what steps take to these speeds.
"""

import argparse
import dataclasses
import json
from importlib import metadata
from typing import Any

import jax

from configs import base
from lab.analysis import predict
from lab.analysis.case import Case
from lab.analysis.roofline import Roofline
from lab.analysis.topology import Machine, machine_of
from lab.benchmarks import header, sections
from lab.benchmarks.pages import RESULTS, fill
from lab.benchmarks.predictions import MODELS, PAGE, Prediction, case_on, config, measure, with_source
from runtime import command_line

_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main"
_NVIDIA = "https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources"
SOURCES = {
  "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
  "MaxText": f"{_MAXTEXT}/README.md",
  "MaxText-A3": f"{_MAXTEXT}/MaxText/configs/a3/llama_2_7b/README.md",
  "MaxText-v5e": f"{_MAXTEXT}/MaxText/configs/v5e/README.md",
  "MaxText-tiers": f"{_MAXTEXT}/docs/reference/models/tiering.md",
  "tpu-recipes": "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium",
  "NVIDIA-Llama-2": f"{_NVIDIA}/maxtext-llama2-70b-dgxc-benchmarking-c",
  "NVIDIA-Llama-3": f"{_NVIDIA}/maxtext-llama3-70b-dgxc-benchmarking-g",
  "MaxText-4687": "https://github.com/AI-Hypercomputer/maxtext/pull/4687",
}
RECORD = RESULTS / "ways-tpu.json"


@dataclasses.dataclass(frozen=True)
class Published:
  """A published measurement, and a run of ours that is as close to it as our configs allow.

  Attributes:
    source: a key of `SOURCES`.
    what: the published setup.
    fields: of our config.
    tokens: tokens/s of a device; 0 if the source gives FLOP/s or seconds instead.
    palm_flops: model FLOP/s of a device as PaLM counts them. MaxText counted all pairs of attention, too, when it
      published these (its pull request 1988 changed that later).
    seconds: of a step.
    memory: GiB of a device; 0 if not stated.
    float8: whether the products of blocks are in float8, at twice the peak.
    figures: of a device, where they differ from those of its kind (`hardware.Chip`).
    unlike: why no rate of ours can predict it; "" if one can.
  """

  source: str
  what: str
  strategy: str
  topology: str
  fields: dict[str, Any]
  tokens: float = 0.0
  palm_flops: float = 0.0
  seconds: float = 0.0
  memory: float = 0.0
  float8: bool = False
  figures: dict[str, float] = dataclasses.field(default_factory=dict)
  unlike: str = ""


def llama(name: str, length: int, batch_size: int, **fields: Any) -> dict[str, Any]:
  model = {f"model.{field}": size for field, size in (MODELS[name] | {"seq_len": length}).items()}
  return model | {"batch_size": batch_size} | fields


def scaled(scale: int, batch_size: int, remat: str, model: int = 1) -> dict[str, Any]:
  """A model of MaxText's `global_parameter_scale`, a power of two: heads and MLP grow first, then width, then depth."""
  rounds, rest = divmod(scale.bit_length() - 1, 3)
  heads, width, depth = 2 ** (rounds + (rest > 0)), 2 ** (rounds + (rest > 1)), 2**rounds
  sizes: dict[str, Any] = {
    "width": 2048 * width,
    "depth": 16 * depth,
    "heads": 16 * heads,
    "kv_heads": 16 * heads,
    "head_dim": 128,
  }
  sizes |= {"mlp_width": 7168 * heads, "vocab_size": 32_000, "seq_len": 2048}
  sizes |= {"remat": remat}
  fields = {f"model.{field}": value for field, value in sizes.items()} | {"batch_size": batch_size}
  return fields | ({"mesh.model": model} if model > 1 else {})


# torchtitan's H100s have memory of 2.4 TB/s, and a limit of 500 W. It says that their peak is between those of the H100
# SXM (989 TFLOP/s, 700 W) and the H100 NVL (835, 400 W), without the value. Here it is that of the NVL.
SLOWER = {"flops": 835e12, "bandwidth": 2400e9}
# It computes every second product again, and saves the other results and attention's.
SELECTIVE = {"model.remat": "full", "model.saved": "query,value,attended,mlp_gate"}
EIGHT = llama("8B, GQA", 8192, 16, **SELECTIVE)
MANY = llama("8B, GQA", 8192, 256, **SELECTIVE)
LARGE = llama("70B, GQA", 8192, 512, **{"model.remat": "full", "mesh.model": 8})
TITAN, MAX, V5E, TRILLIUM = "torchtitan", "MaxText", "MaxText-v5e", "tpu-recipes"
NVIDIA2, NVIDIA3 = "NVIDIA-Llama-2", "NVIDIA-Llama-3"
EAGER = "PyTorch, not compiled"


def _nvidia(
  source: str, gpus: int, model: dict[str, Any], length: int, bfloat16: float, float8: float
) -> list[Published]:
  """A row in each precision. What is computed again is not stated: all is, because less does not fit into 80 GB."""
  fields = {f"model.{name}": size for name, size in (model | {"seq_len": length}).items()}
  fields |= {"batch_size": 2 * gpus, "model.remat": "full"}
  row = lambda what, seconds, narrow: Published(
    source, f"70B, {gpus} H100{what}", "fsdp", f"h100:{gpus // 8}x8", fields, seconds=seconds, float8=narrow
  )
  return [row("", bfloat16, False), row(", float8", float8, True)]


LLAMA2 = MODELS["70B, GQA"] | {"vocab_size": 32_000}
OFFLOADED = {"model.remat": "full", "model.saved": "query,key,value"}  # to the host, in these runs
BIG = llama("70B, GQA", 8192, 1280, **OFFLOADED)
ROWS = [
  Published(
    TITAN, "8B, 8 H100, eager", "fsdp", "h100:1x8", EIGHT, tokens=5762, memory=82.4, figures=SLOWER, unlike=EAGER
  ),
  Published(TITAN, "8B, 8 H100", "fsdp", "h100:1x8", EIGHT, tokens=6667, memory=77.0, figures=SLOWER),
  Published(
    TITAN, "8B, 8 H100, float8", "fsdp", "h100:1x8", EIGHT, tokens=8532, memory=76.8, float8=True, figures=SLOWER
  ),
  Published(TITAN, "8B, 128 H100", "fsdp", "h100:16x8", MANY, tokens=6514, memory=62.0, figures=SLOWER),
  Published(
    TITAN, "70B, 256 H100, TP 8, float8", "two_d", "h100:32x8", LARGE, tokens=876, memory=67.6, float8=True,
    figures=SLOWER,
  ),
  *_nvidia(NVIDIA2, 64, LLAMA2, 4096, 6.999, 4.324),
  *_nvidia(NVIDIA2, 256, LLAMA2, 4096, 7.153, 4.959),
  *_nvidia(NVIDIA3, 128, MODELS["70B, GQA"], 8192, 15.563, 9.074),
  *_nvidia(NVIDIA3, 256, MODELS["70B, GQA"], 8192, 15.444, 9.488),
  Published(
    "MaxText-A3", "7B, 8 H100", "fsdp", "h100:1x8", llama("7B", 4096, 32, **{"model.remat": "minimal"}),
    palm_flops=492e12,
  ),
  Published(MAX, "32B, 64 v5p", "two_d", "v5p:4x4x4", scaled(32, 448, "minimal", 4), palm_flops=328e12),
  Published(MAX, "64B, 64 v5p", "two_d", "v5p:4x4x4", scaled(64, 192, "minimal", 4), palm_flops=323e12),
  Published(MAX, "128B, 128 v5p", "two_d", "v5p:4x4x8", scaled(128, 128, "minimal", 8), palm_flops=315e12),
  Published(
    "MaxText-tiers", "70B, 512 v5p", "fsdp", "v5p:8x8x8",
    {f"model.{name}": size for name, size in (LLAMA2 | {"seq_len": 4096}).items()}
    | {"batch_size": 2048, "model.remat": "full", "model.saved": "query,key,value,attention_output"},
    tokens=692,
  ),
  Published(V5E, "16B, 256 v5e", "fsdp", "v5e:16x16", scaled(16, 1536, "full"), palm_flops=120e12),
  Published(V5E, "32B, 256 v5e", "fsdp", "v5e:16x16", scaled(32, 1024, "full"), palm_flops=132e12),
  Published(V5E, "64B, 256 v5e", "fsdp", "v5e:16x16", scaled(64, 512, "full"), palm_flops=118e12),
  Published(TRILLIUM, "8B, 8 v6e", "fsdp", "v6e:2x4", llama("8B, GQA", 8192, 24, **OFFLOADED), seconds=3.443),
  Published(TRILLIUM, "70B, 256 v6e", "fsdp", "v6e:16x16", BIG, seconds=34.562),
  Published(
    TRILLIUM, "Llama 2, 256 v6e", "fsdp", "v6e:16x16",
    {f"model.{name}": size for name, size in (LLAMA2 | {"seq_len": 4096}).items()}
    | {"batch_size": 1024, "model.remat": "full"},
    seconds=17.373,
  ),
]  # fmt: skip


def case_of(row: Published) -> tuple[Case, Machine]:
  """The step of ours that is closest to a published one, and its devices with the kind's own figures."""
  config, where = base.get_config("lm", row.strategy), machine_of(row.topology)
  config.update_from_flattened_dict(row.fields)
  return case_on(where, config), where


def measured(row: Published, case: Case) -> float:
  """The published seconds of a step."""
  if row.tokens:
    return case.batch_size * case.sizes.positions / case.layout.device_count / row.tokens
  return case.palm_flops / row.palm_flops if row.palm_flops else row.seconds


def bound(row: Published) -> float:
  """The least seconds of a published step by our formulas, as if arithmetic, memory and links worked side by side.

  With float8, the products of blocks run at twice the peak.
  """
  case, where = case_of(row)
  times = predict.times(case, where.chip, where.links(case.layout.mesh))
  narrow = predict.block_flops(case) / 2 / where.chip.flops if row.float8 else 0.0
  return max(times.compute - narrow, times.memory, times.communication)


@dataclasses.dataclass(frozen=True)
class Way:
  """A way to share the positions of a text, as MaxText measured it, and the same of ours.

  Attributes:
    theirs: its name there.
    unlike: as in `Published`.
    seconds: of a step.
    mfu: the published share of the peak, of a causal model's arithmetic; 0 if not given.
  """

  theirs: str
  seconds: float
  mfu: float
  case: Prediction
  unlike: str = ""


def way(
  theirs: str, ours: str, seconds: float, mfu: float, model: str, length: int, context: int, unlike: str = ""
) -> Way:
  """On 64 chips, with 2 million tokens in a step and attention's result kept for the backward pass, as there."""
  fields = {"model.saved": "attended", "mesh.data": 64 // context, "mesh.context": context}
  fields["model.attention_context"] = ours
  case: Prediction = ("long_context", "v5p:4x4x4", model, length, 2**21 // length, "full", fields)
  return Way(theirs, seconds, mfu, case, unlike)


PIECES = "our gather moves more memory"
RING = "our ring sends beside kernels"
UNKNOWN = "an unknown, smaller model"
WAYS = [
  way("all-gather", "gather", 8.83, 0.529, "7B", 32_768, 16, PIECES),
  way("Ulysses", "exchange", 8.90, 0.522, "7B", 32_768, 16),
  way("ring", "ring", 16.38, 0.285, "7B", 32_768, 16, RING),
  way("all-gather", "gather", 9.71, 0.0, "8B, GQA", 262_144, 64, UNKNOWN),
  way("ring", "ring", 10.78, 0.0, "8B, GQA", 262_144, 64, UNKNOWN),
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
  begun, cases = header.started(), list[dict[str, Any]]()
  for one in WAYS:
    cases.append(measure(one.case, ("recommended",)))
    machine = f"compiled for TPUs on {' and '.join(sorted({found['machine'] for found in cases}))}"
    record = {"command": "python -m tools.benchmark published --compile", "machine": machine, "versions": versions}
    header.write(RECORD, record | begun | {"cases": cases})


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--compile", action="store_true", help="compile our ways to share positions first")
  if parser.parse_args().compile:
    with command_line.bad_input_ends_the_program():
      compile_ways()
  parts = {"ways": ways(json.loads(RECORD.read_text()))}
  PAGE.write_text(fill(PAGE.read_text(), parts))
  print(*parts.values(), sep="\n\n")
