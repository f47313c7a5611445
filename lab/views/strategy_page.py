"""The page that `tools.explain --html` writes: a training step's figures (lab/analysis/explanation.py) as pictures."""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from lab.analysis.timeline import units
from lab.views.step_timeline import figures
from reporting import pages
from reporting.pages.bars import grouped, stacked
from reporting.pages.devices import Array, placement
from reporting.pages.element import card, section, table, text, tiles
from reporting.pages.schedule import schedule
from reporting.pages.units import amount, duration, mfu
from strategies.execution.strategy import Strategy


def page(found: Mapping[str, Any], strategy: Strategy) -> str:
  """The page of a step that `explanation.explain` has explained."""
  name = found["strategy"]
  about = f"{found['about']}; for {strategy.layout.device_count} × {found['device']}{found['network']}; "
  about += f"batches of {found['batch_size']}"
  return pages.document(name, about, tiles(headline(found)), *sections(found, strategy))


def headline(found: Mapping[str, Any]) -> list[tuple[str, str]]:
  """The figures at the top of the page."""
  memory, time = found["memory"], found["time"]
  figures = [("memory of a device, predicted", amount(memory["predicted"]["total"]))]
  if memory["total"]:
    figures.append(("memory, by the compiler", amount(memory["total"])))
  figures.append(("sent by a device in a step, by theory", amount(sum(row["bytes"] for row in found["theory"]))))
  if found["communication"] is not None:
    figures.append(("sent, compiled", amount(sum(row["sent_in_step"] for row in found["communication"]))))
  if found["bubble"] is not None:
    figures.append(("stages wait", f"{found['bubble']:.1%} of the time"))
  if time:
    figures += [("a step at best", duration(time["seconds"])), ("MFU at most", mfu(time["mfu"], time["palm_mfu"]))]
    figures += [("a step, expected", duration(time["expected"]))]
    figures.append(("binds", time["binds"]))
  return figures


def sections(found: Mapping[str, Any], strategy: Strategy) -> list[str]:
  """The sections of the page, in order."""
  return [
    section("Where everything lies", lies(found, strategy)),
    section("Memory, communication and time", memory_bar(found), by_axes(found), times(found), stages(found, strategy)),
    section("Kernels and links, side by side", figures({"as compiled": found["panels"]}) if found["panels"] else ""),
    section("Messages", *tables(found)),
  ]


def lies(found: Mapping[str, Any], strategy: Strategy) -> str:
  """The mesh, and the piece of each weight, moment and activation on each device."""
  make = lambda group, row, name, spec, size: Array(group, name, row["shape"], row["dims"], spec, size)
  weights = found["weights"]
  arrays = [make("weights", w, w["name"], w["spec"], amount(w["bytes"])) for w in weights]
  if any(w["state"] != w["spec"] for w in weights):
    arrays += [make("moments of the optimizer", w, w["name"], w["state"], "") for w in weights]
  arrays += [
    make("activations", a, f"{a['what'] or 'activation'} ({a['dtype']})", a["spec"], amount(a["bytes"]))
    for a in found["activations"]
  ]
  ids = [device.id for device in strategy.mesh.devices.flat]
  return placement("The mesh, and which device holds which piece", found["mesh"], ids, arrays)


def memory_bar(found: Mapping[str, Any]) -> str:
  """The parts of a device's memory, predicted and by the compiler, beside what a program may use."""
  memory = found["memory"]
  names = {
    "parameters": "parameters", "optimizer": "optimizer", "gradients": "gradients",
    "saved": "saved activations", "working": "working memory",
  }  # fmt: skip
  rows = [("predicted", {name: memory["predicted"][key] for key, name in names.items() if memory["predicted"][key]})]
  compiled = {"state and batch, compiled": memory["arguments"], "temporary, compiled": memory["temporary"]}
  if all(compiled.values()):
    rows.append(("by the compiler", compiled))
  if memory["predicted"]["host"]:
    rows.append(("and in the host's memory", {"in the host's memory": memory["predicted"]["host"]}))
  limit = ("what a program may use", memory["device"]) if memory["device"] else None
  return stacked("Memory of a device", rows, amount, limit)


def by_axes(found: Mapping[str, Any]) -> str:
  """The bytes that a device sends over each mesh axis: what the compiler made of the step, beside theory."""
  sent: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
  for row in found["theory"]:
    sent["+".join(row["axes"])]["by theory"] += row["bytes"]
  for row in found["communication"] or []:
    sent["+".join(row["axes"])]["compiled"] += row["sent_in_step"]
  rows = [(f"over {axes}", values) for axes, values in sorted(sent.items())]
  return grouped("Sent by a device in a step", rows, amount)


def tables(found: Mapping[str, Any]) -> Iterator[str]:
  """Each kind of message: by theory, and compiled."""
  rows = [(r["kind"], r["what"], "+".join(r["axes"]), f"{r['bytes']:,.0f}") for r in found["theory"]]
  if rows:
    yield card("By theory", table(("message", "what", "over", "bytes a step"), rows))
  compiled = found["communication"] or []
  messages = [
    (r["kind"], "+".join(r["axes"]), r["count"], r["times"], f"{r['sent_in_step']:,.0f}", ", ".join(r["scopes"]))
    for r in compiled
  ]
  if messages:
    says = (text(row["said"]) for row in found["excess"])
    yield card("Compiled", table(("message", "over", "how many", "times", "bytes a step", "scope"), messages), *says)


def times(found: Mapping[str, Any]) -> str:
  """What a step takes at the peaks of its devices; "" where those are not known."""
  time = found["time"]
  if not time:
    return ""
  hidden = {"hidden": time["communication"] - time["exposed"], "exposed": time["exposed"]}
  rows: list[tuple[str, Mapping[str, float]]] = [
    ("arithmetic", {"arithmetic": time["compute"]}),
    ("memory", {"memory read and written": time["memory"]}),
    ("communication", {f"communication, {name}": value for name, value in hidden.items() if value}),
  ]
  if time["host"]:
    rows.append(("link to the host", {"link to the host": time["host"]}))
  return stacked("A step at best", rows, duration, ("the step", time["seconds"]))


def stages(found: Mapping[str, Any], strategy: Strategy) -> str:
  """The pipeline's schedule; "" without stages."""
  if not strategy.schedule:
    return ""
  says = (
    f"{strategy.schedule.ticks} ticks. Stages wait in {found['bubble']:.1%} of the time if a backward unit takes twice "
    "as long as a forward unit."
  )
  return schedule("The schedule of the pipeline", units(strategy.schedule), says)
