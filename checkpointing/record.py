"""What a checkpoint says of the run that wrote it, and whether another run may go on from it.

The record is plain JSON beside the arrays: config, data, versions, where it ran, and for every array its shape, dtype
and a digest. The digest is computed on the devices from the bits and their places, so it is the same under every
layout, and a restored array can be held to it.
"""

import functools
import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from data import Dataset
from errors import ConfigError
from strategies import Strategy

VERSION = 2  # of the record's format
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
FREE_TO_CHANGE = ("attention", "remat", "dtype", "dropout")  # of config.model: how it is computed, not what it is
TOLD = ("strategy", "mesh", "pipeline", "optimizer", "steps", "accumulation", "model", "data.augment")


def make(config: Any, dataset: Dataset, strategy: Strategy) -> dict[str, Any]:
  """The part of the record that is the same for every checkpoint of a run.

  Args:
    config: as in configs/base.py.
    dataset: for its fingerprint and tokenizer.
    strategy: for its mesh.
  """
  versions = {name: importlib.metadata.version(name) for name in PACKAGES}
  return {
    "version": VERSION,
    "config": config.to_dict(),
    "data": {
      "fingerprint": dataset.fingerprint,
      "tokenizer": dataset.tokenizer,
      "seed": config.seed,
      "batch_size": config.batch_size,
    },
    "versions": versions | {"python": platform.python_version()},
    "strategy": strategy.describe(config.strategy),
    "devices": strategy.mesh.devices.size,
    "processes": jax.process_count(),
  }


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested sections as dotted names."""
  out: dict[str, Any] = {}
  for name, value in fields.items():
    out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
  return out


def check_same_run(saved: dict[str, Any], now: dict[str, Any], where: str) -> None:
  """Raises ConfigError if a run with record `now` may not go on from the checkpoint `where` with record `saved`."""
  if saved.get("version") != now.get("version"):
    raise ConfigError(f"{where} was written by another version of this program ({saved.get('version')}); use that one")
  before, after = (flat(record["config"]) for record in (saved, now))
  names = [n for n in sorted(before.keys() | after.keys()) if n.startswith("model.") and n[6:] not in FREE_TO_CHANGE]
  wrong = [_change(name, before, after) for name in names if before.get(name) != after.get(name)]
  # The data position is the step, so what makes a step's batch must be the same too.
  wrong += [_change(name, saved["data"], now["data"]) for name in ("seed", "batch_size") if _differs(name, saved, now)]
  if _differs("fingerprint", saved, now):
    fields = [f"data.{name}" for name in ("name", "path", "tokenizer")]
    fields = [_change(name, before, after) for name in fields if before.get(name) != after.get(name)]
    wrong += fields or ["the data itself has changed (data.fingerprint)"]
  if wrong:
    raise ConfigError(f"{where} is of another run: {'; '.join(wrong)}; set the same, or name another workdir")


def check_arrays(saved: dict[str, Any], abstract: Any, where: str) -> None:
  """Raises ConfigError unless the checkpoint `where` holds the arrays of the tree `abstract`, in their shapes."""
  wanted = {name: [list(x.shape), str(x.dtype)] for name, x in named(abstract)}
  held = {name: entry[:2] for name, entry in saved["arrays"].items()}
  wrong = [
    f"{name} is {_shape(held.get(name))} there and {_shape(shape)} here"
    for name, shape in wanted.items()
    if held.get(name) != shape
  ]
  if wrong:
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise ConfigError(f"{where} holds another model or optimizer: {'; '.join(wrong[:3])}{more}; set model.* as there")


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
  """What is allowed to differ between two runs, does, and is worth telling."""
  before, after = (flat(record["config"]) for record in (saved, now))
  names = [name for name in after if name.startswith(TOLD) and name in before and before[name] != after[name]]
  told = [_change(name, before, after) for name in names]
  return told + [_change(name, saved, now) for name in ("devices", "processes") if saved[name] != now[name]]


def _differs(name: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
  return saved["data"][name] != now["data"][name]


def _change(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
  return f"{name} is {before.get(name)!r} there and {after.get(name)!r} here"


def _shape(entry: list | None) -> str:
  return "absent" if entry is None else f"{entry[1]}{entry[0]}"


def named(tree: Any) -> list[tuple[str, Any]]:
  """The leaves of a tree with their names, such as "params/blocks/mlp/up"."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return [(name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
  """The leaves as dicts in dicts, by the parts of their names: a tree that needs no class to be read."""
  out: dict[str, Any] = {}
  for name, leaf in pairs:
    *path, last = name.split("/")
    functools.reduce(lambda inner, part: inner.setdefault(part, {}), path, out)[last] = leaf
  return out


def arrays(state: Any) -> dict[str, list]:
  """For each array of a tree: shape, dtype and digest. Waits until the arrays are computed."""
  names, leaves = zip(*named(state), strict=True)
  digests = [jax.device_get(_digest(x)) for x in leaves]
  return {
    name: [list(x.shape), str(x.dtype), f"{int(d):08x}"] for name, x, d in zip(names, leaves, digests, strict=True)
  }


def damaged(state: Any, saved: dict[str, Any]) -> str | None:
  """The name of an array in a tree that is not what the record says, if there is one."""
  found = arrays(state)
  return next((name for name, entry in found.items() if saved["arrays"].get(name) != entry), None)


def _digest(x: jax.Array) -> jax.Array:
  """Of one array, so that equal shapes are compiled once, and while one is computed little memory is needed.

  Await each before the next: XLA's CPU backend may hang on many small programs whose devices all wait for each other.
  """
  return _jitted(NamedSharding(x.sharding.mesh, P()) if isinstance(x.sharding, NamedSharding) else None)(x)


@functools.cache
def _jitted(replicated: NamedSharding | None) -> Any:
  return jax.jit(digest, out_shardings=replicated)


def digest(x: jax.Array) -> jax.Array:
  """A uint32 that depends on every bit of an array and on its place, and on no layout.

  The sum, modulo 2³², of hashes of each element's bits and indices: integer sums come out the same in any order, and a
  change of one element always shows.
  """
  size = x.dtype.itemsize
  bits = x.astype(jnp.uint8) if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * min(size, 4)}")
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis in range(bits.ndim):  # an odd factor, so that indices of different axes do not fall together
    place = place * jnp.uint32(0xCC9E2D51) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  return jnp.sum(_mix(bits.astype(jnp.uint32) ^ _mix(place)), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """The finalizer of murmur3: one to one, and every bit reaches every other."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x
