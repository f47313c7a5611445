"""The calculator's view in docs/index.html: its fields, and the answer for their first values.

Python draws this answer. calculator_form.js draws it again whenever a field changes.
"""

import json
from html import escape
from typing import Any

from analysis import memory, theory
from analysis.search import USABLE
from analysis.weights import weights
from models.config import REMAT
from pages.element import card, table, tag, tiles
from pages.units import amount
from strategies.layout import MESH_AXES
from tools import strategy_page
from tools.calculator import SCHEDULES, case_of, chips, data
from tools.guide_pages import ROOT, rendered

FOLDER = ROOT / "tools"
FIRST: dict[str, Any] = {
  "params": 7e9, "seq_len": 4096, "batch_size": 256, "strategy": "fsdp", "mesh": {"data": 64}, "remat": "minimal",
  "accumulation": 1, "gather": "auto", "schedule": "1f1b", "microbatches": 8, "chip": "TPU v5p",
}  # fmt: skip

ABOUT = """
Memory and communication of a training step, by the formulas of [`analysis/memory.py`](analysis/memory.py) and
[`analysis/theory.py`](analysis/theory.py). The page computes them in your browser, and a test compares its numbers with
Python's. `python -m tools.plan` tries all strategies, and predicts times as well; [explain](docs/explain.md) says how
far to trust the predictions.

The calculator knows models of Llama's shape with a vocabulary of 32,000, trained with AdamW in bfloat16, with weights
and moments in float32. Attention runs in a kernel: splash on TPUs, cuDNN's on GPUs. (Before jax 0.12, pipelines on TPUs
run without it where `model` splits a stage. They need more memory then.) Schedules are `1f1b` and `gpipe`.
"""


def view() -> str:
  """The view: what it computes, the fields, and the answer."""
  known = data()
  return "".join(
    (
      rendered(ABOUT, ROOT),
      tag("form", tag("div", *fields(known), class_="fields"), id="calculator-form", class_="card script"),
      tag("div", answer(), id="calculator-answer", aria_live="polite"),
      tag("script", json.dumps(known, separators=(",", ":")), type="application/json", id="calculator-data"),
    )
  )


def script() -> str:
  """The JavaScript of the view."""
  return "".join((FOLDER / name).read_text() for name in ("calculator.js", "calculator_form.js"))


def fields(known: dict[str, Any]) -> list[str]:
  """The fields of the form."""
  chips = {name: f"{name}, {amount(chip['memory'])}" for name, chip in known["chips"].items()}
  axes = dict.fromkeys([*MESH_AXES, *(axis for found in known["strategies"].values() for axis in found["mesh"])])
  return [
    _text("params", "parameters", size="any"),
    _text("seq_len", "tokens of a sequence"),
    _text("batch_size", "sequences in a batch"),
    _choice("strategy", "strategy", {name: name for name in known["strategies"]}),
    *(_text(f"mesh.{axis}", f"devices along {axis}", data_axis=axis) for axis in axes),
    _choice("chip", "device", chips),
    _choice("remat", "remat policy", {name: name for name in REMAT}),
    _text("accumulation", "accumulation parts"),
    _choice("gather", "gather split weights", {"auto": "auto", "step": "once a step"}),
    _choice("schedule", "schedule", {name: name for name in SCHEDULES}, data_pipeline=True),
    _text("microbatches", "microbatches", data_pipeline=True),
  ]


def _text(name: str, title: str, size: str = "1", **attributes: Any) -> str:
  """A field for a number."""
  axis = name.removeprefix("mesh.")
  value = FIRST["mesh"].get(axis, 1) if name != axis else FIRST[name]
  shown = f"{value:g}".replace("e+0", "e") if isinstance(value, float) else value
  number = tag("input", type="number" if size == "1" else "text", name_=name, value=shown, min=size == "1" and 1)
  return tag("label", escape(title), number.removesuffix("</input>"), **attributes)


def _choice(name: str, title: str, choices: dict[str, str], **attributes: Any) -> str:
  """A field with some choices."""
  options = [tag("option", escape(text), value=key, selected=key == FIRST[name]) for key, text in choices.items()]
  return tag("label", escape(title), tag("select", *options, name_=name), **attributes)


def answer() -> str:
  """The answer for the first values of the fields."""
  case = case_of(FIRST)
  predicted, sent, model = memory.of(case), theory.sent(case), case.model
  capacity = next(chip.memory for chip, name in chips().items() if name == FIRST["chip"])
  assert predicted.total <= USABLE * capacity  # so it fits
  found = {
    "memory": {
      "predicted": vars(predicted) | {"total": predicted.total},
      "arguments": None, "temporary": None, "total": None, "device": capacity,
    },
    "theory": [row._asdict() for row in sent],
    "communication": None,
  }  # fmt: skip
  figures = [
    ("parameters", f"{sum(weight.size for weight in weights(model)):,}"),
    ("model", f"width {model.width}, depth {model.depth}, heads {model.heads}, mlp {model.mlp_width}"),
    ("devices", f"{case.layout.device_count:,}"),
    ("tokens in a batch", f"{case.batch_size * model.seq_len:,}"),
    ("memory of a device", f"{amount(predicted.total)}: fits"),
    ("sent by a device in a step", amount(sum(row.bytes for row in sent))),
  ]
  rows = [(row.kind, row.what, "+".join(row.axes), f"{row.bytes:,.0f}") for row in sent]
  messages = card("Messages", table(("message", "what", "over", "bytes a step"), rows))
  return tiles(figures) + tag(
    "div", strategy_page.memory_bar(found), strategy_page.by_axes(found), messages, class_="cards"
  )
