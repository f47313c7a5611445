"""What an error advises is tried: each "use N" and "use FIELD=VALUE" of models, meshes and batches that are refused.

Nothing is compiled, and no device is needed: strategies are made on abstract meshes.
"""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import config, in_full

import strategies
from errors import ConfigError
from strategies.execution.mesh import abstract_mesh, resolve
from training import settings

Fields = dict[str, Any]
# The fields of models of which something does not divide, or that ask for what their strategy cannot do.
MODELS: dict[str, Fields] = {
  "six heads": {"heads": 6, "kv_heads": 6, "head_dim": 4, "mlp_width": 60, "width": 64, "depth": 5, "vocab_size": 97},
  "three keys": {"heads": 12, "kv_heads": 3, "width": 96, "mlp_width": 100, "depth": 61},
  "nine layers": {"depth": 9, "seq_len": 100},
  "prime": {"depth": 7, "width": 49, "heads": 7, "kv_heads": 7, "head_dim": 4, "mlp_width": 77, "seq_len": 30},
  "experts": {"experts": 10, "depth": 6, "seq_len": 100, "width": 60, "heads": 10, "kv_heads": 5},
  "dense first": {"experts": 8, "dense_layers": 2, "depth": 9},
  "images": {"inputs": "images", "objective": "class", "image_size": 36, "channels": 3, "classes": 10, "depth": 5},
}
COUNTS = (2, 3, 4, 5, 6, 7, 8, 12, 16)
IN_SHORT = ("six heads", 6)  # in `make test`, with the strategies whose meshes have most axes
STEPS = 6  # of advice that is followed before all is well

# Mistakes of a config that no mesh is needed for.
MISTAKES: list[Fields] = [
  {"model.heads": 8, "model.kv_heads": 3},
  {"model.dropout": 1.5},
  {"model.shared_experts": 1},
  {"model.experts": 4, "model.dense_layers": 9},
  {"model.experts": 4, "model.experts_per_token": 9},
  {"model.window": 128, "model.layers_pattern": "global:1"},
  {"model.window": -1},
  {"data.augment": True},
]
OPEN = ("another strategy", "set model.experts")  # advice that leaves the choice to the user


def error_of(name: str, devices: int, fields: Fields) -> str:
  """The sentence for which this config is refused on so many devices; "" if it is not."""
  try:
    asked = config(name)
    asked.update_from_flattened_dict({"model.vocab_size": 256} | fields)
    program = settings.program(asked, "cpu")
    layout = resolve(strategies.layout_of(name), devices, asked.mesh.to_dict())
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      made = strategies.build(asked, layout, program, abstract_mesh(layout))
    made.check_batch("batch_size", asked.batch_size, asked.accumulation)
  except ConfigError as error:
    return str(error)
  return ""


def advice(sentence: str, devices: int) -> Iterator[tuple[str, int, Fields]]:
  """Each thing that a sentence advises: the field or "devices", then the devices and the fields that follow it."""
  head, _, text = sentence.rpartition("; ")
  named, of_devices = re.findall(r"([\w.]+)=", head), re.search(r" devices?(?=, or |$)", text)
  last = ""
  for item in re.split(r", or | or |, ", text.removeprefix("use ")):
    if item in OPEN:
      continue
    found = re.fullmatch(r"(?:at most |set |use )?(?:([\w.]+)=)?'?(-?\w*)'?(?: devices?| (?:for|if) .*)?", item)
    assert found, f"cannot be followed: {item!r} in {sentence}"
    field, value = found[1] or last or named[0], found[2]
    last = found[1] or last
    plain = {"True": True, "False": False}.get(value, int(value) if re.fullmatch(r"-?\d+", value) else value)
    if of_devices and not found[1] and field.startswith("mesh."):
      yield "devices", int(value), {}
    else:
      yield field, devices, {field: plain}


def follow(name: str, devices: int, fields: Fields, changed: tuple[str, ...] = ()) -> None:
  """Fails unless all that the error advises leads to a config that works, without advice on what has been changed."""
  sentence = error_of(name, devices, fields)
  if not sentence or "sizes whose product is" in sentence:  # of all sizes of a mesh, which nothing but the user knows
    assert not sentence or not changed, f"{changed}: {sentence}"
    return
  assert len(changed) < STEPS, sentence
  for field, count, given in advice(sentence, devices):
    assert field not in changed, f"after {changed}: {sentence}"
    free = ("mesh.",) if field == "devices" else ("mesh.data",) if field.startswith("mesh.") else ()
    mesh = {key: None for key in fields if key.startswith(free or "-")}  # as by default: it takes what is left
    follow(name, count, fields | mesh | given, (*changed, field))


def cases(name: str, devices: int) -> Iterator[Fields]:
  """Meshes and schedules of a strategy."""
  axes = strategies.layout_of(name).mesh
  sizes = [{f"mesh.{axis}": size} for axis in axes for size in (2, 3, 4, 7) if devices % size == 0]
  schedules = (
    [{"pipeline.schedule": each} for each in ("gpipe", "zero_bubble", "interleaved")] if "stage" in axes else []
  )
  more = [{"pipeline.schedule": "interleaved", "pipeline.chunks": 3}, {"optimizer.on_host": True}] if schedules else []
  more += [{"pipeline.schedule": "interleaved", "pipeline.microbatches": 3}] if schedules else []
  more += [{"pipeline.schedule": "interleaved", "pipeline.microbatches": 3}] if schedules else []
  for mesh in ({}, *sizes):
    for other in ({}, *schedules, *more):
      yield mesh | other


@pytest.mark.parametrize("model, devices", in_full([(model, n) for model in MODELS for n in COUNTS], IN_SHORT))
def test_what_an_error_of_a_mesh_advises_works(model: str, devices: int):
  short = (model, devices) == IN_SHORT
  refused = 0
  for name in ("three_d", "tensor_parallel") if short else strategies.names():
    if name == "pmap_ddp":  # needs real devices, and splits nothing but the batch
      continue
    for fields in cases(name, devices):
      fields |= {f"model.{field}": value for field, value in MODELS[model].items()}
      refused += error_of(name, devices, fields) != ""
      follow(name, devices, fields)
  assert refused


@pytest.mark.full
@pytest.mark.parametrize("devices", COUNTS)
def test_what_an_error_of_a_batch_advises_works(devices: int):
  for name in ("fsdp", "pipeline", "long_context"):
    for fields in ({"batch_size": 33, "accumulation": 2}, {"batch_size": 1}, {"batch_size": 3, "accumulation": 4}):
      follow(name, devices, fields)


@pytest.mark.full
@pytest.mark.parametrize("fields", MISTAKES, ids=str)
def test_what_an_error_of_a_model_advises_works(fields: Fields):
  assert error_of("fsdp", 8, fields)
  follow("fsdp", 8, fields)
