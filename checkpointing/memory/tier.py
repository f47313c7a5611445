"""Saves the state in the hosts' memory every few steps: its own portion in each process, and a neighbour's.

If a process or a host is lost, the next start of the job takes its portion from the neighbour (recovery.py). Memory
here means files in a folder of type tmpfs, such as /dev/shm. They outlive the process, but not the host.

Training waits until the state is copied from the devices into this process's file. A thread does the rest. All
processes save together, and only if all have finished the save before. Then that one is complete, and the ones before
it are removed. So at most two saves need memory at a time, and one of them is complete.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpointing import form, record
from checkpointing.memory import pieces
from checkpointing.memory.exchange import Peer, Server, own_address
from checkpointing.memory.store import RUN, Entry, Growing, Portion, Save, Store, layout, make_private, tail
from checkpointing.record import Record
from checkpointing.save import NotSaved
from errors import ConfigError, JobError, Unavailable, expanded, first_line, unseen
from runtime import folders, processes
from runtime.replicas import Corrupted
from runtime.workdir import MEMORY
from training.loop import MEMORY_SAVES, LoopState
from training.program import TrainState

NOTE = MEMORY  # in a workdir: whose memory it is, and the newest complete save
SKIPS = 10  # saves in a row that are skipped before the run says so
COPIERS = 8  # threads that copy pieces into memory, for which training waits
TMPFS = "/dev/shm"  # a folder of type tmpfs that every user may write into
Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Member:
  """A process of the job: the host that it counts as being on, its machine, and the address of its server."""

  host: str
  machine: str
  address: tuple[str, int]


class Tier:
  """The saves of one run in the hosts' memory. All processes call its methods at the same steps. A context manager.

  Call `prepare` before the first save; `recovery.restore` does.

  Args:
    config: of the run; `checkpoint.memory_every` 0 switches all of this off.
    workdir: whose run this is. Another one, or a new one at the same path, does not get its memory.
    warn: called with a message when a save has failed.

  Attributes:
    members: the processes of the job.
    lines: to print at the start.
    complete: the newest save that all processes have, as far as this process knows.
  """

  def __init__(self, config: Any, workdir: Path, warn: Notify):
    self.every, self.workdir, self.warn = config.checkpoint.memory_every, workdir, warn
    self.rank, self.count = jax.process_index(), jax.process_count()
    self.lines: list[str] = []
    self.complete: Save | None = None
    self.skipped, self._waited = 0, list[float]()
    self._in_a_row = 0  # saves that were skipped since the last one that was not
    self._pending: tuple[Save, concurrent.futures.Future[None]] | None = None
    self._warned = ""
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "memory")
    if self.every:
      self._join(config)

  def _join(self, config: Any) -> None:
    """Opens the folder in memory, and meets the other processes. Raises ConfigError or Unavailable if it cannot."""
    given = config.checkpoint.memory_dir
    self.run, self.attempt, secret = processes.on_process_zero(self._names)
    self.secret = secret.encode()
    base = expanded(given or f"{TMPFS}/meshwright-{os.getuid()}", "checkpoint.memory_dir")
    host = base / key(self.workdir) / (config.distributed.host or "host")
    with processes.raise_together(), folders.written_into(base, "checkpoint.memory_dir"):
      for folder in (host.parent,) if given else (base, host.parent):
        make_private(folder)
      if not _is_of(host, self.run):  # of a workdir that is gone
        shutil.rmtree(host, ignore_errors=True)
    processes.all_gather(None)  # several processes may share the folder
    with processes.raise_together():
      with folders.written_into(base, "checkpoint.memory_dir"):
        self.store = Store(host, self.rank, self.run)
      self.server = Server(self.store, self.secret, own_address(config.distributed.coordinator))
    machine = socket.gethostname()
    mine = [config.distributed.host or machine, machine, *self.server.address]
    self.members = [Member(name, machine, (at, port)) for name, machine, at, port in processes.all_gather(mine)]
    self.neighbours = pieces.neighbours([member.host for member in self.members])
    with processes.raise_together():
      self._meet_neighbour()

  def _names(self) -> list[str]:
    """The name of this run, which its workdir keeps, that of this attempt, and the secret of its processes."""
    run = note_of(self.workdir).get("run") or secrets.token_hex(8)
    _write(self.workdir / NOTE, note_of(self.workdir) | {"run": run})
    return [run, secrets.token_hex(4), secrets.token_hex(16)]

  def _meet_neighbour(self) -> None:
    neighbour = self.neighbours[self.rank]
    if neighbour == self.rank:
      return
    try:
      Peer(self.members[neighbour].address, self.secret).__exit__()
    except OSError as error:
      raise Unavailable(
        f"checkpoint.memory_every={self.every}: {error}; open the ports between the hosts, or use 0 for no copies in "
        "memory"
      ) from error

  def prepare(self, arrays: Sequence[tuple[str, jax.ShapeDtypeStruct]]) -> None:
    """Decides which process keeps which pieces of these named arrays. Raises ConfigError if memory is short."""
    self.portions = pieces.shared_out(pieces.held(arrays), self.count)
    sizes = [layout(portion)[1] for portion in self.portions]
    of = {self.neighbours[rank]: rank for rank in range(self.count)}  # whose copy a process keeps
    needs = [MEMORY_SAVES * (sizes[rank] + (sizes[of[rank]] if of[rank] != rank else 0)) for rank in range(self.count)]
    here = [rank for rank in range(self.count) if self.members[rank].machine == self.members[self.rank].machine]
    folder, needed = self.store.host.parent, sum(needs[rank] for rank in here)
    with processes.raise_together():
      there = sum(path.stat().st_size for path in folder.glob("*/*/*"))
      free = shutil.disk_usage(folder).free + there
      if needed > free:
        raise ConfigError(
          f"checkpoint.memory_dir={str(folder.parent)!r} has {free / 1e9:.3g} GB free, and the state and its copies "
          f"need {needed / 1e9:.3g} GB on this machine; use a larger tmpfs, or checkpoint.memory_every=0"
        )
    away = sum(self.members[rank].host != self.members[to].host for rank, to in enumerate(self.neighbours))
    where = "another host" if away == self.count else f"another host ({away} of {self.count} processes)"
    copies = f"and a copy on {where}" if away else "and a copy for another process" if self.count > 1 else "and no copy"
    self.lines = [
      f"memory    every {self.every} steps: {max(needs) / 1e6:,.1f} MB of a host's memory for a process, {copies}; "
      f"in {folder.parent}"
    ]

  def __enter__(self) -> "Tier":
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
    """After an orderly end, storage has all: removes the files. After an error of this process alone, they stay.

    They also stay where the next start can go on from them: if storage lacks a checkpoint, or if copies of the state
    differ, because each save was compared before.
    """
    if not self.every or processes.failed_alone(error):
      return
    self.wait()
    processes.all_gather(None)  # neighbours may still send
    self.server.close()
    self._thread.shutdown()
    if error is None or (isinstance(error, JobError) and not isinstance(error, NotSaved | Corrupted)):
      self.store.clear()
      self.keep_only(None)

  @property
  def summary(self) -> str:
    """A line about all saves; "" if there was none."""
    if not self._waited:
      return ""
    return (
      f"memory    {len(self._waited)} saves in the hosts' memory, {self.skipped} skipped; training waited "
      f"{statistics.median(self._waited):.3f} s for one (median)"
    )

  def save(self, state: TrainState, run: Record, loop: LoopState) -> None:
    """Copies the state, and starts to send it. Returns when `state` may be donated.

    Does nothing if a process has not finished the save before. `run` and `loop`: as in `Checkpoints.save`.
    """
    start = time.perf_counter()
    if not self._have_finished():
      self.skipped += 1
      return
    self._in_a_row = 0
    tree, saved = record.of_state(state, run, loop)
    portion = Portion(Save(loop.step, self.attempt, self.count), self.rank)
    keep = [portion.of] if self.complete is None else [portion.of, self.complete]
    self.store.prune(keep, self._beside(), portion)
    try:
      file = self._copied(tree, portion)
      future = self._thread.submit(self._finish, file, portion, saved)
    except OSError as error:  # the memory is full
      future = concurrent.futures.Future()
      future.set_exception(error)
    self._pending = portion.of, future
    self._waited.append(time.perf_counter() - start)

  def wait(self) -> None:
    """Waits until this process has finished its save, or failed."""
    if self._pending:
      concurrent.futures.wait([self._pending[1]])

  def _have_finished(self) -> bool:
    """Whether all processes have finished the save before. Then that one is complete, unless it failed somewhere."""
    busy, failed = False, ""
    if self._pending:
      busy = not self._pending[1].done()
      error = None if busy else self._pending[1].exception()
      failed = first_line(error) if error else ""
    found = processes.all_gather([busy, failed])
    if slow := [rank for rank, (busy, _) in enumerate(found) if busy]:
      self._in_a_row += 1
      if self._in_a_row == SKIPS and not self.rank:
        self.warn(
          f"{SKIPS} saves in the hosts' memory in a row were skipped, because one before is not finished (on process"
          f"{'es' if slow[1:] else ''} {', '.join(map(str, slow))}); training continues, and the next one is tried"
        )
      return False
    if self._pending:
      of, self._pending = self._pending[0], None
      if not any(why for _, why in found):
        self.complete = of
        self._note()
      elif failed and failed != self._warned:
        self._warned = failed
        self.warn(f"the state of step {of.step} could not be kept in memory ({failed}); training continues without it")
    return True

  def keep_only(self, complete: Save | None) -> None:
    """Removes everything but a complete save. No other process may be reading."""
    self.complete = complete
    self.store.prune([complete] if complete else [], self._beside())
    self._note()

  def _beside(self) -> list[int]:
    """The other processes on this host."""
    here = self.members[self.rank].host
    return [rank for rank, member in enumerate(self.members) if member.host == here and rank != self.rank]

  def _note(self) -> None:
    """Writes into the workdir which save is complete, for the supervisor's messages."""
    if self.rank == 0:
      _write(self.workdir / NOTE, {"run": self.run} | ({"step": self.complete.step} if self.complete else {}))

  def _copied(self, tree: dict[str, Any], portion: Portion) -> Growing:
    """This process's file of a portion, with the bytes of its pieces. The state may change then."""
    shards = {name: pieces.own_shards(x) for name, x in record.named(tree)}
    mine = self.portions[self.rank]
    for piece in mine:
      shards[piece.name][piece.bounds].copy_to_host_async()
    offsets, size = layout(mine)
    file = self.store.create(portion, size)
    put = lambda piece, offset: file.put(offset, np.asarray(shards[piece.name][piece.bounds]))
    try:
      with concurrent.futures.ThreadPoolExecutor(COPIERS) as pool:
        list(pool.map(put, mine, offsets))
    except BaseException:
      file.drop()
      raise
    return file

  def _finish(self, file: Growing, portion: Portion, saved: Record) -> None:
    """Completes this process's file, and has the neighbour keep a copy."""
    mine = self.portions[self.rank]
    entries = [
      Entry(piece, offset, file.checksum(offset, piece.bytes))
      for piece, offset in zip(mine, layout(mine)[0], strict=True)
    ]
    file.finish(tail(entries, saved))
    if (neighbour := self.neighbours[self.rank]) != self.rank:
      with Peer(self.members[neighbour].address, self.secret) as peer:
        peer.keep(portion, file.path)


def key(workdir: Path) -> str:
  """The name of a workdir's folder in memory."""
  return hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:16]


def note_of(workdir: Path) -> dict[str, Any]:
  """What a workdir knows of the copies in memory; {} if nothing. Raises OSError if that cannot be read now."""
  try:
    found = form.read(workdir / NOTE)
  except (OSError, ValueError) as error:
    if unseen(error):
      raise
    return {}
  return form.fitting(found, form.NOTE) if isinstance(found, dict) else {}


def newest(workdir: Path) -> int:
  """The step of the newest save in memory that was complete when it was last looked at; -1: there is none."""
  with contextlib.suppress(OSError):
    return int(note_of(workdir).get("step", -1))
  return -1


def _write(path: Path, note: dict[str, Any]) -> None:
  """Writes a note as a whole. A full disk ends no run. Without the first note, the next start drops the memory."""
  with contextlib.suppress(OSError):
    folders.write(path, json.dumps(note))


def _is_of(host: Path, run: str) -> bool:
  try:
    return (host / RUN).read_text() == run
  except (FileNotFoundError, NotADirectoryError):
    return not host.exists()
