"""Plans how to train a model on a TPU slice: finds the strategy, mesh, remat and microbatches that fit and are fastest.

    python -m tools.plan --params=7e9 --topology=v5p:8x8x16 --batch-tokens=4e6 [--seq-len=4096] [--compile]
    python -m tools.plan --config=configs/fsdp.py --config.FIELD=... --topology=v5e:4x8    # the model of a config

Ranks plans by their predicted step time, and shows at most two plans of a strategy if there are enough others. It
compiles nothing and needs no TPU. With --compile, the TPU compiler checks the best three (pip install '.[topology]').
analysis/search.py searches. docs/explain.md says how far to trust the predictions.
"""

import math
import shlex
from pathlib import Path
from typing import Any

from absl import flags

from analysis import explanation
from analysis.case import weights
from analysis.search import Candidate, best, search
from analysis.topology import Slice, slice_of
from checkpointing import record
from configs import base
from errors import ConfigError, positive
from models.config import ModelConfig
from runtime import command_line
from tools import explain
from training import settings

CONFIGS = Path(__file__).parents[1] / "configs"


def model_of(params: float, length: int) -> dict[str, int]:
  """The sizes of a Llama-shaped model with about this many parameters, for sequences of this length.

  The proportions are Llama's (Touvron et al. 2023, arXiv:2302.13971): heads of 128, width = 128 × depth, and an MLP of
  8/3 the width. Raises ConfigError if no such model has about this many parameters.
  """
  if not 1e7 <= params <= 1e13:
    raise ConfigError(f"params={params:g} does not fit a model with Llama's proportions; use 1e8 to 1e12")
  sizes = []
  for heads in (*range(4, 16, 4), *range(16, 257, 8)):  # common numbers of devices divide these
    width = 128 * heads
    mlp = round(8 / 3 * width / 256) * 256
    per_block = 4 * width * width + 3 * width * mlp
    depth = max(1, round((params - 2 * width * 32_000) / per_block))
    depth = max(4, round(depth / 4) * 4)  # stages can divide this
    count = 2 * width * 32_000 + depth * per_block
    sizes.append((abs(count / params - 1) + abs(math.log(depth / heads)), heads, depth, mlp, count))
  _, heads, depth, mlp, count = min(sizes)
  if abs(count / params - 1) > 0.2:
    raise ConfigError(f"params={params:g} does not fit a model with Llama's proportions; use 1e8 to 1e12")
  named = {"width": 128 * heads, "depth": depth, "heads": heads, "kv_heads": heads, "mlp_width": mlp}
  return named | {"seq_len": length, "vocab_size": 32_000}


def table(found: list[Candidate], model: ModelConfig, where: Slice, batch_size: int) -> str:
  """The candidates as text, one in a line."""
  unit, items = model.unit
  rows = [("", "strategy", "mesh", "remat, parts", "step", f"{unit}/s", "MFU", "memory", "binds")]
  for number, candidate in enumerate(found, 1):
    mesh = " × ".join(f"{axis}={size}" for axis, size in candidate.case.layout.mesh.items())
    parts = [f"{candidate.fields['model.remat']}"]
    parts += [f"{name.split('.')[-1]}={value}" for name, value in candidate.fields.items() if name in PARTS]
    ideal = batch_size * model.train_flops_per_example() / where.devices / where.chip.flops
    rows.append(
      (
        f"{number}",
        candidate.strategy,
        mesh,
        ", ".join(parts),
        explain.duration(candidate.times.seconds),
        f"{batch_size * items / candidate.times.seconds:,.0f}",
        f"{ideal / candidate.times.seconds:.1%}",
        explain.amount(candidate.memory),
        candidate.times.binds,
      )
    )
  return explain.table(rows)


PARTS = ("accumulation", "pipeline.schedule", "pipeline.microbatches", "pipeline.chunks")


def changed(config: Any) -> dict[str, Any]:
  """The fields in which a config differs from the defaults, without those that a plan chooses."""
  plain = record.flat(base.get_config("lm", config.strategy).to_dict())
  planned = ("strategy", "mesh.", "pipeline.", "accumulation", "model.remat")
  return {
    name: value
    for name, value in record.flat(config.to_dict()).items()
    if value != plain.get(name) and not name.startswith(planned)
  }


def batch_of(tokens: float, length: int, devices: int) -> int:
  """The batch size nearest to this many tokens that splits well: a multiple of the devices, or of a power of two.

  Raises ConfigError if the tokens do not make one sequence.
  """
  if not length <= tokens < math.inf:
    raise ConfigError(f"batch-tokens={tokens:g} does not make a batch of sequences; use {length} or more")
  sequences = tokens / length
  unit = devices if sequences > 0.75 * devices else 2 ** max(0, int(math.log2(sequences)) - 2)
  return max(1, round(sequences / unit)) * unit


def fields_of(candidate: Candidate, config: Any) -> dict[str, Any]:
  """The fields of its command line: the config's changes, the plan's own, and an evaluation batch size that splits."""
  case, size = candidate.case, config.eval_batch_size
  unit = case.layout.shards("batch") * (case.schedule.microbatches if case.schedule else 1)
  splits = {} if size % unit == 0 else {"eval_batch_size": math.ceil(size / unit) * unit}
  return changed(config) | dict(candidate.fields) | splits


def config_of(candidate: Candidate, config: Any) -> Any:
  """The config of a candidate: its strategy's defaults with the fields of its command line."""
  made = base.get_config("lm", candidate.strategy)
  made.update_from_flattened_dict(fields_of(candidate, config))
  return made


def main(asked: flags.FlagValues) -> None:
  where = slice_of(asked.topology)
  if (asked.config is None) == (asked.params is None):
    raise ConfigError("give either params=SIZE or config=FILE: the size of a model, or the config of one")
  if asked.config is None:
    config = base.get_config("lm", "fsdp")
    config.model.update(model_of(asked.params, asked["seq-len"].value))
    tokens = asked["batch-tokens"].value
    config.batch_size = batch_of(4e6 if tokens is None else tokens, config.model.seq_len, where.devices)
  else:
    config = asked.config
  model = settings.program(config, "tpu").model
  if asked.config is not None and asked["batch-tokens"].value is not None:
    config.batch_size = batch_of(asked["batch-tokens"].value, model.positions, where.devices)
  positive("batch_size", config.batch_size)
  if model.dtype != "bfloat16":
    raise ConfigError(f"model.dtype={model.dtype!r} has no known peak speed; use 'bfloat16' or 'auto'")
  count = f"{where.devices} device{'s' * (where.devices > 1)}"
  print(
    f"{sum(weight.size for weight in weights(model)) / 1e9:.4g} B parameters, batches of {config.batch_size} × "
    f"{model.positions} {'tokens' if model.inputs == 'tokens' else 'patches'}, on {count} of {asked.topology}\n"
  )
  found = best(search(model, config.batch_size, where, asked.strategies), asked.best)
  if not found:
    raise ConfigError(
      f"topology={asked.topology!r}: no strategy fits this model into {where.chip.memory / 1e9:.0f} GB a device and "
      f"splits batches of {config.batch_size}; use more devices or another batch size"
    )
  print(table(found, model, where, config.batch_size))
  print(
    "\nThe times assume that everything overlaps that can. These commands train the plans; use tools.explain with the "
    "same flags and --topology for details:"
  )
  for number, candidate in enumerate(found, 1):
    arguments = [f"--config.{name}={value}" for name, value in fields_of(candidate, config).items()]
    name = candidate.strategy  # a user's strategy may have no config of its own
    has_file = (CONFIGS / f"{name}.py").exists()
    chosen = (
      [f"--config=configs/{name}.py"] if has_file else ["--config=configs/single.py", f"--config.strategy={name}"]
    )
    print(f"{number:2d}  {shlex.join(['python', 'train.py', *chosen, *arguments])}")
  if asked.compile:
    print("\nBy the compiler:")
    for number, candidate in enumerate(found[:3], 1):
      strategy = explain.create(config_of(candidate, config), asked.topology)
      seen = explanation.explain(candidate.strategy, strategy, config.batch_size)
      time, memory = seen["time"], seen["memory"]
      at_best = f", at least {explain.duration(time['seconds'])} a step ({time['binds']} binds)" if time else ""
      total = explain.amount(memory["total"]) if memory["total"] else "refused"
      print(
        f"{number:2d}  {total} (predicted {explain.amount(candidate.memory)}): "
        f"{'fits' if memory['fits'] else 'does not fit'}{at_best}",
        flush=True,
      )


def define(into: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the command's flags other than `config`."""
  named = {"flag_values": into}
  flags.DEFINE_float("params", None, "Parameters of a Llama-shaped model; use this or --config.", **named)
  flags.DEFINE_string("topology", None, "A TPU slice, such as v5p:8x8x16.", **named)
  tokens = "Tokens of a global batch (default: 4e6, or with --config its batch_size)."
  flags.DEFINE_float("batch-tokens", None, tokens, **named)
  flags.DEFINE_integer("seq-len", 4096, "Tokens of a sequence, with --params.", lower_bound=1, **named)
  flags.DEFINE_bool("compile", False, "Let the TPU compiler check the best three.", **named)
  flags.DEFINE_integer("best", 10, "How many plans to print.", lower_bound=1, **named)
  flags.DEFINE_list("strategies", [], "Strategies to try, separated by commas (default: all).", **named)


if __name__ == "__main__":
  define()
  command_line.run(lambda _: main(flags.FLAGS), needs_config=False)
