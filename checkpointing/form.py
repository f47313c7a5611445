"""The form of a record and of a config.json: the one place that checks what a stranger's workdir says of its run.

What opens somebody's workdir reads them through `read`, `fault` and `config_fault`, so what comes after may rely on
types, sizes, times and names.
"""

import contextlib
import dataclasses
import functools
import math
import re
from typing import Any

import jax.numpy as jnp

import limits
from errors import shown
from limits import Check, dict_of, list_of, none_or, number, text, whole
from runtime.storage.bucket import Location
from training.loop import LoopState

VERSION = 4  # the version of the record's format
MOST_DEPTH = 16  # of values in values
MOST_TURNS = 200_000  # of a period; data/order.py makes at most half of that, or one a source
LAST_TIME = 253_402_300_799  # seconds since 1970: the last of the year 9999
SECTIONS = ("model", "optimizer", "data", "stop")  # of a config, that are read of a record's
# What the learning rate follows, beside `schedule`.
SCHEDULE = ("learning_rate", "warmup", "steps", "final_fraction", "decay_fraction")


def read(file: Location) -> Any:
  """The JSON in a file. Raises ValueError if it is none, or too large, and OSError if it cannot be read."""
  return limits.described(file, most=limits.RECORD)


def plain(x: Any, depth: int = MOST_DEPTH) -> bool:
  """Whether a value is as a config holds it: small numbers, texts, and not many in each other."""
  if isinstance(x, dict | list):
    inner = [*x, *x.values()] if isinstance(x, dict) else x
    return depth > 0 and all(plain(one, depth - 1) for one in inner)
  return x is None or number(x) or text(x)


def array_name(x: Any) -> bool:
  """Whether a text names an array, such as "params/blocks/mlp/up", and leads to no other folder."""
  return text(x) and x.isprintable() and not {"", ".", ".."} & set(x.split("/"))


def array(x: Any) -> bool:
  """Whether a value is an array's shape, dtype and digest."""
  return (
    isinstance(x, list) and len(x) == 3 and list_of(whole(0, 1 << 40))(x[0]) and len(x[0]) <= 32
    and isinstance(x[1], str) and _dtype(x[1]) and isinstance(x[2], str) and bool(re.fullmatch("[0-9a-f]{8}", x[2]))
  )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _dtype(name: str) -> bool:
  with contextlib.suppress(TypeError, ValueError):
    kind = jnp.dtype(name)
    return kind.name == name and kind.kind not in "OSUMm"
  return False


def config_fault(x: Any) -> str:
  """What is wrong with a config, such as "config.steps=0"; "" if it may be one. Its other fields are compared only."""
  if not isinstance(x, dict):
    return f"config={shown(x)}"
  for name, value in x.items():
    if not plain(value) or (name in SECTIONS and not isinstance(value, dict)):
      inner = value.items() if isinstance(value, dict) else ()
      field = next((f".{one}={shown(given)}" for one, given in inner if not plain(given)), f"={shown(value)}")
      return f"config.{shown(name)[1:-1]}{field}"
  optimizer = x.get("optimizer", {})
  schedule = {name: value for name, value in optimizer.items() if name in SCHEDULE}
  wrong = [f"optimizer.{name}={shown(y)}" for name, y in schedule.items() if not (number(y) and math.isfinite(y))]
  wrong += [] if text(optimizer.get("schedule", "")) else [f"optimizer.schedule={shown(optimizer['schedule'])}"]
  wrong += [f"steps={shown(x['steps'])}"] if not whole(1)(x.get("steps", 1)) else []
  return f"config.{wrong[0]}" if wrong else ""


NOTE: dict[str, Check] = {  # of what a workdir knows of the hosts' memory
  "run": lambda x: isinstance(x, str) and bool(re.fullmatch("[0-9a-f]{1,64}", x)), "step": whole(),
}  # fmt: skip
STATE: dict[str, Check] = {  # of what a supervisor knows of its job
  "starts": whole(), "saved": whole(-1), "failures": list_of(whole()), "refused": dict_of(text),
  "lost": dict_of(lambda x: number(x) and math.isfinite(x)),
}  # fmt: skip
FORM: dict[str, Any] = {  # of a record of this version: what it must hold, and below what it may
  "arrays": lambda x: bool(x) and dict_of(array, array_name)(x), "strategy": text,
  "devices": whole(1), "processes": whole(1), "context": whole(),
  "loop": {"step": whole()},
  "data": {
    "names": list_of(text), "fingerprints": list_of(text), "turns": list_of(whole(1)), "streams": list_of(whole()),
    "given": list_of(whole(0, 1 << 62)), "left": dict_of(list_of(whole(0, 1 << 62))), "first": whole(0, 1 << 62),
    "seed": whole(), "batch_size": whole(1), "tokenizer": text,
  },
}  # fmt: skip
MAY: dict[str, Any] = {
  "loss": none_or(number), "time": lambda x: number(x) and 0 <= x <= LAST_TIME, "versions": dict_of(text),
  "command": text, "base": {"path": text, "weights": dict_of(text, array_name)},
}  # fmt: skip


def fault(found: Any) -> str:
  """What is wrong with a record, as "time=1e+300"; "" if nothing is. One of another version needs little."""
  if not (isinstance(found, dict) and all(found.get(name) for name in ("arrays", "config", "data"))):
    return "it lacks arrays, config or data"
  if found.get("version") != VERSION:
    return _wrong(found, {name: check for name, check in MAY.items() if name in found})
  if why := config_fault(found["config"]) or _wrong(
    found, FORM | {name: check for name, check in MAY.items() if name in found}
  ):
    return why
  data = found["data"]
  known = {field.name: whole() for field in dataclasses.fields(LoopState)}  # one that is newer has its default
  known["lowest_loss"] = none_or(number)
  if why := _wrong(found["loop"], {name: known.get(name, lambda _: False) for name in found["loop"]}, "loop."):
    return why
  if len({len(data[name]) for name in ("names", "fingerprints", "turns", "streams", "given")}) > 1 or not data["names"]:
    return "data has lists of different lengths"
  if any(len(one) != 2 for one in data["left"].values()):
    return f"data.left={shown(data['left'])}"
  if sum(data["turns"]) > MOST_TURNS or data["first"] > found["loop"]["step"] * data["batch_size"]:
    return f"data.turns={shown(data['turns'])} and data.first={data['first']}"
  return ""


def fitting(found: Any, form: dict[str, Check]) -> dict[str, Any]:
  """The values of a file that are as they are written; the others are left out."""
  return {name: found[name] for name, check in form.items() if name in found and check(found[name])}


def _wrong(found: dict[str, Any], form: dict[str, Any], prefix: str = "") -> str:
  for name, check in form.items():
    value = found.get(name)
    if isinstance(check, dict):
      why = _wrong(value, check, f"{prefix}{name}.") if isinstance(value, dict) else f"{prefix}{name}={shown(value)}"
    else:
      why = "" if check(value) else f"{prefix}{name}={shown(value)}"
    if why:
      return why
  return ""
