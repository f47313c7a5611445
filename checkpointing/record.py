"""The record of a checkpoint: it describes the run that wrote the checkpoint and decides which runs may resume from it.

The record is JSON, stored beside the arrays. It holds the config, the data, versions, devices, and for every array the
shape, dtype and a digest. The digest is computed on the devices and does not depend on the layout, so restored arrays
are checked against it.
"""

import dataclasses
import functools
import importlib.metadata
import json
import platform
import shlex
import sys
import time
import typing
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from checkpointing import history
from data import Dataset
from errors import ConfigError
from runtime.digests import digest
from strategies import Strategy
from training.loop import LoopState

VERSION = 4  # the version of the record's format
Record = dict[str, Any]  # as `make` returns it; a checkpoint's also holds what `Checkpoints.save` adds
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
# The fields of config.model that a resumed run may change.
FREE_TO_CHANGE = (
  "attention", "attention_context", "remat", "saved", "loss_chunk", "dtype", "dropout", "pixel_mean", "pixel_std",
  "expert_capacity",
)  # fmt: skip
DATA = tuple(  # fields that may change the examples
  f"data.{name}" for name in (
    "name", "path", "validation_path", "text_field", "label_field", "prompt_field", "completion_field", "tokenizer",
    "packing", "resize", "dir",
  )
)  # fmt: skip
RUN = (
  "strategy", "mesh", "gather", "sequence_parallel", "pipeline", "optimizer", "steps", "accumulation", "model",
  "data.augment", "eval_examples", "init_from",
)  # fmt: skip
REPORTED_CHANGES = (*RUN, *DATA)  # beginnings of the names of fields
_ENTRY = [list, str, str]  # of an array: its shape, dtype and digest
_FORM: dict[str, Any] = {  # the types of what is read from a record
  "config": dict, "arrays": dict, "strategy": str, "devices": int, "processes": int, "context": int,
  "loss": float | int | None, "loop": dict.fromkeys(typing.get_type_hints(LoopState), int),
  "data": {
    "names": list, "fingerprints": list, "turns": list, "streams": list, "given": list, "left": dict, "first": int,
    "seed": int, "batch_size": int,
  },
}  # fmt: skip


def is_whole(found: Any) -> bool:
  """Whether a record holds all that is read from it. One of another version only needs what names its run."""
  if not (isinstance(found, dict) and all(found.get(name) for name in ("arrays", "config", "data"))):
    return False
  if found.get("version") != VERSION:
    return True
  entries = found["arrays"].values() if isinstance(found["arrays"], dict) else [None]
  return (
    _has(found, _FORM)
    and found["loop"].keys() == _FORM["loop"].keys()
    and all(isinstance(entry, list) and [type(x) for x in entry] == _ENTRY for entry in entries)
  )


def _has(found: Any, form: Any) -> bool:
  if isinstance(form, dict):
    return isinstance(found, dict) and all(_has(found.get(name), inner) for name, inner in form.items())
  return isinstance(found, form)


def make(config: ConfigDict, dataset: Dataset, strategy: Strategy) -> Record:
  """The part of the record that is the same for all checkpoints of a run."""
  versions = {name: importlib.metadata.version(name) for name in PACKAGES}
  return {
    "version": VERSION,
    "config": json.loads(config.to_json()),  # as it will be read again: tuples become lists
    "data": history.section(config, dataset),
    "versions": versions | {"python": platform.python_version()},
    "strategy": strategy.describe(config.strategy),
    "devices": strategy.mesh.devices.size,
    "processes": jax.process_count(),
    "context": config.model.seq_len,  # tokens of a text, at most; `restore.begin` takes a base's if that is more
    "command": shlex.join(["python", *sys.argv]),
  }


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested sections to dotted names. A mixture in `data.path` is a value, not a section."""
  out: dict[str, Any] = {}
  for name, value in fields.items():
    is_section = isinstance(value, dict) and prefix + name != "data.path"
    out |= flat(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
  return out


def check_version(saved: Record, now: Record, where: str) -> None:
  """Raises ConfigError if the record `saved` of the checkpoint `where` has another format than `now`."""
  if saved.get("version") != now.get("version"):
    raise ConfigError(
      f"{where} has record version {saved.get('version')}, but this program needs {now.get('version')}; use the "
      "version of the program that wrote it"
    )


def check_same_run(saved: Record, now: Record, where: str) -> None:
  """Raises ConfigError if a run with record `now` may not resume from the checkpoint `where` with record `saved`.

  Both must have the same version (`check_version`).
  """
  before, after = (flat(record["config"]) for record in (saved, now))
  names = [n for n in sorted(before.keys() | after.keys()) if n.startswith("model.") and n[6:] not in FREE_TO_CHANGE]
  wrong = [_change(name, before, after) for name in names if before.get(name) != after.get(name)]
  # The step alone gives the position in the data, so everything that determines a batch must be equal.
  wrong += [_change(name, saved["data"], now["data"]) for name in ("seed", "batch_size") if _differs(name, saved, now)]
  other_tokens, other_data = _differs("tokenizer", saved, now), not history.same(saved["data"], now["data"])
  if other_tokens or (other_data and after["data.on_change"] != "continue"):
    fields = [name for name in DATA if before.get(name) != after.get(name)]
    wrong += [_change(name, before, after) for name in fields] or ["the content of the data has changed"]
    if not other_tokens:
      wrong[-1] += " (or go on with the new data: data.on_change=continue)"
  if wrong:
    raise ConfigError(f"{where} is from another run: {'; '.join(wrong)}; use the same, or name another workdir")


def check_arrays(saved: Record, abstract: Any, where: str) -> None:
  """Raises ConfigError unless the checkpoint `where` holds all arrays of the tree `abstract`, with the same shapes."""
  wanted = {name: [list(x.shape), str(x.dtype)] for name, x in named(abstract)}
  held = {name: entry[:2] for name, entry in saved["arrays"].items()}
  wrong = [
    f"{name} is {_shape(held.get(name))} in the checkpoint and {_shape(shape)} in this run"
    for name, shape in wanted.items()
    if held.get(name) != shape
  ]
  if wrong:
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise ConfigError(
      f"{where} holds another model or optimizer: {'; '.join(wrong[:3])}{more}; use the same model.* and optimizer.*"
    )


def changes(saved: Record, now: Record) -> list[str]:
  """Config differences to report when resuming."""
  before, after = (flat(record["config"]) for record in (saved, now))
  reported = [name for name in after if name.startswith(REPORTED_CHANGES) and name in before]
  found = [_change(name, before, after) for name in reported if before[name] != after[name]]
  if not history.same(saved["data"], now["data"]):
    found.append(history.change(saved["data"], now["data"]))
  return found + [_change(name, saved, now) for name in ("devices", "processes") if saved[name] != now[name]]


def _differs(name: str, saved: Record, now: Record) -> bool:
  return saved["data"][name] != now["data"][name]


def _change(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
  return f"{name} was {before.get(name)!r} and is now {after.get(name)!r}"


def _shape(entry: list | None) -> str:
  return "absent" if entry is None else f"{entry[1]}{entry[0]}"


def named(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree, with names such as "params/blocks/mlp/up"."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return [(name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  """Puts named leaves into nested dicts, which can be read without the classes of the original tree."""
  out: dict[str, Any] = {}
  for name, leaf in pairs:
    *path, last = name.split("/")
    functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, out)[last] = leaf
  return out


def of_state(state: Any, run: Record, loop: LoopState) -> tuple[dict[str, Any], Record]:
  """What a checkpoint of `state` holds: its arrays, as a tree of dicts, and its record. Waits until they are computed.

  Weights of a base, which a run with adapters does not train, are left out.

  Args:
    run: the record of the run (`make`).
  """
  unchanging = run.get("base", {}).get("weights", {})
  tree = nested((name, x) for name, x in named(state) if name not in unchanging)
  return tree, run | {"loop": dataclasses.asdict(loop), "loss": None, "arrays": arrays(tree), "time": time.time()}


def arrays(state: Any) -> dict[str, list]:
  """The shape, dtype and digest of each array of a tree. Waits until the arrays are computed."""
  names, leaves = zip(*named(state), strict=True)
  digests = [jax.device_get(_digest(x)) for x in leaves]
  return {
    name: [list(x.shape), str(x.dtype), f"{int(d):08x}"] for name, x, d in zip(names, leaves, digests, strict=True)
  }


def damaged(state: Any, saved: Record) -> str | None:
  """The name of an array that differs from the record; None if there is none."""
  found = arrays(state)
  return next((name for name, entry in found.items() if saved["arrays"].get(name) != entry), None)


def _digest(x: jax.Array) -> jax.Array:
  """The digest of one array. One program per shape compiles little, and one array at a time needs little memory.

  Await each digest before the next. XLA's CPU backend may hang on many small programs with collectives.
  """
  return _jitted(NamedSharding(x.sharding.mesh, P()) if isinstance(x.sharding, NamedSharding) else None)(x)


@functools.cache
def _jitted(replicated: NamedSharding | None) -> jax.stages.Wrapped:
  return jax.jit(digest, out_shardings=replicated)
