"""The calculator of docs/index.html: memory, messages and time of a step, for common choices of model and devices.

lab/analysis/ computes every figure here, once, as text. calculator.js only looks up the rows of what is chosen.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

import strategies
from configs import base
from errors import ConfigError
from lab.analysis import gpus, memory, predict, theory
from lab.analysis.case import Case
from lab.analysis.shapes import model_of
from lab.analysis.topology import TPUS, Machine, machine_of
from lab.views.guide_pages import ROOT, rendered
from models.sizes import REMAT
from reporting.pages.element import json_of, table, tag
from reporting.pages.units import amount, duration, mfu
from strategies.execution.mesh import abstract_mesh, resolve
from strategies.execution.runner import check_limits
from strategies.layout import PLACES
from training import settings

LENGTH, WIDER = 4096, 8  # tokens of a sequence; a size to try for mesh axes that have a fixed one
HEAD = ("strategy", "mesh", "memory of a device", "sent by a device in a step", "a step at best, and its MFU")
ABOUT = f"""
Memory and communication of a training step, and its time at the peaks of the devices, by the formulas of
[`lab/analysis/`](lab/analysis/__init__.py). The models have Llama's shape and a vocabulary of 32,000, and train on
sequences of {LENGTH:,} tokens with AdamW, in bfloat16 with float32 weights and moments. Other fields have the defaults
of [`configs/base.py`](configs/base.py). Mesh axes with a default size are also tried with {WIDER}. MFU counts the
arithmetic that a step needs, without the masked half of attention; PaLM's count includes that half. This page was made
with jax {jax.__version__}. `python -m tools.plan` does the same for any model and number of devices, and tries more
([how far to trust the predictions](docs/evidence.md)). What does not fit needs more than
[a program may use](docs/memory.md#how-much-of-a-device-a-program-may-use) of a device's memory.
"""

Mesh = tuple[tuple[str, int], ...]
Row = list[str]  # a strategy, its mesh, and the other columns of HEAD, the last for each kind of device; or a sentence


FIELDS = {
  "kind": "devices",
  "parameters": "parameters",
  "devices": "number of devices",
  "remat": "remat policy",
  "batch": "sequences in a batch, for each device",
}


class Choices(NamedTuple):
  """The values of each field of the form, the first ones first."""

  kind: Sequence[str] = (*TPUS, *gpus.TARGETS)
  parameters: Sequence[str] = ("1e9", "7e9", "70e9")
  devices: Sequence[int] = (8, 64, 256)
  remat: Sequence[str] = tuple(REMAT)
  batch: Sequence[int] = (1, 8)


ALL = Choices()


def machine(kind: str, devices: int) -> Machine:
  """This number of devices, a power of two: a slice with sides as equal as possible, or full hosts."""
  if kind in gpus.TARGETS:
    per_host = min(8, gpus.TARGETS[kind].per_host)
    return machine_of(f"{kind}:{devices // per_host}x{per_host}")
  sides = 3 if kind in ("v5p", "tpu7x") else 2
  doubled = int(math.log2(devices // (2 if kind == "tpu7x" else 1)))
  return machine_of(f"{kind}:{'x'.join(str(2 ** ((doubled + side) // sides)) for side in range(sides))}")


def names() -> list[str]:
  """The strategies, without those that share experts, because the models are dense."""
  return [name for name in strategies.names() if not strategies.layout_of(name).axes("experts")]


def meshes(name: str, devices: int) -> list[Mesh]:
  """The meshes of a strategy on this number of devices; its default one if none fits, for `strategy_of` to refuse."""
  template, found = strategies.layout_of(name), []
  used = {axis for place in PLACES for axis in template.axes(place)}
  axes = [axis for axis, size in template.mesh.items() if size > 1 and axis in used]
  for sizes in itertools.product(*((template.mesh[axis], WIDER) for axis in axes)):
    with contextlib.suppress(ConfigError):
      found.append(tuple(resolve(template, devices, dict(zip(axes, sizes, strict=True))).mesh.items()))
  return list(dict.fromkeys(found)) or [tuple(template.mesh.items())]


@functools.lru_cache(100)  # the rows of another remat policy or batch have the same
def strategy_of(name: str, mesh: Mesh, devices: int, parameters: str, platform: str) -> strategies.Strategy:
  """The strategy with a model of this size. Raises ConfigError as a run does."""
  layout, config = resolve(strategies.layout_of(name), devices, dict(mesh)), base.get_config("lm", name)
  config.model.update(model_of(float(parameters), LENGTH))
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pipelines with few microbatches
    return strategies.build(config, layout, settings.program(config, platform), abstract_mesh(layout))


def case_of(name: str, made: strategies.Strategy, remat: str, batch_size: int, platform: str) -> Case:
  """A step of the strategy with this remat policy. Raises ConfigError as a run does."""
  case = Case.of(made, batch_size, platform)
  case = dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, remat=remat))
  check_limits(strategies.limits(name, made.layout, case))
  made.check_batch("batch_size", batch_size, made.program.accumulation)
  return case


def figures(case: Case, where: Sequence[Machine]) -> list[str]:
  """The columns of a row from memory on."""
  layout = case.layout
  predicted, messages, sent = memory.of(case), theory.sent(case), collections.Counter[str]()
  for row in messages:
    sent["+".join(row.axes)] += row.bytes
  held = amount(predicted.total) + (f", and {amount(predicted.host)} of its host" if predicted.host else "")
  cells = [held, "; ".join(f"over {axes} {amount(size)}" for axes, size in sent.items()) or "nothing"]
  for one in where:
    if predicted.total > one.chip.memory:
      cells.append("does not fit")
    else:
      times = predict.times(case, one.chip, one.links(layout.mesh), messages)
      shares = (times.mfu(flops, one.chip) for flops in (case.model_flops, case.palm_flops))
      cells.append(f"{duration(times.seconds)}, {mfu(*shares, digits=0)}")
  return cells


def rows(kinds: Sequence[str], parameters: str, devices: int, remat: str, batch: int) -> list[Row]:
  """All strategies, on kinds of devices of one platform. What a run would refuse has the sentence that it would say."""
  found, where = [], [machine(kind, devices) for kind in kinds]
  for name in names():
    for mesh in meshes(name, devices):
      try:
        made = strategy_of(name, mesh, devices, parameters, where[0].platform)
        cells = figures(case_of(name, made, remat, batch * devices, where[0].platform), where)
      except ConfigError as error:
        cells = [str(error)]
      found.append([name, strategies.layout_of(name).on(**dict(mesh)).mesh_in_words, *cells])
  return found


def data(choices: Choices = ALL) -> dict[str, Any]:
  """What calculator.js looks up: each kind's platform and column, and the rows by the values of the other fields."""
  platform = {kind: machine(kind, choices.devices[0]).platform for kind in choices.kind}
  alike = {name: [kind for kind in choices.kind if platform[kind] == name] for name in dict.fromkeys(platform.values())}
  return {
    "kinds": {kind: [platform[kind], alike[platform[kind]].index(kind)] for kind in choices.kind},
    "rows": {
      " ".join(map(str, (name, *chosen))): rows(kinds, *chosen)
      for name, kinds in alike.items()
      for chosen in itertools.product(choices.parameters, choices.devices, choices.remat, choices.batch)
    },
  }


def packed(known: Mapping[str, Any]) -> dict[str, Any]:
  """The same with each text once, the most frequent ones first: rows have the numbers of their texts."""
  count = collections.Counter(text for rows in known["rows"].values() for row in rows for text in row)
  number = {text: i for i, (text, _) in enumerate(count.most_common())}
  rows = {key: [[number[text] for text in row] for row in rows] for key, rows in known["rows"].items()}
  return {"kinds": known["kinds"], "texts": list(number), "rows": rows}


def view(choices: Choices = ALL) -> str:
  """The view of docs/index.html: what it computes, the fields, and the answer for their first values."""
  known, fields = data(choices), []
  for field, said in FIELDS.items():
    options = [tag("option", _named(field, value), value=value) for value in getattr(choices, field)]
    fields.append(tag("label", said, tag("select", *options, name_=field)))
  platform, column = known["kinds"][choices.kind[0]]
  key = " ".join(str(getattr(choices, field)[0]) for field in list(FIELDS)[1:])
  shown = [row[:4] + row[4 + column :][:1] for row in known["rows"][f"{platform} {key}"]]
  return "".join(
    (
      rendered(ABOUT, ROOT),
      tag("form", tag("div", *fields, class_="fields"), id="calculator-form", class_="card script"),
      tag("div", table(HEAD, shown), id="calculator-answer", aria_live="polite"),
      tag("script", json_of(packed(known)), type="application/json", id="calculator-data"),
    )
  )


def _named(field: str, value: Any) -> str:
  """A value of a field as the form shows it."""
  if field == "kind":
    return f"{value}, {amount(machine(value, ALL.devices[0]).chip.memory)}"
  return f"{float(value) / 1e9:g} billion" if field == "parameters" else str(value)


def script() -> str:
  """The JavaScript of the view."""
  return Path(__file__).with_name("calculator.js").read_text()
