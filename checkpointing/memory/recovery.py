"""Restores the newest state that the hosts' memory still has whole, in any layout and on any number of processes.

All processes say which portions they have. A save counts if some process has each of its portions. Then every process
puts its shards together from the pieces that overlap them: its own ones, and those that others have. What it reads is
checked, piece by piece and at the end array by array. A save that fails is left out, and the next older one is tried.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpointing import form, record
from checkpointing.memory import pieces
from checkpointing.memory.exchange import Peer
from checkpointing.memory.pieces import Bounds
from checkpointing.memory.store import Damaged, Entry, Index, Portion, Save, portion_of
from checkpointing.memory.tier import Tier
from checkpointing.record import Record
from errors import first_line
from runtime import processes
from training.program import TrainState

SHOWN = 5  # processes or reasons that a message names
Holders = dict[Portion, list[int]]  # the processes that have a portion, this one first


class Place(NamedTuple):
  """Where a piece of a save is: in which portion, and where in its file."""

  portion: Portion
  entry: Entry


class Reader:
  """Reads the portions of one save from this host and from other processes. A context manager."""

  def __init__(self, tier: Tier, holders: Holders):
    self.tier, self.holders = tier, holders
    self._peers: dict[int, Peer] = {}

  def __enter__(self) -> "Reader":
    return self

  def __exit__(self, *_: object) -> None:
    for peer in self._peers.values():
      peer.__exit__()

  def index(self, portion: Portion) -> Index:
    return self._first(portion, lambda: self.tier.store.index(portion)[1], lambda peer: peer.index(portion))

  def read(self, place: Place) -> np.ndarray:
    portion, entry = place
    found = self._first(portion, lambda: self.tier.store.read(portion, entry), lambda peer: peer.read(portion, entry))
    return np.frombuffer(found, np.uint8).view(jax.numpy.dtype(entry.piece.dtype)).reshape(entry.piece.shape)

  def _first(self, portion: Portion, here: Callable[[], Any], there: Callable[[Peer], Any]) -> Any:
    """The answer of the first process that has a portion undamaged. Raises the last one's error if none has."""
    error: Exception = Damaged("nobody has it")
    for rank in self.holders[portion]:
      try:
        return here() if rank == self.tier.rank else there(self._peer(rank))
      except (OSError, Damaged) as why:
        error = why
        if isinstance(why, OSError):
          self._peers.pop(rank, None)
    raise Damaged(f"the portion of process {portion.owner}: {first_line(error)}")

  def _peer(self, rank: int) -> Peer:
    if rank not in self._peers:
      self._peers[rank] = Peer(self.tier.members[rank].address, self.tier.secret)
    return self._peers[rank]


def restore(
  tier: Tier, abstract: TrainState, now: Record, newer_than: int, warn: Callable[[str], None]
) -> tuple[TrainState, Record] | None:
  """The newest state in memory after a step above `newer_than`, in the layout of `abstract`, and its record.

  None if there is none. Warns of each one that cannot be used. `tier.complete` is then the one that it returns. Raises
  ConfigError if this run, with record `now`, may not go on from it.
  """
  tier.prepare(record.named(abstract))
  chosen, complete, failed, torn = None, None, list[str](), ""
  for of, holders in saves(tier):
    if of.step <= newer_than:
      break
    lost = [owner for owner in range(of.processes) if not holders.get(Portion(of, owner))]
    if lost:  # a kill during a save leaves such a save, and a complete one before it
      which = f"process{'es' if len(lost) > 1 else ''} {', '.join(map(str, lost[:SHOWN]))}"
      torn = torn or f"step {of.step} lacks what {which} had"
      continue
    chosen, why = _read_save(tier, of, holders, abstract, now)
    if chosen:
      complete = of
      break
    failed.append(f"step {of.step}: {why}")
  if torn and not chosen:
    failed.append(torn)
  if failed and not tier.rank:
    then = f"step {complete.step} there" if complete else "storage"
    warn(f"the state in the hosts' memory cannot be used ({'; '.join(failed[:SHOWN])}); going on from {then}")
  processes.all_gather(None)  # nobody reads any more
  tier.complete = complete
  return chosen


def saves(tier: Tier) -> list[tuple[Save, Holders]]:
  """The saves of which any process has portions, the newest first, and who has which portion."""
  mine = [portion.file for portion in tier.store.portions()]
  found: dict[Save, Holders] = {}
  of_all = list(enumerate(processes.all_gather(mine)))
  for rank, names in of_all[tier.rank :] + of_all[: tier.rank]:
    for portion in filter(None, map(portion_of, names)):
      found.setdefault(portion.of, {}).setdefault(portion, []).append(rank)
  return sorted(found.items(), key=lambda item: item[0], reverse=True)


def _read_save(
  tier: Tier, of: Save, holders: Holders, abstract: TrainState, now: Record
) -> tuple[tuple[TrainState, Record] | None, str]:
  """The state of a save, and its record; or None and why it cannot be used. All processes agree."""
  where, why = f"the state of step {of.step} in the hosts' memory", ""
  indexes: list[Index] = []
  arrays: list[jax.Array] = []
  with Reader(tier, holders) as reader:
    with _failing() as failed:
      indexes = [reader.index(Portion(of, owner)) for owner in range(of.processes)]
      if why := form.fault(indexes[0].record):
        raise Damaged(f"its record has {why}")
    if why := _of_any(failed):
      return None, why
    saved = indexes[0].record
    with processes.raise_together():
      record.check_version(saved, now, where)
      record.check_same_run(saved, now, where)
      record.check_arrays(saved, abstract, now.get("shapes", {}), where)
    with _failing() as failed:
      places = _places(of, indexes)
      arrays = [_array(reader, x, saved["arrays"][name][0], places.get(name, {})) for name, x in record.named(abstract)]
    if why := _of_any(failed):
      return None, why
  state = jax.tree.unflatten(jax.tree.structure(abstract), arrays)
  wrong = record.damaged(state, saved)
  return (None, f"{wrong} is not what was saved") if wrong else ((state, saved), "")


@contextlib.contextmanager
def _failing() -> Iterator[list[str]]:
  """Collects why the body failed, so that all processes can hear of it."""
  why: list[str] = []
  try:
    yield why
  except (OSError, Damaged) as error:
    why.append(first_line(error))


def _of_any(why: list[str]) -> str:
  """The first reason of any process; "" if all succeeded."""
  return next((text for found in processes.all_gather(why) for text in found), "")


def _places(of: Save, indexes: Sequence[Index]) -> dict[str, dict[Bounds, Place]]:
  """Where each piece of each array is, by the array's name."""
  found: dict[str, dict[Bounds, Place]] = {}
  for owner, index in enumerate(indexes):
    for entry in index.entries:
      found.setdefault(entry.piece.name, {})[entry.piece.bounds] = Place(Portion(of, owner), entry)
  return found


def _array(reader: Reader, x: jax.ShapeDtypeStruct, shape: Sequence[int], places: dict[Bounds, Place]) -> jax.Array:
  """An array in its layout, from pieces. Raises Damaged if they do not cover what this process needs.

  Args:
    shape: without padding. Pieces of another layout may have other padding, or none.
  """
  whole = tuple((0, size) for size in shape)
  values: dict[Bounds, np.ndarray] = {}
  shards: dict[Bounds, np.ndarray] = {}
  for index in x.sharding.addressable_devices_indices_map(tuple(x.shape)).values():
    target = pieces.bounds_of(index or (), x.shape)
    if target in shards:
      continue
    own = pieces.overlap(target, whole)
    needed = [bounds for bounds in places if own is not None and pieces.overlap(own, bounds) is not None]
    if own is not None and pieces.missing(own, needed):
      raise Damaged("its pieces do not cover the state")
    for bounds in needed:
      if bounds not in values:
        values[bounds] = reader.read(places[bounds])
    shards[target] = pieces.assembled(target, str(x.dtype), {bounds: values[bounds] for bounds in needed})
  return jax.make_array_from_callback(
    tuple(x.shape), x.sharding, lambda index: shards[pieces.bounds_of(index or (), x.shape)]
  )
