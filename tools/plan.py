"""Plans how to train a model on TPUs or GPUs: which strategy, mesh, remat and microbatches fit and are fastest.

    python -m tools.plan --params=7e9 --topology=v5p:8x8x16 --batch-tokens=4e6 [--seq-len=4096] [--html=FILE]
    python -m tools.plan --params=70e9 --topology=h100:32x8 --batch-tokens=4e6 [--network=400Gb]
    python -m tools.plan --params=235e9 --active=22e9 --experts=128 --topology=h100:32x8 --batch-tokens=4e6
    python -m tools.plan --config=configs/fsdp.py --config.FIELD=... --topology=v5e:4x8    # the model of a config

Ranks plans by the expected time of a step, of equally fast ones the simplest first, and shows at most two plans of a
strategy if there are enough others. With --price it says what a billion tokens cost. It compiles nothing and needs no
TPU or GPU. With --compile, the compiler of these devices checks the best three (pip
install '.[topology]' or '.[gpu-topology]'). lab/analysis/search.py searches. docs/evidence.md says how far to trust
the predictions.
"""

import math
import shlex
from pathlib import Path
from typing import Any

from absl import flags

from checkpointing import record
from configs import base
from errors import ConfigError, positive
from lab.analysis import explanation
from lab.analysis.failures import DEVICES
from lab.analysis.reached import RATES
from lab.analysis.search import Candidate, best, chosen_fields, search
from lab.analysis.shapes import mixture_of, model_of
from lab.analysis.topology import Machine, machine_of
from lab.analysis.weights import weights
from lab.failure_inputs import STATE
from lab.views import plan_page
from lab.views.communication import table
from models.sizes import ModelSizes
from reporting import pages
from reporting.pages.units import amount, duration
from runtime import command_line
from runtime.folders import writable_file
from tools import explain
from training import settings

CONFIGS = Path(__file__).parents[1] / "configs"


def rows_of(
  found: list[Candidate], sizes: ModelSizes, where: Machine, batch_size: int, price: float | None = None
) -> list[tuple[str, ...]]:
  """The candidates as a table, with its heading.

  Args:
    price: dollars for an hour of a device.
  """
  unit, items = sizes.reads.unit()
  watts = where.chip.watts
  heading = ["", "strategy", "mesh", "remat, parts", "at best", "expected", f"{unit}/s", "MFU", "PaLM's MFU"]
  heading += ["memory", "binds", *["kWh"] * (watts > 0), *["$"] * (price is not None)]
  rows = [tuple(heading)]
  for number, candidate in enumerate(found, 1):
    parts = [f"{candidate.fields['model.remat']}"]
    parts += [f"{name.split('.')[-1]}={value}" for name, value in candidate.fields.items() if name in PARTS]
    case, times, expected = candidate.case, candidate.times, candidate.expected
    hours = MANY / batch_size / items * expected / 3600 * where.count  # of devices
    row = [
      f"{number}",
      candidate.strategy,
      candidate.case.layout.mesh_in_words,
      ", ".join(parts),
      duration(times.seconds) + (f" {MARK}" if candidate.doubt else ""),
      duration(expected),
      f"{batch_size * items / expected:,.0f}",
      f"{case.model_flops / expected / where.chip.flops:.1%}",
      f"{case.palm_flops / expected / where.chip.flops:.1%}",
      amount(candidate.memory),
      times.binds,
    ]
    row += [f"{hours * watts / 1e3:,.0f}"] * (watts > 0)
    row += [f"{hours * price:,.0f}"] if price is not None else []
    rows.append(tuple(row))
  return rows


def legend(first: Candidate, sizes: ModelSizes, where: Machine, price: float | None) -> str:
  """Below the table: what its figures are, and when the first step of the first plan ends."""
  unit, _ = sizes.reads.unit()
  rates, watts = RATES[where.platform], where.chip.watts
  state = STATE * sum(weight.size for weight in weights(sizes))
  read = state / 1e9 * DEVICES / where.count
  of = [f"kWh: for a billion {unit}, if a device draws the {watts:,.0f} W of its data sheet."] if watts else []
  of += [f"$: for a billion {unit}, at ${price:g} for an hour of a device."] if price is not None else []
  return "\n".join(
    [
      "At best: at the devices' peaks, and with the communication that nothing hides.",
      f"Expected, for {unit}/s and MFU, too: {rates.described(where.kind)}.",
      *of,
      f"The first step ends after about {rates.start + first.expected:,.0f} s, most of them to compile it. A restart "
      f"also reads a checkpoint of {amount(state)}, in {read:,.0f} s at 1 GB/s for {DEVICES} devices.",
    ]
  )


def doubts(found: list[Candidate]) -> str:
  """Below the table: why the times with a mark may be off by more than a tenth; "" if none has one."""
  rows: dict[str, list[str]] = {}
  for number, candidate in enumerate(found, 1):
    if candidate.doubt:
      rows.setdefault(candidate.doubt, []).append(f"{number}")
  said = [f"{MARK} {', '.join(numbers)}: {reason}." for reason, numbers in rows.items()]
  return (
    "\n".join([f"{MARK} The compiled step may differ by more than a tenth; check it with --compile.", *said])
    if said
    else ""
  )


MANY = 1e9  # tokens or images, whose price is shown
MARK = "?"  # beside a time that plan cannot vouch for
PARTS = (
  "model.attention_context",
  "model.expert_transport",
  "accumulation",
  "gather",
  "pipeline.schedule",
  "pipeline.microbatches",
  "pipeline.chunks",
)


def changed(config: Any) -> dict[str, Any]:
  """The fields in which a config differs from the defaults, without those that a plan chooses."""
  plain = record.flat(base.get_config("lm", config.strategy).to_dict())
  planned = ("strategy", "mesh.", "pipeline.", "accumulation", "gather", "model.remat")
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
  """The fields of its command line: the config's changes, and what the plan chooses."""
  return changed(config) | chosen_fields(candidate, config)


def config_of(candidate: Candidate, config: Any) -> Any:
  """The config of a candidate: its strategy's defaults with the fields of its command line."""
  made = base.get_config("lm", candidate.strategy)
  made.update_from_flattened_dict(fields_of(candidate, config))
  return made


def command(candidate: Candidate, config: Any) -> str:
  """The command that trains a candidate."""
  arguments = [f"--config.{name}={value}" for name, value in fields_of(candidate, config).items()]
  name = candidate.strategy  # a user's strategy may have no config of its own
  has_file = (CONFIGS / f"{name}.py").exists()
  chosen = [f"--config=configs/{name}.py"] if has_file else ["--config=configs/single.py", f"--config.strategy={name}"]
  return shlex.join(["python", "train.py", *chosen, *arguments])


def _model(asked: flags.FlagValues) -> dict[str, int]:
  """The sizes of the model that `--params` asks for, and of its experts."""
  if (asked.experts is None) != (asked.active is None):
    raise ConfigError("experts=NUMBER and active=SIZE go together: a mixture needs both, a dense model neither")
  if asked.experts is None:
    return model_of(asked.params, asked["seq-len"].value)
  return mixture_of(asked.params, asked.active, asked.experts, asked["seq-len"].value)


def main(asked: flags.FlagValues) -> None:
  where = machine_of(asked.topology, asked.network)
  if (asked.config is None) == (asked.params is None):
    raise ConfigError("give either params=SIZE or config=FILE: the size of a model, or the config of one")
  if asked.html:
    writable_file(Path(asked.html), "html")
  if asked.price is not None and not 0 < asked.price < math.inf:
    raise ConfigError(f"price={asked.price:g} is not a price; give the dollars for an hour of one device, such as 2.5")
  if asked.config is None:
    config = base.get_config("lm", "fsdp")
    config.model.update(_model(asked))
    tokens = asked["batch-tokens"].value
    config.batch_size = batch_of(4e6 if tokens is None else tokens, config.model.seq_len, where.count)
  else:
    config = asked.config
  program = settings.program(config, where.platform)
  sizes = program.sizes
  if asked.config is not None and asked["batch-tokens"].value is not None:
    config.batch_size = batch_of(asked["batch-tokens"].value, sizes.positions, where.count)
  positive("batch_size", config.batch_size)
  if sizes.dtype != "bfloat16":
    raise ConfigError(f"model.dtype={sizes.dtype!r} has no known peak speed; use 'bfloat16' or 'auto'")
  count = f"{where.count} device{'s' * (where.count > 1)} of {asked.topology}{where.described}"
  about = (
    f"{sum(weight.size for weight in weights(sizes)) / 1e9:.4g} B parameters, batches of {config.batch_size} × "
    f"{sizes.positions} {'tokens' if sizes.inputs == 'tokens' else 'patches'}, on {count}"
  )
  print(f"{about}\n")
  found = search(sizes, config.batch_size, where, asked.strategies, config.sequence_parallel, program.optimizer)
  chosen = best(found, asked.best)
  if not found:
    raise ConfigError(
      f"topology={asked.topology!r}: no strategy fits this model into the {amount(where.chip.memory)} of a "
      f"device's memory that a program may use, and splits batches of {config.batch_size}; use more devices or another "
      "batch size"
    )
  rows = rows_of(chosen, sizes, where, config.batch_size, asked.price)
  below = "\n".join(filter(None, (doubts(chosen), legend(chosen[0], sizes, where, asked.price))))
  print(f"{table(rows)}\n{below}")
  print("\nThese commands train the plans; use tools.explain with the same flags and --topology for details:")
  commands = [command(candidate, config) for candidate in chosen]
  for number, line in enumerate(commands, 1):
    print(f"{number:2d}  {line}")
  if asked.html:
    pages.write(Path(asked.html), plan_page.page(about, found, chosen, rows, below, commands, where))
  if asked.compile:
    print("\nBy the compiler:")
    for number, candidate in enumerate(chosen[:3], 1):
      strategy = explain.create(config_of(candidate, config), where)
      seen = explanation.explain(candidate.strategy, strategy, config.batch_size, where)
      time, memory = seen["time"], seen["memory"]
      at_best = f", at least {duration(time['seconds'])} a step ({time['binds']} binds)" if time else ""
      total = amount(memory["total"]) if memory["total"] else "refused"
      print(
        f"{number:2d}  {total} (predicted {amount(candidate.memory)}): "
        f"{'fits' if memory['fits'] else 'does not fit'}{at_best}",
        flush=True,
      )


def define(into: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the command's flags other than `config`."""
  named = {"flag_values": into}
  flags.DEFINE_float("params", None, "Parameters of a Llama-shaped model; use this or --config.", **named)
  flags.DEFINE_integer("experts", None, "Experts in each block, for a mixture; with --params and --active.", **named)
  flags.DEFINE_float("active", None, "Parameters that work on a token, with --experts.", **named)
  flags.DEFINE_string("topology", None, "A TPU slice or GPU cluster, such as v5p:8x8x16 or h100:16x8.", **named)
  flags.DEFINE_string("network", None, explain.NETWORK, **named)
  tokens = "Tokens of a global batch (default: 4e6, or with --config its batch_size)."
  flags.DEFINE_float("batch-tokens", None, tokens, **named)
  flags.DEFINE_integer("seq-len", 4096, "Tokens of a sequence, with --params.", lower_bound=1, **named)
  flags.DEFINE_bool("compile", False, "Let the compiler check the best three.", **named)
  flags.DEFINE_float("price", None, "Dollars for an hour of one device, to see what a billion tokens cost.", **named)
  flags.DEFINE_integer("best", 10, "How many plans to print.", lower_bound=1, **named)
  flags.DEFINE_string("html", None, "A page to write, with every plan in a picture.", **named)
  flags.DEFINE_list("strategies", [], "Strategies to try, separated by commas (default: all).", **named)


if __name__ == "__main__":
  define()
  plan = lambda: main(flags.FLAGS)
  command_line.run(lambda _: explain.survive_compilers(plan) if flags.FLAGS.compile else plan(), needs_config=False)
