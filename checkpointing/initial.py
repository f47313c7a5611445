"""The parameters that a run begins with: those of another run, or of a model folder (`init_from`).

A run that trains adapters (models/lora.py) needs them whenever it starts, because its checkpoints hold only what it
trains. A record's `base` says where the other weights are, and has a digest of each.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from checkpointing import pretrained, reading, record
from checkpointing.record import Record
from errors import ConfigError, JobConfigError
from models.parameters import joined, named, nested
from runtime import processes
from runtime.storage.bucket import Location, location
from training.program import Params, Program

# Fields of models that change what weights of the same shapes compute. A run may change how it rotates positions, to
# read longer texts (`rope_base`, `rope_scaling`), and give windows to layers that had none.
SAME = ("mlp", "norm_eps", "norm_offset", "embedding_scale", "attention_scale", "router", "router_scale")
OFF = ("norm_offset", "attention_scale")  # of these, 0 is what a run did that is older than the field
SAME_WINDOWS = ("window", "layers_pattern", "rope_base_local")

Base = dict[str, Any]  # "path", and the digests of "weights" by name


@dataclasses.dataclass(frozen=True)
class Initial:
  """Parameters that a run begins with.

  Attributes:
    whose: the model, or the run, that they come from.
    context: how many tokens a text of that model has at most; 0 if unknown.
    notes: what to say of it.
  """

  params: Params
  whose: str
  context: int
  notes: tuple[str, ...] = ()


def load(source: str, wanted: Params, program: Program, now: Record) -> Initial:
  """The parameters of `source`, in the layout of `wanted`.

  Args:
    source: the workdir or a checkpoint of another run, or a model folder.
    wanted: all parameters of the program, or those that are not trained.
    now: the record of this run.
  """
  if pretrained.is_folder(source):
    with processes.raise_together():
      folder = pretrained.Folder(source)
      params = pretrained.load(folder, program.sizes, wanted)
    whose = f"{source}, a {folder.shape.family} model in {' and '.join(folder.dtypes)}"
    return Initial(params, whose, folder.shape.context, folder.notes)
  at = location(processes.on_process_zero(lambda: str(reading.newest(location(source, "init_from")))), "init_from")
  saved = processes.on_process_zero(lambda: reading.read_record(at))
  where = f"init_from={source!r}"
  with processes.raise_together():
    if saved is None and reading.is_place(at):
      raise ConfigError(f"{where} is damaged: the record of {at} cannot be read; {reading.instead(at)}")
    if saved is None:
      raise ConfigError(
        f"{where} names no workdir with a checkpoint, no checkpoint and no folder with a model's safetensors; "
        f"{pretrained.other_form(source) or 'use the workdir of another run'}"
      )
    record.check_version(saved, now, where)
    if saved.get("base"):
      raise ConfigError(
        f"{where} holds only adapters; merge them into their model with `python -m tools.export {source} --merge "
        "--out=DIR`, and use DIR"
      )
    theirs, ours = saved["data"]["tokenizer"], now["data"]["tokenizer"]
    if theirs != ours:
      raise ConfigError(
        f"{where} was trained on tokens of {theirs!r}, but this run has tokens of {ours!r}; use the same tokenizer"
      )
    _check_same_model(saved, now, where)

    def stored(path: Any, w: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:  # in the dtype in which it was saved
      name = "params/" + jax.tree_util.keystr(path, simple=True, separator="/")
      return jax.ShapeDtypeStruct(w.shape, saved["arrays"].get(name, ["", w.dtype])[1], sharding=w.sharding)

    params = read_params(at, saved, jax.tree.map_with_path(stored, wanted), program, where)
  params = jax.tree.map(lambda w, to: w.astype(to.dtype), params, wanted)
  return Initial(params, f"{source}, step {saved['loop']['step']}, saved by {saved['strategy']}", saved["context"])


def _check_same_model(saved: Record, now: Record, where: str) -> None:
  """Raises ConfigError if this run would compute something else with the weights, without any other shape."""
  theirs, ours, _, _ = record.fields_of(saved, now)
  of = lambda fields, name: fields.get(f"model.{name}") or 0
  names = [name for name in SAME if f"model.{name}" in theirs or name in OFF]
  names += SAME_WINDOWS if of(theirs, "window") else ()
  if differing := [name for name in names if of(theirs, name) != of(ours, name)]:
    both = lambda fields: " and ".join(f"model.{name}={of(fields, name)!r}" for name in differing)
    raise ConfigError(f"{where} has {both(theirs)}, but this run has {both(ours)}; use the same")


def read_params(folder: Location, saved: Record, abstract: Params, program: Program, where: str) -> Params:
  """Parameters of a checkpoint with record `saved`, in the layout of `abstract`; their averages, if it has them.

  Raises ConfigError, naming `where`, if they have other shapes or are damaged.
  """
  wanted, own = dict(named(abstract)), _shapes(program)
  held = {name: record.array_of(saved, name) for name in wanted}
  as_held = lambda name, w: w if held[name].startswith("params/") else w.update(dtype=jnp.float32)
  only = nested((held[name], as_held(name, w)) for name, w in wanted.items())
  with processes.raise_together():
    record.check_arrays(saved, only, {held[name]: own[f"params/{name}"] for name in wanted}, where)
  read, why = reading.read_tree(folder, only, saved)
  if read is None:
    raise JobConfigError(f"{where} is damaged ({why}); {reading.instead(folder)}")
  found = dict(named(read))
  return nested((name, found[held[name]].astype(w.dtype)) for name, w in wanted.items())


def read_model(folder: Location, saved: Record, abstract: Params, program: Program) -> Params:
  """All parameters of the model in a checkpoint; those that were not trained are read from where they are."""
  trained = read_params(folder, saved, program.changing(abstract), program, str(folder))
  others = program.of_base(abstract)
  return joined(trained, load_base(saved["base"]["path"], others, program, saved, saved["base"])) if others else trained


def base_of(source: str, params: Params, program: Program) -> Base:
  """What a record says of parameters that are not trained. Of a workdir it names the checkpoint."""
  return {"path": str(reading.newest(location(source, "init_from")).absolute()), "weights": _digests(params, program)}


def load_base(source: str, wanted: Params, program: Program, now: Record, base: Base) -> Params:
  """The parameters that are not trained, in the layout of `wanted`. Raises ConfigError unless they are still `base`."""
  params = load(source, wanted, program, now).params
  check_base(source, _digests(params, program), base)
  return params


def check_base(source: str, found: dict[str, str], base: Base) -> None:
  """Raises ConfigError unless the weights with these digests, read from `source`, are those of `base`."""
  changed = [name for name, digest in found.items() if digest != base["weights"].get(name)]
  if changed:
    raise JobConfigError(
      f"init_from={source!r} is not the model that these adapters were trained with: {changed[0]} differs; use a copy "
      f"of what {base['path']!r} was then"
    )


def _shapes(program: Program) -> record.Shapes:
  """The shapes of parameters without padding, by their names in a checkpoint."""
  return record.shapes({"params": program.abstract_state().params})


def _digests(params: Params, program: Program) -> dict[str, str]:
  own = _shapes(program)
  return {name: digest(w, own[name]) for name, w in named({"params": params})}


def digest(w: jax.Array, shape: Sequence[int]) -> str:
  """A digest of a weight of this shape, without padding, in bfloat16, in which a run may store it."""
  return record.arrays({"": w.astype(jnp.bfloat16)}, {"": list(shape)})[""][2]
