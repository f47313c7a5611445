"""Finds how to train a model on a slice: which strategy, mesh, remat and microbatches fit, and which is fastest.

    python -m tools.plan --params=7e9 --topology=v5p:8x8x16 --batch-tokens=4e6 [--seq-len=4096] [--compile]
    python -m tools.plan --config=configs/fsdp.py --config.FIELD=... --topology=v5e:4x8    # the model of a config

Ranks by predicted step time, at most two meshes of a strategy. Compiles nothing and needs no TPU; with --compile the
real compiler checks the best three (pip install '.[topology]'). analysis/plan.py searches; docs/explain.md says how far
it can be trusted.
"""

import math
import re
from typing import Any

from absl import app, flags

from analysis import explanation
from analysis.plan import Candidate, Slice, best, search
from analysis.topology import VERSIONS
from configs import base
from errors import ConfigError
from models.config import ModelConfig
from tools import explain
from training import command_line, hardware, settings

_PARAMS = flags.DEFINE_float("params", None, "Parameters of a Llama-shaped model; or name a --config.")
_TOKENS = flags.DEFINE_float("batch-tokens", None, "Tokens of a global batch; with --config its batch if not given.")
_LENGTH = flags.DEFINE_integer("seq-len", 4096, "Tokens of a text, with --params.", lower_bound=1)
_COMPILE = flags.DEFINE_bool("compile", False, "Have the TPU compiler check the best three.")
_BEST = flags.DEFINE_integer("best", 10, "How many to print.", lower_bound=1)
_STRATEGIES = flags.DEFINE_list("strategies", [], "Those to try, with commas; all if not given.")

KINDS = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}


def slice_of(topology: str) -> Slice:
  """A slice by its name. Raises ConfigError for a name that is none."""
  found = re.fullmatch(rf"({'|'.join(VERSIONS)}):(\d+(?:x\d+)*)", topology or "")
  chip = hardware.chip(KINDS[found.group(1)]) if found else None
  shape = tuple(int(size) for size in found.group(2).split("x")) if found else ()
  if chip is None or len(shape) != chip.torus:
    raise ConfigError(
      f"topology={topology!r} is no slice; use {', '.join(VERSIONS)}, a colon, and two (v5e, v6e) or three sizes"
    )
  return Slice(chip, shape if KINDS[found.group(1)] != "TPU7x" else (*shape[:-1], 2 * shape[-1]))  # type: ignore


def model_of(params: float, length: int) -> dict[str, int]:
  """Sizes of a Llama-shaped model with about so many parameters: heads of 128, width = 128 × depth, MLP of 8/3 width.

  The proportions are those of Llama (Touvron et al. 2023, arXiv:2302.13971). Raises ConfigError where none comes near.
  """
  sizes = []
  for heads in (*range(4, 16, 4), *range(16, 257, 8)):  # so that devices divide them
    width = 128 * heads
    mlp = round(8 / 3 * width / 256) * 256
    per_block = 4 * width * width + 3 * width * mlp
    depth = max(1, round((params - 2 * width * 32_000) / per_block))
    count = 2 * width * 32_000 + depth * per_block
    sizes.append((abs(count / params - 1) + abs(math.log(depth / heads)), heads, depth, mlp, count))
  _, heads, depth, mlp, count = min(sizes)
  if abs(count / params - 1) > 0.2:
    raise ConfigError(f"params={params:g} is no size that a model of this shape can have; use 1e8 to 1e12")
  depth = max(4, round(depth / 4) * 4)  # so that stages divide it
  named = {"width": 128 * heads, "depth": depth, "heads": heads, "kv_heads": heads, "mlp_width": mlp}
  return named | {"seq_len": length, "vocab_size": 32_000}


def table(found: list[Candidate], model: ModelConfig, where: Slice, batch_size: int) -> str:
  """The candidates, one a line."""
  rows = [("", "strategy", "mesh", "remat, parts", "step", "tokens/s", "MFU", "memory", "binds")]
  for number, candidate in enumerate(found, 1):
    mesh = " × ".join(f"{axis}={size}" for axis, size in candidate.case.layout.mesh.items())
    parts = [f"{candidate.fields['model.remat']}"]
    parts += [f"{name.split('.')[-1]}={value}" for name, value in candidate.fields.items() if name in PARTS]
    ideal = batch_size * model.train_flops_per_example() / where.devices / where.chip.flops
    times = {
      "compute": candidate.compute / (1 - candidate.idle),
      "memory": candidate.traffic,
      "communication": candidate.overlapped,
    }
    rows.append(
      (
        f"{number}",
        candidate.strategy,
        mesh,
        ", ".join(parts),
        f"{candidate.seconds * 1e3:,.{0 if candidate.seconds > 0.1 else 2}f} ms",
        f"{batch_size * model.seq_len / candidate.seconds:,.0f}",
        f"{ideal / candidate.seconds:.1%}",
        f"{candidate.memory / 1e9:.1f} GB",
        max(times, key=lambda name: times[name]),
      )
    )
  return explain.table(rows)


PARTS = ("accumulation", "pipeline.schedule", "pipeline.microbatches", "pipeline.chunks")


def fields(candidate: Candidate, sizes: dict[str, Any], batch_size: int) -> dict[str, Any]:
  """Every field of a config that makes this candidate."""
  return {f"model.{name}": value for name, value in sizes.items()} | {"batch_size": batch_size} | dict(candidate.fields)


def config_of(candidate: Candidate, changed: dict[str, Any]) -> Any:
  config = base.get_config("lm", candidate.strategy)
  config.update_from_flattened_dict(changed)
  return config


def main(_: list[str]) -> None:
  where = slice_of(explain.TOPOLOGY.value)
  if (command_line.CONFIG.value is None) == (_PARAMS.value is None):
    raise ConfigError("params or config is wanted, and not both: the size of a model, or a config that holds one")
  if command_line.CONFIG.value is not None:
    config = command_line.CONFIG.value
    model = settings.program(config, "tpu").model
    length = model.positions
    batch_size = int((_TOKENS.value or 0) // length) or config.batch_size
    sizes = {
      name: config.model[name] for name in ("width", "depth", "heads", "kv_heads", "mlp_width", "seq_len", "vocab_size")
    }
  else:
    sizes = model_of(_PARAMS.value, _LENGTH.value)
    config = base.get_config("lm", "fsdp")
    config.model.update(sizes)
    model = settings.program(config, "tpu").model
    batch_size = max(1, round((_TOKENS.value or 4e6) / model.seq_len / where.devices)) * where.devices
  found = best(search(model, batch_size, where, _STRATEGIES.value), _BEST.value)
  weights = sum(math.prod(weight.shape) for weight in explanation.weights(model))
  print(
    f"{weights / 1e9:.4g} B parameters, batches of {batch_size} × {model.positions} tokens, on {where.devices} devices "
    f"of {explain.TOPOLOGY.value}\n"
  )
  if not found:
    raise ConfigError(
      f"topology={explain.TOPOLOGY.value!r} is too small for this model; use more chips, or a smaller batch"
    )
  print(table(found, model, where, batch_size))
  print("\npredicted as if all that can overlap does; to train, or with tools.explain and --topology to look closer:")
  for number, candidate in enumerate(found, 1):
    changed = fields(candidate, sizes, batch_size)
    arguments = " ".join(f"--config.{name}={value}" for name, value in changed.items())
    print(f"{number:2d}  python train.py --config=configs/{candidate.strategy}.py {arguments}")
  if _COMPILE.value:
    print("\ncompiled")
    for number, candidate in enumerate(found[:3], 1):
      strategy = explain.create(config_of(candidate, fields(candidate, sizes, batch_size)), explain.TOPOLOGY.value)
      seen = explanation.explain(candidate.strategy, strategy, batch_size)
      time, memory = seen["time"], seen["memory"]
      fits = "fits" if memory["fits"] else "does not fit"
      at_best = f", at least {time['seconds'] * 1e3:,.0f} ms a step ({time['binds']} binds)" if time else ""
      print(
        f"{number:2d}  {memory['total'] / 1e9:.1f} GB (predicted {candidate.memory / 1e9:.1f}): {fits}{at_best}",
        flush=True,
      )


def run(argv: list[str]) -> None:
  try:
    main(argv)
  except ConfigError as error:
    command_line.fail(error, status=2)


if __name__ == "__main__":
  app.run(run)
