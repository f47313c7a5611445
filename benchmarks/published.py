"""Compares our bounds with speeds that other projects have published: python -m benchmarks.published

Needs no devices: the bounds come from the formulas of analysis/predict.py. Each is the longest of the times that
arithmetic, memory and communication take alone, as if a perfect program overlapped all three. So a bound below a
published speed would be wrong. A test checks this. Writes its table into docs/explain.md.
"""

import dataclasses
from typing import Any

from analysis import memory, predict
from analysis.search import model_of
from analysis.topology import machine_of
from benchmarks.pages import fill
from benchmarks.predictions import MODELS, PAGE, case_on
from configs import base

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
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
    "palm_flops": examples * case.sizes.palm_flops_per_example(),
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
  return "\n".join([*rows, "", "`python -m benchmarks.published`, by formula."])


if __name__ == "__main__":
  PAGE.write_text(fill(PAGE.read_text(), {"published": table()}))
  print(table())
