"""Writes checkpoints while training goes on. reading.py reads them.

A checkpoint is an orbax folder `workdir/checkpoints/STEP` with the items `params`, `optimizer` (with the step) and
`run`, the JSON record (record.py). Every process writes its own shards. A folder gets its final name when it is
complete. So a killed run leaves complete checkpoints and at most one unfinished folder, which is never read.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpointing import record
from checkpointing.reading import RECORD, read_record, steps
from checkpointing.record import Record
from checkpointing.shipping import FILE_BYTES, Shipping
from checkpointing.storage_logs import shorten_storage_logs
from errors import JobError, first_line
from runtime import folders, processes
from runtime.storage.answers import StorageError
from runtime.storage.flushing import flush
from training.loop import LoopState
from training.program import TrainState

SECONDS_TO_WRITE = 300  # how long a process waits for the others' shards before it gives up on a checkpoint
REMOVED = "removed-"  # begins the names of checkpoints that are being removed
SLICE_BYTES = 1 << 20  # replicas share the writing of an array only in slices of at least this size
CHUNK_BYTES = 4 << 20  # the unit of reading: a part of an array is read in whole chunks
Notify = Callable[[str], None]


class Cost(NamedTuple):
  """What a save has cost: the seconds that training waited for it, and those until it was complete."""

  step: int
  waited: float
  written: float


class NotSaved(JobError):
  """Some checkpoints of a finished run could not be written."""


def best_of(steps: Sequence[int], n: int, losses: dict[int, float]) -> list[int]:
  """The `n` of some steps with the lowest loss. Steps without a finite loss are not among them."""
  return sorted((s for s in steps if math.isfinite(losses.get(s, math.nan))), key=lambda s: losses[s])[:n]


class Checkpoints:
  """Writes the checkpoints of one run; all processes call its methods at the same steps. Use as a context manager.

  Args:
    folder: the folder of the checkpoints.
    keep: how many of the latest to keep.
    keep_best: how many of those with the lowest validation loss to keep, in addition.
    say, warn: called with a message when a checkpoint is saved, and when it could not be written.
    shipping: sends them to a bucket, which has all of them; None: they stay in `folder`.
  """

  def __init__(
    self, folder: Path, keep: int, keep_best: int, say: Notify, warn: Notify, shipping: Shipping | None = None
  ):
    self.folder, self.keep, self.keep_best, self.say, self.warn = folder, keep, keep_best, say, warn
    self._said_left = False
    if shipping:
      self.folder = shipping.local
    self.shipping, self.where = shipping, shipping.remote if shipping else folder
    self.failed: list[int] = []  # the steps whose checkpoints could not be written
    self._without_loss: list[int] = []  # the steps of complete checkpoints whose loss could not be written
    self.newest = max(self.complete(), default=0)  # the step of the newest complete checkpoint; 0: none
    self.cost: Cost | None = None  # of the newest save that is complete
    # The step, when the save began, the seconds that training waited, and the writing, which returns when it was done.
    self._pending: tuple[int, float, float, concurrent.futures.Future[float]] | None = None
    self._managers = 0
    self._watcher = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    shorten_storage_logs()
    self._losses = dict(processes.on_process_zero(self._stored_losses))  # of the steps that were evaluated
    self._unnoted: int | None = None  # a step whose loss is not in its checkpoint's record yet
    # Replicas share only the writing of large arrays, because slicing compiles a program for each shape.
    handler = ocp.type_handlers.ArrayHandler(
      min_slice_bytes_for_replica_parallel=SLICE_BYTES, primary_host=shipping.primary if shipping else 0
    )
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    processes.on_process_zero(lambda: str(folders.writable(self.folder, "workdir")))  # now, not after days of training
    self._open()
    self._place = processes.on_process_zero(self._found_place)

  def complete(self) -> list[int]:
    """The steps of the complete checkpoints."""
    return self.shipping.steps if self.shipping else steps(self.folder)

  def _kept(self, found: Sequence[int], losses: dict[int, float]) -> list[int]:
    """Which of some steps to keep."""
    return [*sorted(found)[-self.keep :], *best_of(found, self.keep_best, losses)]

  def _found_place(self) -> list[int] | None:
    """What tells this folder from another one at the same path; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
      found = self.folder.stat()
      return [found.st_dev, found.st_ino]
    return None

  def _open(self) -> None:
    """Makes the manager of the folder. The first one removes unfinished checkpoints of earlier runs."""
    self._broken = False  # true after a failed write, when processes may wait at different barriers
    self._clear()
    self._managers += 1
    local = self.shipping is None
    together = ocp.options.MultiprocessingOptions(
      primary_host=self.shipping.primary if self.shipping else 0, barrier_sync_key_prefix=f"try-{self._managers}"
    )
    options = ocp.CheckpointManagerOptions(  # it removes nothing: `_remove` does, later
      cleanup_tmp_directories=self._managers == 1,
      # Asynchronously, the first process to have made its folder would let all others write into theirs.
      async_options=ocp.AsyncOptions(timeout_secs=SECONDS_TO_WRITE, create_directories_asynchronously=local),
      multiprocessing_options=together,
    )
    handlers = self.shipping.handlers(together) if self.shipping else None
    self._manager = ocp.CheckpointManager(epath.Path(self.folder.absolute()), options=options, item_handlers=handlers)

  def _stored_losses(self) -> list[tuple[int, float]]:
    """The evaluated checkpoints of the folder, and their losses."""
    losses = [(step, (read_record(self.where / str(step)) or {}).get("loss")) for step in self.complete()]
    return [(step, loss) for step, loss in losses if loss is not None]

  def _clear(self) -> None:
    """Removes the remains of failed checkpoints as far as possible; some may still be being written."""
    if jax.process_index() == 0:
      for step in self.failed:
        for folder in self.folder.glob(f"{step}.*tmp*"):
          shutil.rmtree(folder, ignore_errors=True)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
    """Waits for the last checkpoint, unless this process failed alone: the others may not finish theirs.

    Raises NotSaved if any checkpoint, or its loss, could not be written and the run has not failed anyway.
    """
    if processes.failed_alone(error):
      return
    self.finish()
    self._watcher.shutdown()
    self._clear()
    if kind is None:
      for what, mine in (("checkpoints", self.failed), ("losses", self._without_loss)):
        if failed := sorted({step for steps in processes.all_gather(mine) for step in steps}):
          raise NotSaved(f"the {what} of steps {', '.join(map(str, failed))} could not be written to {self.where}")
      self._manager.close()

  def save(self, state: TrainState, run: Record, loop: LoopState) -> None:
    """Starts to write a checkpoint. Returns when `state` may be donated. Waits for the previous checkpoint if needed.

    Args:
      run: the record of the run (record.make).
      loop: the state of the loop; its step names the checkpoint.
    """
    step = loop.step
    self.finish()
    start = time.perf_counter()
    tree, run = record.of_state(state, run, loop)
    items = {
      "params": self._save_args(tree.pop("params")),
      "optimizer": self._save_args(tree),
      "run": ocp.args.JsonSave(run),
    }
    try:
      if processes.on_process_zero(self._found_place) != self._place:  # the half of a run must not go elsewhere
        raise FileNotFoundError("the folder was moved or removed; move it back")
      if any(processes.all_gather(self._broken)):
        self._open()
      if step in {*self._manager.all_steps(), *self.complete()}:
        return
      self._manager.save(step, args=ocp.args.Composite(**items), force=True)
    except Exception as error:  # whatever storage may raise
      self._fail(step, error)
    else:
      waited = time.perf_counter() - start
      self._pending = (step, start, waited, self._watcher.submit(self._wait, step, dict(self._losses)))

  def _wait(self, step: int, losses: dict[int, float]) -> float:
    """Waits until a checkpoint is complete, and is in the bucket or would survive a power failure. Returns when.

    tensorstore syncs the arrays' files; the rest is synced here.
    """
    self._manager.wait_until_finished()
    if self.shipping:
      self._remove(lambda found: [step])
      self.shipping.send(step, lambda found: self._kept(found, losses))
    elif jax.process_index() == 0:
      rest = [place for place in (self.folder / str(step)).rglob("*") if place.parent.name != "d"]
      for place in [*rest, self.folder / str(step), self.folder]:
        descriptor = os.open(place, os.O_RDONLY)
        try:
          flush(descriptor)
        finally:
          os.close(descriptor)
      self._remove(lambda found: self._kept(found, losses))
    return time.perf_counter()

  def _remove(self, kept: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Removes all checkpoints from the folder but those to keep. The newest must be synced before."""
    found = {int(folder.name): folder for folder in self.folder.iterdir() if folder.name.isdecimal()}
    for step in found.keys() - set(kept(list(found))):
      with contextlib.suppress(OSError):  # the next call tries it again
        found[step].rename(self.folder / f"{REMOVED}{step}")  # so that no half of a checkpoint is taken for one
    for folder in self.folder.glob(f"{REMOVED}*"):
      shutil.rmtree(folder, ignore_errors=True)
      if folder.exists() and not self._said_left:
        self._said_left = True
        self.warn(
          f"{str(folder)!r} cannot be removed; it is tried again after each checkpoint, so look for a program that "
          "holds its files (lsof), and for the owner of the folder"
        )

  def check(self) -> None:
    """Reports whether the pending checkpoint was saved, if it is done. Does not wait."""
    if not self._pending or self._pending[-1].done():
      self.finish()

  def evaluated(self, step: int, loss: float) -> None:
    """Adds the validation loss of `step` to its checkpoint, when that is complete. Does not wait."""
    self._losses[step] = loss
    self._unnoted = step
    self.check()

  def finish(self) -> None:
    """Waits for the pending checkpoint, reports whether it was saved, and adds its loss."""
    if self._pending:
      step, start, waited, future = self._pending
      self._pending = None
      try:
        self.cost = Cost(step, waited, future.result() - start)
        self.newest = step
        self.say(f"checkpoint {step} saved; training waited {waited:.2f} s for it")
      except Exception as error:  # whatever storage may raise
        self._fail(step, error)
    if self._unnoted is not None:
      step, self._unnoted = self._unnoted, None
      if jax.process_index() == 0:
        self._note(step, self._losses[step])

  def _note(self, step: int, loss: float) -> None:
    """Writes the result of an evaluation into the record of a checkpoint, if there is one. A kill leaves it whole."""
    file = self.folder / str(step) / RECORD
    try:
      if found := read_record(self.folder / str(step)):
        loop = LoopState(**found["loop"]).after_evaluation(loss)
        noted = found | {"loss": loss, "loop": dataclasses.asdict(loop)}
        folders.write(file, json.dumps(noted), sync=True)
        if self.shipping:
          self.shipping.note(step, file.read_bytes())
    except OSError as error:
      self._without_loss.append(step)
      self.warn(f"the loss of checkpoint {step} could not be written ({error.strerror}); training continues without it")

  def _save_args(self, tree: dict[str, Any]) -> ocp.args.CheckpointArgs:
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    if self.shipping:
      return ocp.args.PyTreeSave(tree, save_args=args, ocdbt_target_data_file_size=FILE_BYTES)
    return ocp.args.StandardSave(tree, save_args=args)

  def _fail(self, step: int, error: Exception) -> None:
    self.failed.append(step)
    self._broken = True
    if isinstance(error, StorageError) and error.errno == errno.EBUSY:
      return  # another run writes there, which ends this one with a sentence of its own (runtime/storage/lease.py)
    cause: BaseException = error
    while cause.__context__ is not None:  # the first error, not the time-outs that followed
      cause = cause.__context__
    left = max((s for s in self.complete() if s != step), default=None)
    stays = "there is none before it" if left is None else f"checkpoint {left} stays"
    self.warn(
      f"checkpoint {step} in {self.where} could not be written ({first_line(cause)}); training continues, {stays}"
    )
