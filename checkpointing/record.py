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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from checkpointing import history
from checkpointing.form import SCHEDULE, VERSION
from data import Dataset
from errors import ConfigError, shown
from models.dimensions import resized
from models.parameters import named, nested
from runtime.digests import digest
from strategies import Strategy
from training.loop import LoopState
from training.optimizer import Optimizer
from training.schedules import SCHEDULES

Shapes = dict[str, list[int]]  # of arrays, by name
Record = dict[str, Any]  # as `make` returns it; a checkpoint's also holds what `Checkpoints.save` adds
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
# The fields of config.model that a resumed run may change.
FREE_TO_CHANGE = (
  "attention", "attention_context", "remat", "saved", "unroll", "loss_chunk", "dtype", "dropout", "pixel_mean",
  "pixel_std", "expert_capacity",
)  # fmt: skip
EMA = "opt_state/ema/"  # the names of averages of weights begin so
# Fields of a model that are newer than some records, with what those runs had. Of others, it is what is empty or 0.
BEFORE = {
  "model.name": "transformer", "model.mixer": "attention", "model.mlp": "swiglu", "model.rope_scaling_kind": "llama3",
  "model.embedding_scale": 1.0, "model.norms": "before", "model.qk_norm_over": "head",
}  # fmt: skip
STATE = ("optimizer.name", "optimizer.moments")  # other fields that must agree, because the arrays follow them
DATA = tuple(  # fields that may change the examples
  f"data.{name}" for name in (
    "name", "path", "validation_path", "form", "text_field", "label_field", "prompt_field", "completion_field",
    "messages_field", "tokenizer", "packing", "resize", "dir", "on_bad_row",
  )
)  # fmt: skip
RUN = (
  "strategy", "mesh", "gather", "sequence_parallel", "pipeline", "optimizer", "steps", "accumulation", "model",
  "data.augment", "eval_examples", "init_from",
)  # fmt: skip
GROUP = 1 << 26  # bytes of arrays whose digests one program computes
REPORTED_CHANGES = (*RUN, *DATA)  # beginnings of the names of fields


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
    "shapes": shapes(strategy.program.abstract_state()),
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
      f"{where} has record version {shown(saved.get('version'))}, but this program needs {now.get('version')}; use the "
      "version of the program that wrote it"
    )


def fields_of(saved: Record, now: Record) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
  """The fields of both configs by their dotted names, and those that only the newer and only the saved one has.

  This is the rule for all who read a record (`reporting.source.config_of` has it, too). A field that a record lacks is
  newer than it, and says what the run has been since its beginning: its default means what runs did before. A field
  that only the record has is refused if it says what the arrays are: nobody here knows what it means.
  """
  before, after = (BEFORE | flat(record["config"]) for record in (saved, now))
  return before, after, [name for name in after if name not in before], [name for name in before if name not in after]


def check_same_run(saved: Record, now: Record, where: str) -> None:
  """Raises ConfigError if a run with record `now` may not resume from the checkpoint `where` with record `saved`.

  Both must have the same version (`check_version`).
  """
  before, after, _, unknown = fields_of(saved, now)
  names = [n for n in sorted(before) if n.startswith("model.") and n[6:] not in FREE_TO_CHANGE]
  names += [name for name in STATE if name in before]
  names += ["optimizer.ema"] if bool(before.get("optimizer.ema")) != bool(after.get("optimizer.ema")) else []
  if lost := [f"{name}={shown(before[name])}" for name in names if name in unknown]:
    raise ConfigError(f"{where} has {', '.join(lost)}, which is not a field here; use the program that wrote it")
  wrong = [_change(name, before, after) for name in names if before.get(name) != after.get(name)]
  # The step alone gives the position in the data, so everything that determines a batch must be equal.
  wrong += [_change(name, saved["data"], now["data"]) for name in ("seed", "batch_size") if _differs(name, saved, now)]
  other_tokens, other_data = _differs("tokenizer", saved, now), not history.same(saved["data"], now["data"])
  if other_tokens or (other_data and after["data.on_change"] != "continue"):
    fields = [name for name in DATA if name in before and before[name] != after.get(name)]
    wrong += [_change(name, before, after) for name in fields] or ["the content of the data has changed"]
    if not other_tokens:
      wrong[-1] += " (or go on with the new data: data.on_change=continue)"
  if wrong:
    raise ConfigError(f"{where} is from another run: {'; '.join(wrong)}; use the same, or name another workdir")


def check_arrays(saved: Record, abstract: Any, own: Shapes, where: str) -> None:
  """Raises ConfigError unless the checkpoint `where` holds all arrays of the tree `abstract`, with the same shapes.

  Args:
    own: the shapes without padding.
  """
  wanted = {name: [own.get(name, list(x.shape)), str(x.dtype)] for name, x in named(abstract)}
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
  before, after, newer, _ = fields_of(saved, now)
  reported = [name for name in after if name.startswith(REPORTED_CHANGES) and name in before]
  found = [_change(name, before, after) for name in reported if before[name] != after[name]]
  filled = [name for name in newer if name.startswith(("model.", *STATE))]
  told = "the checkpoint was saved before it was recorded"
  found += [f"{name} is now {after[name]!r}; {told}" for name in filled if after[name]]
  if off := [f"{name}={after[name]!r}" for name in filled if not after[name]]:
    found.append(f"newer than the checkpoint, with their defaults: {', '.join(off)}")
  if not history.same(saved["data"], now["data"]):
    found.append(history.change(saved["data"], now["data"]))
  return found + [_change(name, saved, now) for name in ("devices", "processes") if saved[name] != now[name]]


def jump(saved: Record, now: Optimizer) -> list[str]:
  """A note if the next step has another learning rate than in the run that saved, because the schedule has changed."""
  config, step = saved["config"], saved["loop"]["step"]
  follows = ("schedule", *SCHEDULE)
  given = {"schedule": "cosine"} | {name: config[name] for name in ("steps",) if name in config}  # once the only one
  given |= config.get("optimizer", {})
  if given["schedule"] not in SCHEDULES:
    was = f"optimizer.schedule was {shown(given['schedule'])}, which is not known here"
    return [f"the learning rate may jump, because {was}"]
  before = dataclasses.replace(now, **{name: given[name] for name in follows if name in given})
  if before == now:
    return []
  old, new = (float(optimizer.learning_rate_at(step)) for optimizer in (before, now))
  differ = [name for name in follows if getattr(before, name) != getattr(now, name)]
  changed = [name if name == "steps" else f"optimizer.{name}" for name in differ]
  why = f"because its schedule follows {' and '.join(changed)}"
  return [] if f"{old:.3g}" == f"{new:.3g}" else [f"the learning rate jumps from {old:.3g} to {new:.3g}, {why}"]


def _differs(name: str, saved: Record, now: Record) -> bool:
  return saved["data"][name] != now["data"][name]


def _change(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
  return f"{name} was {before.get(name)!r} and is now {after.get(name)!r}"


def _shape(entry: list | None) -> str:
  return "absent" if entry is None else f"{entry[1]}{entry[0]}"


def array_of(saved: Record, name: str) -> str:
  """The array of a checkpoint with a weight of the model: the average over steps (`optimizer.ema`), if there is one."""
  return f"{EMA}{name}" if f"{EMA}{name}" in saved["arrays"] else f"params/{name}"


def of_state(state: Any, run: Record, loop: LoopState) -> tuple[dict[str, Any], Record]:
  """What a checkpoint of `state` holds: its arrays, as a tree of dicts, and its record. Waits until they are computed.

  Weights of a base, which a run with adapters does not train, are left out.

  Args:
    run: the record of the run (`make`).
  """
  unchanging, own = run.get("base", {}).get("weights", {}), run.get("shapes", {})
  tree = nested((name, x) for name, x in named(state) if name not in unchanging)
  saved = {name: entry for name, entry in run.items() if name != "shapes"}  # those of all arrays are in "arrays"
  return tree, saved | {
    "loop": dataclasses.asdict(loop), "loss": None, "arrays": arrays(tree, own), "time": time.time()
  }  # fmt: skip


def shapes(state: Any) -> Shapes:
  """The shape of each array of a tree."""
  return {name: list(x.shape) for name, x in named(state)}


def arrays(state: Any, own: Shapes | None = None) -> dict[str, list]:
  """The shape, dtype and digest of each array of a tree. Waits until the arrays are computed.

  Args:
    own: the shapes of some without their padding (strategies/execution/padding.py), which counts for nothing.
  """
  leaves = named(state)
  cut = {name: (own or {}).get(name, list(x.shape)) for name, x in leaves}
  found = {}
  for group in _groups(leaves):
    digests = _digests([x for _, x in group], tuple(tuple(cut[name]) for name, _ in group))
    for (name, x), value in zip(group, jax.device_get(digests), strict=True):
      found[name] = [cut[name], str(x.dtype), f"{int(value):08x}"]
  return found


def damaged(state: Any, saved: Record) -> str | None:
  """The name of an array that differs from the record; None if there is none."""
  found = arrays(state, {name: entry[0] for name, entry in saved["arrays"].items()})
  return next((name for name, entry in found.items() if saved["arrays"].get(name) != entry), None)


def _groups(leaves: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
  """The leaves in groups, in order. Small arrays share a group, so that few programs are compiled; large ones do not,
  because a digest may need as much memory as its array."""
  groups, size = list[list[tuple[str, Any]]](), GROUP
  for leaf in leaves:
    size += leaf[1].nbytes
    if size > GROUP:
      groups.append([])
      size = leaf[1].nbytes
    groups[-1].append(leaf)
  return groups


def _digests(arrays: list[jax.Array], shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
  """The digests of a group of arrays, each cut to its shape.

  Await them before those of the next group. XLA's CPU backend may hang on many small programs with collectives.
  """
  mesh = next((x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding)), None)
  return _jitted(NamedSharding(mesh, P()) if mesh else None)(arrays, shapes)


@functools.cache
def _jitted(replicated: NamedSharding | None) -> jax.stages.Wrapped:
  def digests(arrays: list[jax.Array], shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
    return jnp.stack([digest(resized(x, shape)) for x, shape in zip(arrays, shapes, strict=True)])

  return jax.jit(digests, static_argnums=1, out_shardings=replicated)
