"""The calculator of docs/index.html: memory of a device, and what it sends in a step, for a model of any size.

calculator.js computes both in the browser, by the formulas of analysis/memory.py and analysis/theory.py. Here is what
it cannot compute itself: layouts, weights, constants, devices, and the bytes that JAX's traces show. `case_of` makes
the same case in Python, and a test compares the results. Next: calculator_form.py, which makes the view.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import strategies
from analysis import saved
from analysis.case import ADAMW, Case
from analysis.compilers import COMPILERS, ROWS
from analysis.host import IN_FLIGHT
from analysis.search import USABLE, model_of
from analysis.update import state
from analysis.weights import Weight, weights
from configs import base
from models.config import REMAT, ModelConfig
from models.ops.attention import TILE
from models.ops.loss import LEAST, LOGITS
from models.remat import kept
from runtime.hardware import CHIPS, Chip
from strategies.layout import PLACES, Layout, axes_of
from strategies.mesh import abstract_mesh, resolve
from strategies.pipeline.stage import UNROLL
from training import settings

PLATFORMS = ("tpu", "gpu")
SCHEDULES = ("1f1b", "gpipe")
ALL = "all"  # values of a block (`saved.bytes_per_example`)
# Two models of different width, whose sizes all differ, and a third to verify what they show.
TRACED = [
  {"width": width, "heads": 6, "kv_heads": 6, "head_dim": 128, "mlp_width": 2560, "seq_len": 256, "depth": 2}
  for width in (1024, 1536)
]
VERIFIED = {"width": 1280, "heads": 10, "kv_heads": 10, "head_dim": 128, "mlp_width": 3584, "seq_len": 640, "depth": 3}
SPLIT = {"heads": "heads", "mlp": "mlp_width", "sequence": "width"}  # what splits values → their size besides positions
Term = tuple[int, str, str]  # bytes for a position and a unit of a size, the size, and what splits them; "": nothing


def data() -> dict[str, Any]:
  """What calculator.js knows from Python."""
  model = model_for("tpu", TRACED[0])
  return {
    "strategies": {name: _strategy(name) for name in strategies.names()},
    "chips": {name: {"platform": _platform(name), "memory": chip.memory} for chip, name in chips().items()},
    "weights": [_weight(weight, model) for weight in weights(model)],
    "sizes": [(dim, field.removeprefix("model.")) for dim, field, _ in model.sizes()],
    "remat": {name: {"saves_attention": "attention_output" in kept(name)} for name in REMAT},
    "saved": {platform: {remat: _saved(platform, remat) for remat in REMAT} for platform in PLATFORMS},
    "values": {platform: terms(platform, ALL) for platform in PLATFORMS},
    "fitted": {platform: COMPILERS[platform].fitted._asdict() for platform in PLATFORMS},
    "item": np.dtype(model.dtype).itemsize,
    "param": np.dtype(model.param_dtype).itemsize,
    "schedules": SCHEDULES,
    "tile": TILE,
    "rows": ROWS,
    "in_flight": IN_FLIGHT,
    "unroll": UNROLL,
    "logits": LOGITS,
    "least": LEAST,
    "usable": USABLE,
  }


def model_for(platform: str, sizes: Mapping[str, int], remat: str = "minimal") -> ModelConfig:
  """A model with these sizes and the defaults of configs/base.py otherwise."""
  config = base.get_config("lm", "single")
  config.model.update(sizes | {"remat": remat})
  return settings.program(config, platform).model


def case_of(asked: Mapping[str, Any]) -> Case:
  """The case that the calculator's fields describe. Raises ConfigError as a run with these fields does.

  Stages have the kernel of attention in any case, though with an older jax some run without (`attention_in_stages`).
  """
  name, platform = asked["strategy"], _platform(asked["chip"])
  config = base.get_config("lm", name)
  config.model.update(model_of(asked["params"], asked["seq_len"]) | {"remat": asked["remat"]})
  for field in ("batch_size", "accumulation", "gather"):
    config[field] = asked[field]
  config.pipeline.update(schedule=asked["schedule"], microbatches=asked["microbatches"])
  template = strategies.layout_of(name)
  layout = dataclasses.replace(template, mesh={axis: asked["mesh"].get(axis, 1) for axis in template.mesh})
  program = settings.program(config, platform)
  made = strategies.build(config, layout, program, abstract_mesh(layout))
  made.check_batch("batch_size", config.batch_size, config.accumulation)
  case = Case.of(made, config.batch_size, platform)
  return dataclasses.replace(
    case, model=dataclasses.replace(case.model, attention=program.model.attention), optimizer=ADAMW
  )


def _strategy(name: str) -> dict[str, Any]:
  """A strategy's mesh axes and places, and whether it sums gradients by hand even in a batch of one part."""
  layout = strategies.layout_of(name)
  on = dict.fromkeys(layout.axes("layers"), 1)
  config = base.get_config("lm", name)
  config.mesh.update(on)
  devices = jax.devices()
  layout = resolve(layout, len(devices), on)
  program = settings.program(config, "cpu")
  made = strategies.create(config, program, devices[: layout.device_count])
  return {
    "mesh": _free(layout),
    "defaults": dict(strategies.layout_of(name).mesh),
    "places": {place: axes_of(getattr(layout, place)) for place in PLACES},
    "by_hand": bool(made.axes_by_hand),
  }


def _free(layout: Layout) -> list[str]:
  """The mesh axes that split something, outermost first: those whose size is to choose."""
  return [axis for axis in layout.mesh if any(axis in layout.axes(place) for place in PLACES)]


def chips() -> dict[Chip, str]:
  """The known kinds of devices; of several names for the same figures the last."""
  return {chip: name for name, chip in CHIPS.items() if chip}


def _platform(chip: str) -> str:
  return "tpu" if chip.startswith("TPU") else "gpu"


def _weight(weight: Weight, model: ModelConfig) -> dict[str, Any]:
  """A weight, with the names of its sizes in place of numbers, and what the formulas ask of it."""
  fields = ("depth", "width", "heads", "head_dim", "mlp_width", "vocab_size")
  named = {getattr(model, field): field for field in fields}
  moments = sum(array.bytes for array in state(model, ADAMW) if array.dims == weight.dims)
  alike = sum(other.size for other in weights(model) if other.dims == weight.dims)
  assert len(named) == len(fields)
  assert moments % alike == 0
  return {
    "name": weight.name,
    "shape": [named[size] for size in weight.shape],
    "dims": weight.dims,
    "item": np.dtype(weight.dtype).itemsize,
    "moments": moments // alike,  # bytes of the optimizer's state for an element
    "is_matrix": weight.is_matrix,
    "is_table": weight.is_table,
    "is_head": "head" in weight.roles,
    "in_blocks": weight.in_blocks,
    "in_parts_along": weight.in_parts_along,
  }


def _saved(platform: str, remat: str) -> dict[str, list[Term]]:
  return {"device": terms(platform, remat), "host": terms(platform, remat, host=True)}


def terms(platform: str, remat: str, host: bool = False) -> list[Term]:
  """What a block saves for one example, as a sum of terms: each bytes × positions × a size / devices that split it.

  Raises ValueError if such a sum is not what `saved.bytes_per_example` finds for another model.
  """
  small, large = (_by_parts(model_for(platform, sizes, _remat(remat)), remat, host) for sizes in TRACED)
  positions, widths = TRACED[0]["seq_len"], [sizes["width"] for sizes in TRACED]
  found: list[Term] = []
  for split in ("", *SPLIT):
    size = SPLIT.get(split, "width")
    if size == "width":  # what differs between the models is proportional to the width; the rest has no size
      each = _divided(large[split] - small[split], positions * (widths[1] - widths[0]))
      found += [(each, size, split), (_divided(small[split], positions) - each * widths[0], "", split)]
    else:
      found += [(_divided(small[split], positions * TRACED[0][size]), size, split)]
  found = [term for term in found if term[0]]
  model, shards = model_for(platform, VERIFIED, _remat(remat)), {"heads": 5, "mlp": 7, "sequence": 4}
  size_of = lambda size: model.seq_len * (getattr(model, size) if size else 1)
  expected = sum(_divided(each * size_of(size), shards.get(split, 1)) for each, size, split in found)
  if saved.bytes_per_example(model, **shards, layers=3, remat=remat, host=host) != 3 * expected:
    raise ValueError(f"what a block saves with remat={remat!r} on {platform} is not proportional to its sizes")
  return found


def _remat(remat: str) -> str:
  return "minimal" if remat == ALL else remat


def _by_parts(model: ModelConfig, remat: str, host: bool) -> dict[str, int]:
  """Bytes that one block saves for an example, by what splits them."""
  of = lambda **shards: saved.bytes_per_example(
    model, **(dict.fromkeys(SPLIT, 1) | shards), layers=1, remat=remat, host=host
  )
  whole = of()
  parts = {split: 2 * (whole - of(**{split: 2})) for split in SPLIT}
  return parts | {"": whole - sum(parts.values())}


def _divided(number: int, by: int) -> int:
  if number % by:
    raise ValueError(f"{number} bytes are not a multiple of {by}")
  return number // by
