"""Sends complete checkpoints to a bucket.

Orbax writes a checkpoint into a folder of this machine, as always, and training goes on. Each process then sends what
it wrote, and puts a mark into the bucket. Process 0 waits for all marks, joins the parts, and puts the record, then
`index.json`, which names the checkpoints that are complete. So one counts only if all of it is there, and a listing of
the bucket that lags behind hides none. Processes need no folder in common.
"""

import contextlib
import errno
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import tensorstore as ts

from checkpointing.reading import FOLDER, INDEX, RECORD, SENT, steps
from errors import first_line
from runtime import folders, processes
from runtime.storage.answers import StorageError, explained, no_answer
from runtime.storage.bucket import Folder, context
from runtime.storage.mirror import Mirror

ITEMS = ("params", "optimizer")  # which every process writes a part of
MARKS = ".sent"  # in the folder of the checkpoints
FILE_BYTES = 256 << 20  # a file with arrays is not much larger, because it is sent as a whole
POLL = 0.5  # seconds between two looks for the marks of the others
SECONDS_TO_SEND = 1800  # how long a process waits for the others' parts before it gives up on a checkpoint


class Shipping:
  """Sends the checkpoints of a run whose workdir is copied to a bucket. All processes of a job make one together.

  Attributes:
    local: where this process writes its checkpoints first. What earlier runs left there is removed.
    remote: the folder of the checkpoints in the bucket.
    steps: of the complete checkpoints there.
  """

  def __init__(self, workdir: Path, mirror: Mirror):
    rank = jax.process_index()
    self.local, self.remote = workdir / (f"{FOLDER}-{rank}" if rank else FOLDER), mirror.remote / FOLDER
    self.mirror = mirror
    # Among several processes, each writes as if it were alone, because the others may not see its folder.
    self.primary = 0 if jax.process_count() == 1 else None
    self.attempt = processes.on_process_zero(lambda: uuid.uuid4().hex)  # earlier runs have left other marks
    self.steps: list[int] = processes.on_process_zero(self._tidied)
    shutil.rmtree(self.local, ignore_errors=True)
    self.local.mkdir(parents=True)
    folders.write(self.local / SENT, json.dumps(self.steps))  # for programs on this machine

  def handlers(self, options: ocp.options.MultiprocessingOptions) -> dict[str, ocp.CheckpointHandler]:
    """What writes the items of a checkpoint, for orbax's manager."""

    def of_arrays() -> ocp.PyTreeCheckpointHandler:
      # Orbax would miss the arrays that other processes write.
      writer = ocp.BasePyTreeCheckpointHandler(multiprocessing_options=options, enable_post_merge_validation=False)
      return ocp.PyTreeCheckpointHandler(multiprocessing_options=options, handler_impl=writer)

    record = ocp.JsonCheckpointHandler(multiprocessing_options=options)
    return {item: of_arrays() for item in ITEMS} | {"run": record}

  def send(self, step: int, kept: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Sends a checkpoint. Returns when it counts. `kept`: which of some steps to keep.

    Raises:
      OSError: it does not count, because of this process or another one.
    """
    root, folder = self.local / str(step), self.remote / str(step)
    rank, count = jax.process_index(), jax.process_count()
    names = [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]
    names.remove(RECORD.as_posix())  # which comes last
    with self._marked(step):
      self.mirror.check()  # first: another run may write the same checkpoint
      folder.upload(root, [name for name in names if count == 1 or _is_for(name, rank)])
      if not rank:
        for other in range(1, count):
          self._wait_for(other, step)
        if count > 1:
          for item in ITEMS:
            _join(folder / item, count)
        self.mirror.push()  # a checkpoint needs the measurements until then
        folder.upload(root, [RECORD.as_posix()])
        self._commit(step, kept)
    if rank:
      self._wait_for(0, step)
      self.steps = steps(self.remote)
    folders.write(self.local / SENT, json.dumps(self.steps))

  def note(self, step: int, record: bytes) -> None:
    """Replaces the record of a checkpoint, as a whole."""
    (self.remote / str(step) / RECORD).write(record)

  def _tidied(self) -> list[int]:
    """The complete checkpoints, after what else is there was removed.

    Before that, this attempt puts its name into the index. Then a run that has lost its lease, but does not know it
    yet, cannot replace the index any more.
    """
    while True:
      _, generation = (self.remote / INDEX).read()
      found = steps(self.remote)
      if self._indexed(found, generation):
        break
    for folder in list(self.remote.iterdir()):
      if folder.name == MARKS or (folder.name.isdecimal() and int(folder.name) not in found):
        folder.remove()
    return found

  def _commit(self, step: int, kept: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Makes a checkpoint count, and then removes those that are not to be kept."""
    found = sorted({*self.steps, step})
    left = [s for s in found if s in kept(found)]
    _, generation = (self.remote / INDEX).read()
    if not self._indexed(left, generation):
      raise StorageError(errno.EIO, f"{self.remote / INDEX}: another run has replaced it")
    self.steps = left
    with contextlib.suppress(StorageError):  # the next run removes what is left over
      for old in set(found) - set(left):
        (self.remote / str(old)).remove()

  def _indexed(self, complete: Sequence[int], generation: bytes) -> bool:
    """Puts the index, and returns whether that could be done: not if it has another generation by now.

    Raises StorageError if this run has lost its lease. That is checked after the generation was read, and a run that
    takes over replaces the index first. So this one cannot replace what the other has written.
    """
    self.mirror.check()
    data = json.dumps({"steps": complete, "attempt": self.attempt}).encode()
    if (self.remote / INDEX).write(data, only_if=generation) is not None:
      return True
    return (self.remote / INDEX).read()[0] == data  # an answer was lost, and the second try refused

  @contextlib.contextmanager
  def _marked(self, step: int) -> Iterator[None]:
    """Lets the other processes know whether the body has sent this process's part, or completed the checkpoint."""
    said = ""
    try:
      yield
    except BaseException as error:  # whatever it is, the part is not there
      number = getattr(error, "errno", None) or errno.EIO
      said = f"{number} {(isinstance(error, OSError) and error.strerror) or first_line(error)}"
      raise
    finally:
      if jax.process_count() > 1:
        with contextlib.suppress(StorageError) if said else contextlib.nullcontext():
          self._mark(step, jax.process_index()).write(f"{self.attempt} {said}".encode())

  def _mark(self, step: int, rank: int) -> Folder:
    return self.remote / MARKS / f"{step}-{rank}"

  def _wait_for(self, rank: int, step: int) -> None:
    """Waits for the mark of another process. Raises StorageError if it has failed, or if there is none in time."""
    end = time.monotonic() + SECONDS_TO_SEND
    while time.monotonic() < end:
      attempt, _, failed = (self._mark(step, rank).read()[0] or b"").decode().partition(" ")
      if attempt == self.attempt:
        if failed:
          number, _, why = failed.partition(" ")
          raise StorageError(int(number), f"process {rank}: {why}")
        return
      time.sleep(POLL)
    raise no_answer(f"{self.remote / str(step)}, from process {rank}", SECONDS_TO_SEND)


def _is_for(name: str, rank: int) -> bool:
  """Whether a process of several sends a file. What is joined in the bucket is not sent."""
  parts = name.split("/")
  if parts[0] in ITEMS and parts[1] in ("manifest.ocdbt", "d"):
    return False
  of_process = next((part.rpartition("_")[2] for part in parts if "process_" in part), "0")
  return of_process == str(rank)


def _join(item: Folder, count: int) -> None:
  """Makes one database of those that the processes have sent. Sends no array: it refers to theirs."""
  store = lambda folder: ts.KvStore.open({"driver": "ocdbt", "base": folder.spec}, context=context())
  try:
    whole, transaction = store(item).result(), ts.Transaction(atomic=True)
    parts = [store(item / f"ocdbt.process_{rank}").result() for rank in range(count)]
    for copying in [part.experimental_copy_range_to(whole.with_transaction(transaction)) for part in parts]:
      copying.result()
    transaction.commit_async().result()
    return
  except Exception as error:  # of tensorstore
    failed = explained(str(item), error)
  raise failed
