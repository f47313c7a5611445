"""Reports a training step's placement, communication, memory, and time at best and expected, without running it.

    python -m tools.explain --config=configs/fsdp.py [--topology=v5p:8x8x16] [--html=FILE] [--json=FILE]
    python -m tools.explain --config=configs/fsdp.py --topology=h100:16x8 [--network=400Gb]
    python -m tools.explain --config=configs/fsdp.py --fit=gpu:8:76.5e9    # what fits into this much memory
    python -m tools.explain --program=my.module:step [--topology=v5e:2x4]  # a jitted function of one's own

Compiles the step for this machine's devices and reads the compiled program. With --topology it compiles for a TPU slice
(pip install '.[topology]') or a cluster of GPUs (pip install '.[gpu-topology]') that you need not have.
lab/analysis/explanation.py computes the figures that are printed here.
"""

import faulthandler
import functools
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

import strategies
from checkpointing import pretrained
from configs import base
from errors import ConfigError
from lab.analysis import memory
from lab.analysis.case import Case
from lab.analysis.explanation import explain
from lab.analysis.fixes import cheapest, fixes
from lab.analysis.topology import Machine, bytes_of, machine_of
from lab.own_program import explain as explain_program
from lab.own_program import warned
from lab.views import strategy_page
from lab.views.communication import communication, table
from lab.views.pictures import picture
from models.sizes import with_sizes_made_up
from reporting import pages
from reporting.pages.units import amount, duration, mfu
from runtime import command_line, folders
from runtime.devices import start_jax
from runtime.first_process import FORWARDED, go_on_in_a_child
from runtime.hardware import chip
from strategies.execution.mesh import abstract_mesh, resolve
from strategies.execution.strategy import Strategy
from training import settings
from training.transformer import TransformerProgram

SHOWN = 6  # changes that make a step fit
BELOW = 0.9  # of a prediction that was too low
NETWORK = "Of a GPU cluster: the bandwidth between hosts for each GPU, such as 400Gb (default: its maker's systems)."


def create(config: Any, where: Machine | None) -> Strategy:
  """The strategy of a config, on the devices of a TPU slice or GPU cluster, or on this machine's devices.

  If `init_from` names a model folder, its sizes count.
  """
  config = pretrained.adopt(config)
  devices = where.devices() if where else start_jax(config)
  program = settings.program(config, devices[0].platform)
  strategy = strategies.create(config, program, devices)
  strategy.check_batch("batch_size", config.batch_size, config.accumulation)
  return strategy


def text(found: dict[str, Any], strategy: Strategy) -> str:
  """The page that the command prints."""
  devices = f"{len(strategy.mesh.devices.flat)} × {found['device']}{found['network']}"
  parts = [
    f"{found['about']}\nfor {devices}; batches of {found['batch_size']}",
    placement(found),
    _transfers(found["transfers"]),
    _picture(strategy),
    _memory(found["memory"]),
    communication(found),
    "\n".join(warned(found["warnings"])),
    _waits(found),
    _timeline(found),
    _time(found),
    found["not_known"],
  ]
  return "\n\n".join(part for part in parts if part) + "\n"


def placement(found: dict[str, Any]) -> str:
  """The tables of weights and activations."""
  head = ("shape", "dimensions", "spec", "bytes a device")
  rows = [("weight", *head)] + [(w["name"], *_placed(w)) for w in found["weights"]]
  if any(w["state"] != w["spec"] for w in found["weights"]):
    states = ["optimizer state", *(_dashed(w["state"]) for w in found["weights"])]
    rows = [(*row[:4], state, *row[4:]) for row, state in zip(rows, states, strict=True)]
  more = [("activation (one part of the batch)", *head)] + [
    (f"{a['what']} ({a['dtype']})", *_placed(a)) for a in found["activations"]
  ]
  return f"{table(rows)}\n\n{table(more)}" if found["activations"] else table(rows)


def _placed(row: dict[str, Any]) -> tuple[str, ...]:
  shape = "(" + ", ".join(map(str, row["shape"])) + ")"
  return shape, _dashed(row["dims"]), _dashed(row["spec"]), f"{row['bytes']:,}"


def _dashed(names: Sequence[Any]) -> str:
  """The names of an array's dimensions or mesh axes."""
  return ", ".join("·" if name is None else "+".join(name) if isinstance(name, tuple) else name for name in names)


def _transfers(transfers: dict[str, Any]) -> str:
  """What the layout makes move between devices."""
  lines = transfers["described"]
  return "\n".join(["what moves in a step", *(f"  {line}" for line in lines)]) if lines else ""


def _picture(strategy: Strategy) -> str:
  """A picture of one weight on the devices."""
  if strategy.layout.device_count == 1:
    return ""
  if not isinstance(strategy.program, TransformerProgram):
    return ""
  params = strategy.abstract_state().params
  weight = params["blocks"]["mlp"]["up"]
  return f"blocks/mlp/up on the devices:\n{picture(weight.sharding, weight.shape)}"


def _memory(memory: dict[str, Any]) -> str:
  p = memory["predicted"]
  size = lambda number: "" if number is None else amount(number)
  state = p["parameters"] + p["optimizer"]
  temporary = None if p["total"] is None else p["total"] - state
  rows = [
    ("memory of a device", "predicted", "compiler"),
    ("parameters", size(p["parameters"]), ""),
    (f"optimizer ({memory['optimizer']})", size(p["optimizer"]), ""),
    ("= state (compiler: with the batch)", size(state), size(memory["arguments"])),
    ("gradients", size(p["gradients"]), ""),
    ("activations for the backward pass", size(p["saved"]), ""),
    ("working memory", size(p["working"]), ""),
    ("= temporary", size(temporary), size(memory["temporary"])),
    ("total", size(p["total"]), size(memory["total"]) or "refused"),
  ]
  if p["host"]:
    rows.append(("and in the host's memory", size(p["host"]), size(memory["host"] or None)))
  if "in_hosts" in memory:
    rows.append(("checkpoints in the host's memory", size(memory["in_hosts"]), ""))
  lines = [table(rows)]
  if memory["fits"] is not None:
    verdict = "The step fits" if memory["fits"] else "The step does not fit"
    lines.append(f"{verdict} into the {amount(memory['device'])} of a device's memory that a program may use.")
  if memory["fits"] is False:
    lines += helps(cheapest(memory["fixes"], SHOWN))
  return "\n".join(lines)


def helps(fixes: list[dict[str, Any]]) -> list[str]:
  """Lines about the changes that make a step fit."""
  if not fixes:
    return ["  No change of remat, accumulation or strategy alone makes it fit; use more devices."]
  return [f"  It would fit with {fix['change']}: predicted {amount(fix['total'])}, {_cost(fix)}." for fix in fixes]


def _cost(fix: dict[str, Any]) -> str:
  """What a change costs, in words."""
  more = [f"{fix['flops'] - 1:.0%} more arithmetic"] if fix["flops"] > 1.005 else []
  more += [f"{amount(fix['sent'])} more sent"] if fix["sent"] >= 1 else []
  more += [f"{amount(fix['to_host'])} to the host and back"] if fix["to_host"] >= 1 else []
  return " and ".join(more) or "no more arithmetic, and no more sent"


def fitting(config: Any, fit: str) -> str:
  """The predicted memory of a step on devices that are not asked, and up to three changes that fit.

  Args:
    fit: the platform, the number of devices, and the bytes of each that a program may use, as "gpu:8:76.5e9".
  """
  found = re.fullmatch(r"(cpu|gpu|tpu):(\d+):(\d+(?:\.\d+)?(?:e\d+)?)", fit)
  if not found or not int(found[2]):
    raise ConfigError(f"fit={fit!r} is not valid; use PLATFORM:DEVICES:BYTES, such as gpu:8:76.5e9")
  platform, devices, capacity = found[1], int(found[2]), float(found[3])
  jax.config.update("jax_platforms", "cpu")  # the devices may be in use
  config = with_sizes_made_up(pretrained.adopt(config))
  layout = resolve(strategies.layout_of(config.strategy), devices, config.mesh)
  strategy = strategies.build(config, layout, settings.program(config, platform), abstract_mesh(layout))
  case = Case.of(strategy, config.batch_size, platform)
  needed = memory.of(case)
  names = {"parameters": "parameters", "optimizer": "the optimizer", "gradients": "gradients"}
  names |= {"saved": "activations", "working": "working memory"}
  parts = [f"{amount(getattr(needed, name))} {words}" for name, words in names.items()]
  parts[-1] += f"; {amount(needed.total)} in all, and a program may use {amount(capacity)}"
  # If a step did not fit although the prediction does, only a clearly smaller one helps.
  changes = cheapest(fixes(config.strategy, case, min(capacity, BELOW * needed.total)), 3)
  lines = [f"predicted for {strategy.describe(config.strategy)}:", f"  {', '.join(parts)}", *helps(changes)]
  return "\n".join(lines) + "\n"


def _waits(found: dict[str, Any]) -> str:
  """The table of how long the collectives take, and how much of that the device waits for."""
  timed = [row for row in found["communication"] or [] if row["seconds"]]
  if not timed:
    return ""
  rows = [("time of the links in a step", "over", "sent", "hidden", "exposed", "scope")]
  total = {"kind": "total", "axes": (), "scopes": []}
  total |= {what: sum(row[what] for row in timed) for what in ("seconds", "exposed")}
  for row in [*sorted(timed, key=lambda row: -row["seconds"]), total]:
    seconds = (row["seconds"], row["seconds"] - row["exposed"], row["exposed"])
    scopes = ", ".join(row["scopes"])
    rows.append((row["kind"], "+".join(row["axes"]), *map(duration, seconds), cut(scopes, 60)))
  return table(rows)


def _timeline(found: dict[str, Any]) -> str:
  if not found["timeline"]:
    return ""
  lines = [cut(line, 150) for line in found["timeline"].splitlines()]
  return f"pipeline: a bubble of {found['bubble']:.1%} of the time\n" + "\n".join(lines)


def _time(found: dict[str, Any]) -> str:
  time = found["time"]
  if not time:
    if found["memory"]["fits"] is False or not found["activations"]:
      return ""
    known = chip(found["device"])
    if known and not found["network_known"]:
      return f"No times: the bandwidth between hosts of {found['device']} is not known. Use --network=400Gb."
    fix = "Use model.dtype='bfloat16'." if known else "Use --topology to see the times on TPUs or GPUs."
    precision = " in this precision" if known else ""
    return f"No times: the peak speeds of {found['device']!r}{precision} are not known. {fix}"
  rows = [
    (f"a step on {found['device']} at best", "", ""),
    ("arithmetic", duration(time["compute"]), f"{time['flops'] / 1e12:,.3f} TFLOP a device{_of_float8(time)}"),
    ("memory", duration(time["memory"]), f"{time['traffic'] / 1e9:,.2f} GB read and written"),
    ("communication", duration(time["communication"]), f"{duration(time['exposed'])} of it exposed"),
  ]
  if time["to_host"]:
    rate = f"at {time['host_link'] / 1e9:g} GB/s" if time["host_link"] else "at a rate that is not known"
    rows.append(("link to the host", duration(time["host"]), f"{time['to_host'] / 1e9:,.2f} GB each way, {rate}"))
  if time["idle"]:
    assumed = f"of the time, if a backward unit takes {time['backward']:g} times as long as a forward unit"
    rows.append(("stages wait", f"{time['idle']:.1%}", assumed))
  best = f"{time['per_second']:,.0f} {time['unit']}/s, MFU {mfu(time['mfu'], time['palm_mfu'])}"
  speed = time["per_second"] * time["seconds"] / time["expected"]
  expected = f"{speed:,.0f} {time['unit']}/s, MFU {mfu(time['expected_mfu'], time['expected_palm_mfu'])}"
  lines = [
    table(rows),
    f"{time['binds']} binds: at least {duration(time['seconds'])} a step, at most {best}",
    f"expected: {duration(time['expected'])} a step, {expected}",
    f"  {time['rests_on']}",
  ]
  for axes in time["beyond"]:
    lines.append(f"{'+'.join(axes)} spans several slices, but the times assume the links within one.")
  if time["left_out"]:
    lines.append(f"The times leave out what cannot be counted: {', '.join(time['left_out'])}.")
  return "\n".join(lines)


def _of_float8(time: dict[str, Any]) -> str:
  share = time["float8_flops"] / time["flops"] if time["flops"] else 0
  return f", {share:.0%} of it in float8; MFU is relative to the peak of bfloat16" if share else ""


def cut(text: str, length: int) -> str:
  """A text of at most this length."""
  return text if len(text) <= length else text[: length - 3] + "..."


def main(config: Any, asked: flags.FlagValues = flags.FLAGS) -> None:
  if asked.fit:
    print(fitting(config, asked.fit), end="")
    return
  where = machine_of(asked.topology, asked.network) if asked.topology else None
  if asked.program:
    devices = where.devices() if where else start_jax(config or base.get_config())
    print(explain_program(asked.program, devices), end="")
    return
  if config is None:
    raise ConfigError("config is missing; name one with --config=configs/fsdp.py")
  network = bytes_of(asked.network) if asked.network else None
  file = asked.json and Path(asked.json)
  if file:
    folders.writable_file(file, "json")
  if asked.html:
    folders.writable_file(Path(asked.html), "html")
  strategy = create(config, where)
  if asked.html:
    strategy.program.sizes  # noqa: B018 - a page shows a Transformer; for other models this is an error in a sentence
  if network and not where and strategy.mesh.devices.flat[0].platform != "gpu":
    raise ConfigError(f"network={asked.network!r} is for GPUs; add --topology=h100:16x8 or another cluster")
  also = {"in_hosts": True} if config.checkpoint.memory_every else {}
  found = explain(config.strategy, strategy, config.batch_size, where, network, **also)
  if not where and jax.process_index():
    return  # with several processes, only the first one prints
  print(text(found, strategy), end="")
  if file:
    file.write_text(json.dumps(found, indent=1) + "\n")
  if asked.html:
    pages.write(Path(asked.html), strategy_page.page(found, strategy))


def survive_compilers(run: Callable[[], None], asked: flags.FlagValues = flags.FLAGS) -> None:
  """Runs a command in a child process. Its end ends this process, too.

  Raises ConfigError if a signal ended it that nobody has sent: a compiler may die of its own mistakes.
  """
  code = go_on_in_a_child()
  if code is None:
    faulthandler.disable()  # its traceback would say less than the sentence below
    return run()
  if code >= 0 or -code in FORWARDED:
    sys.exit(code if code >= 0 else 128 - code)
  time.sleep(0.2)  # in which what the compiler has printed is shown (runtime/stderr.py)
  where = f"{machine_of(asked.topology).count} devices of {asked.topology}" if asked.topology else "this machine"
  raise ConfigError(
    f"the compiler was ended by {signal.Signals(-code).name} while it compiled for {where}"
    + (": the memory of this machine may be too small" if -code == signal.SIGKILL else ", by a mistake of its own")
    + "; use fewer devices, or a strategy that splits weights over fewer of them, such as hsdp"
  )


def define(into: flags.FlagValues = flags.FLAGS) -> None:
  """Defines the command's flags other than `config`."""
  named = {"flag_values": into}
  to_compile_for = "A TPU slice or GPU cluster to compile for, such as v5p:8x8x16 or h100:16x8 (default: this machine)."
  flags.DEFINE_string("topology", None, to_compile_for, **named)
  flags.DEFINE_string("network", None, NETWORK, **named)
  flags.DEFINE_string("fit", None, "PLATFORM:DEVICES:BYTES: only say what fits there, as gpu:8:76.5e9", **named)
  own = "MODULE:FUNCTION: explain this instead; it takes the devices and returns jax.jit(...).lower(...)."
  flags.DEFINE_string("program", None, own, **named)
  flags.DEFINE_string("json", None, "A JSON file to write all figures to.", **named)
  flags.DEFINE_string("html", None, "A page to write, with the same as pictures.", **named)


if __name__ == "__main__":
  define()
  jax.config.update("jax_enable_compilation_cache", False)  # XLA warns only when it compiles
  command_line.run(lambda config: survive_compilers(functools.partial(main, config)), needs_config=False)
