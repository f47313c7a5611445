"""Replicas: finds a device whose copy of the state has other bits than the copies on other devices, and heals it.

A chip may compute or remember wrongly without an error. Devices that hold the same piece of an array should hold the
same bits after every step, so one with other bits is wrong. Every `runtime.check_every` steps, and before each save,
each device computes the digests of what it holds (digests.py), without communication and without a copy. Then the
digests are compared over all processes.

With three copies or more, the majority is right. If every step is compared, its bits replace the wrong ones. Otherwise
a difference may be older than a step. Then it has had time to spread, through the gradients that the wrong device has
contributed: all copies may have changed, in the same way. So the run ends, and goes on from the last checkpoint.
docs/cluster.md says what this finds and what it does not.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from errors import JobError
from runtime import processes
from runtime.digests import bits, digest, digest_by_rows, with_bits

SHOWN = 3  # differences that a message names


class Corrupted(JobError):
  """Copies of the same piece of the state differ, and the run cannot go on with any of them."""


class Copied(NamedTuple):
  """An array of the state that is held more than once.

  Attributes:
    place: its number among the leaves of the state.
    copies: for each piece of the array, the devices that hold it, as numbers in `mesh.devices.flat`: [pieces, copies].
  """

  place: int
  name: str
  copies: np.ndarray


class Difference(NamedTuple):
  """A piece of an array whose copies differ.

  Attributes:
    array: its number among those that are held more than once.
    wrong: the devices without the bits of the majority, or, without a majority, all devices that hold the piece.
    healthy: a device with the bits of the majority; None without one.
  """

  array: int
  wrong: tuple[int, ...]
  healthy: int | None


def copies(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
  """Which devices hold the same piece of an array of this shape: `Copied.copies`."""
  number = {device: i for i, device in enumerate(sharding.mesh.devices.flat)}
  found = collections.defaultdict(list)
  for device, index in sharding.devices_indices_map(shape).items():
    found[tuple((part.start, part.stop) for part in index)].append(number[device])
  return np.array(sorted(map(sorted, found.values())))


def compare(copied: Sequence[np.ndarray], digests: np.ndarray) -> list[Difference]:
  """The pieces whose copies differ.

  Args:
    copied: `Copied.copies` of each array.
    digests: of the piece that each device holds of each of these arrays: [devices, arrays].
  """
  found = []
  for i, devices_of in enumerate(copied):
    of_pieces = digests[devices_of, i]  # [pieces, copies]
    for piece in np.flatnonzero((of_pieces != of_pieces[:, :1]).any(axis=1)):
      values, counts = np.unique(of_pieces[piece], return_counts=True)
      is_right = of_pieces[piece] == values[counts.argmax()]
      if 2 * counts.max() > len(is_right):
        wrong, healthy = devices_of[piece][~is_right], int(devices_of[piece][is_right][0])
      else:
        wrong, healthy = devices_of[piece], None
      found.append(Difference(i, tuple(map(int, wrong)), healthy))
  return found


class Replicas:
  """Compares the copies of a run's state. All processes call `check` after the same steps.

  Args:
    arrays: the name and the abstract array of each leaf of the state, with shardings over one mesh.
    every: compare after every so many steps; 0: never.
    say: called with a line when a copy was healed.
    note: called with the step and the `pieces` that were healed, each with its array, device and process.

  Attributes:
    lines: what a run says of it at its start.
  """

  def __init__(
    self,
    arrays: Sequence[tuple[str, jax.ShapeDtypeStruct]],
    every: int,
    say: Callable[[str], None],
    note: Callable[..., None],
  ):
    self.every, self.say, self.note = every, say, note
    self.copied: list[Copied] = []
    self.lines: list[str] = []
    self._compared: int | None = None  # the last step after which all copies were equal
    self._healed: dict[int, int] = {}  # a device: the step after which it was healed
    if every:
      self._find(arrays)

  def _find(self, arrays: Sequence[tuple[str, jax.ShapeDtypeStruct]]) -> None:
    """Sets what is held more than once, and the line about it."""
    count = lambda found: sum(x.size * x.dtype.itemsize for x in found)
    on_host = [x for _, x in arrays if x.sharding.memory_kind == "pinned_host"]
    found = [
      (Copied(i, name, copies(x.sharding, x.shape)), x)
      for i, (name, x) in enumerate(arrays)
      if x.sharding.memory_kind != "pinned_host"
    ]
    found = [(array, x) for array, x in found if array.copies.shape[1] > 1]
    more = "; what is in the host's memory is not compared" if on_host else ""
    if max((x.size for _, x in found), default=0) <= 1:  # at most counters
      self.lines = [f"replicas  nothing is held twice, so runtime.check_every={self.every} compares nothing{more}"]
      return
    share, often = count(x for _, x in found) / count(x for _, x in arrays), f"{self.every} steps"
    once = "; what only one device holds cannot be compared" if len(found) + len(on_host) < len(arrays) else ""
    self.lines = [
      f"replicas  compared every {often if self.every > 1 else 'step'}: {len(found)} of {len(arrays)} arrays, "
      f"{share:.1%} of the state{once}{more}"
    ]
    self.copied, shardings = [array for array, _ in found], [x.sharding for _, x in found]
    self.mesh: Mesh = shardings[0].mesh
    self._digests = _digests(self.mesh, tuple(sharding.spec for sharding in shardings))

  def due(self, step: int, saves: bool) -> bool:
    """Whether to check after a step. `saves`: whether the state will be saved."""
    return bool(self.copied) and (saves or step % self.every == 0)

  def check(self, state: Any, step: int) -> Any:
    """Compares all copies after a step. Returns the state, healed if a copy had to be.

    Raises Corrupted if copies differ and cannot be healed.
    """
    if not self.copied:
      return state
    leaves, tree = jax.tree.flatten(state)
    if found := self._differences(leaves):
      if why := self._incurable(found, step):
        raise Corrupted(
          f"after step {step}, copies of the state differ: {self._list(found)}; {why}; the same command goes on from "
          "the last checkpoint"
        )
      for i in sorted({difference.array for difference in found}):
        place = self.copied[i].place
        leaves[place] = _healed(leaves[place], self.mesh, [difference for difference in found if difference.array == i])
      if again := self._differences(leaves):
        raise Corrupted(f"after step {step}, copies of the state differ although they were healed: {self._list(again)}")
      self._healed |= {device: step for difference in found for device in difference.wrong}
      self.say(f"healed    after step {step}: {self._list(found)} had other bits than most copies, and has theirs now")
      self.note(
        step,
        pieces=[{"array": self.copied[d.array].name, **self._where(device)} for d in found for device in d.wrong],
      )
      state = jax.tree.unflatten(tree, leaves)
    self._compared = step
    return state

  def _incurable(self, found: Sequence[Difference], step: int) -> str:
    """Why these differences cannot be healed; "" if they can."""
    if any(difference.healthy is None for difference in found):
      return "no majority says which bits are right"
    if self._compared is None:
      return "they have never been equal in this run"
    if self.every > 1:
      return f"they were last equal after step {self._compared}, so wrong gradients may have changed all of them since"
    again = sorted({device for difference in found for device in difference.wrong} & self._healed.keys())
    if again:
      where, before = self._where(again[0]), self._healed[again[0]]
      return f"device {where['device']} was healed after step {before} before, so leave it out"
    return ""

  def _differences(self, leaves: Sequence[jax.Array]) -> list[Difference]:
    return compare([array.copies for array in self.copied], self._read(leaves))

  def _list(self, found: Sequence[Difference]) -> str:
    """Such as "params/embedding on device 3 (process 0)", for the first few differences."""
    shown = []
    for difference in found[:SHOWN]:
      where = [self._where(device) for device in difference.wrong]
      devices = " and ".join(f"device {place['device']} (process {place['process']})" for place in where)
      shown.append(f"{self.copied[difference.array].name} on {devices}")
    return ", ".join(shown) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")

  def _where(self, number: int) -> dict[str, int]:
    device = self.mesh.devices.flat[number]
    return {"device": device.id, "process": device.process_index}

  def _read(self, leaves: Sequence[jax.Array]) -> np.ndarray:
    """The digests of what each device of any process holds of the copied arrays: [devices, arrays]."""
    found = self._digests(*(leaves[array.place] for array in self.copied))
    mine = [(shard.index[0].start or 0, np.asarray(shard.data)[0].tolist()) for shard in found.addressable_shards]
    of_all = dict(pair for pairs in processes.all_gather(mine) for pair in pairs)
    return np.array([of_all[number] for number in range(self.mesh.size)], np.uint32)


@functools.cache
def _digests(mesh: Mesh, specs: tuple[P, ...]) -> jax.stages.Wrapped:
  """The program that computes, on each device, the digests of its pieces of arrays with these specs."""
  hashed = digest_by_rows if mesh.devices.flat[0].platform == "cpu" else digest

  def on_each(*pieces: jax.Array) -> jax.Array:
    return jnp.stack([hashed(piece) for piece in pieces])[None]

  return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=_each(mesh), check_vma=False))


def _each(mesh: Mesh) -> P:
  """The spec of an array with a row for each device."""
  return P(tuple(mesh.axis_names))


def _healed(x: jax.Array, mesh: Mesh, found: Sequence[Difference]) -> jax.Array:
  """The array with the bits of healthy devices in these pieces of the wrong ones. Other pieces do not change."""

  def flags(devices: Iterable[int | None]) -> jax.Array:
    values = np.isin(np.arange(mesh.size), [device for device in devices if device is not None])
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, _each(mesh)), lambda index: values[index])

  gives, takes = (difference.healthy for difference in found), (device for d in found for device in d.wrong)
  return _sent(mesh, cast(NamedSharding, x.sharding).spec)(x, flags(gives), flags(takes))


@functools.cache
def _sent(mesh: Mesh, spec: P) -> jax.stages.Wrapped:
  """The program that sends each device that takes the bits of the one among its copies that gives."""
  placed = {axis for axes in spec if axes for axis in ([axes] if isinstance(axes, str) else axes)}
  over = tuple(axis for axis in mesh.axis_names if axis not in placed)

  def on_each(piece: jax.Array, gives: jax.Array, takes: jax.Array) -> jax.Array:
    words = bits(piece)
    sent = jax.lax.psum(jnp.where(gives[0], words, 0).astype(jnp.uint32), over)  # of one device, plus zeros
    return with_bits(jnp.where(takes[0], sent.astype(words.dtype), words), piece)

  specs = (spec, _each(mesh), _each(mesh))
  return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False))
