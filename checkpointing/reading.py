"""Reads checkpoints: finds them in a workdir, and reads their records and arrays.

Each process reads its own shards, in the layout of its strategy, and the arrays are checked against the digests in the
record. restore.py and initial.py decide what is read.
"""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax.sharding import SingleDeviceSharding

from checkpointing import form, record
from checkpointing.record import Record
from errors import JobUnavailable, dangling, first_line, unseen
from runtime import processes
from runtime.storage.answers import StorageError, Unreadable, explained, of_storage, unreadable
from runtime.storage.bucket import Folder, Location, context
from runtime.workdir import CHECKPOINTS

FOLDER = CHECKPOINTS  # in the workdir
INDEX = "index.json"  # in that folder, if it is in a bucket: the steps of the complete checkpoints, and who wrote it
SENT = "sent.json"  # in the folder of a run on this machine whose checkpoints are sent to a bucket: the same
RECORD = Path("run", "metadata")  # in a checkpoint
READ_BYTES = 2 << 30  # the most that a process reads at a time, except for a single larger array
Tree = TypeVar("Tree")


def newest(source: Location) -> Location:
  """The newest checkpoint of a workdir. A path without checkpoints may be one itself, and stays as it is."""
  held = steps(source / FOLDER)
  return source / FOLDER / str(max(held)) if held else source


def steps(folder: Location) -> list[int]:
  """The steps of the finished checkpoints in a folder, sorted.

  A folder in a bucket may have no index: before its first checkpoint is complete, or if it was copied there by hand.
  Then a checkpoint is finished if it has a record, which is sent last.
  """
  with contextlib.suppress(
    FileNotFoundError, NotADirectoryError, PermissionError, ValueError, KeyError, TypeError, OverflowError
  ):  # `names` explains what may not be read
    listed = folder / (INDEX if isinstance(folder, Folder) else SENT)
    found = form.read(listed)
    return sorted(int(step) for step in (found["steps"] if isinstance(found, dict) else found))
  found = sorted(int(name) for name in names(folder) if name.isdecimal())
  if isinstance(folder, Folder):
    records = folder.generations(f"{step}/{RECORD}" for step in found)
    found = [step for step, generation in zip(found, records, strict=True) if generation is not None]
  return found


def names(folder: Location) -> list[str]:
  """The names of what is in a folder; none if there is no folder.

  Raises StorageError if that cannot be seen: because storage does not answer, its disk is not mounted, or this user may
  not list it. Whoever took it for empty would begin a new run in the place of an old one.
  """
  if isinstance(folder, Folder):
    return [found.name for found in folder.iterdir()]
  try:
    return os.listdir(folder)
  except FileNotFoundError as error:
    if why := dangling(folder):
      raise Unreadable(errno.ENOENT, why) from error
    return []
  except OSError as error:
    raise unreadable(error, folder) from error


def read_record(folder: Location) -> Record | None:
  """The record of a checkpoint; None if it is missing or damaged. Raises StorageError if it cannot be read now."""
  try:
    found = form.read(folder / RECORD)
  except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
    return None
  except StorageError:
    raise
  except OSError as error:
    raise unreadable(error, str(folder / RECORD)) from error
  return None if form.fault(found) else found


def fault(folder: Location) -> str:
  """What is wrong with the record of a checkpoint, such as "time=1e+300"; "" if it is whole, or no JSON."""
  try:
    return form.fault(form.read(folder / RECORD))
  except (OSError, ValueError):
    return ""


def is_place(folder: Location) -> bool:
  """Whether this is where a run has a checkpoint, which may be damaged."""
  named = folder.name.isdecimal() and folder.parent.name == FOLDER
  return named and int(folder.name) in steps(folder.parent)


def instead(folder: Location) -> str:
  """What to use in place of a damaged checkpoint: another one of the run, if it has any."""
  found = [step for step in steps(folder.parent) if str(step) != folder.name] if is_place(folder) else []
  return f"use another checkpoint, as {folder.parent / str(found[-1])}" if found else "restore it from a copy"


def read_tree(folder: Location, abstract: Tree, saved: Record) -> tuple[Tree | None, str]:
  """Reads the arrays of a checkpoint into a tree like `abstract`, in its layout; or returns None and the reason.

  Raises Unavailable if storage does not answer properly, which says nothing of the checkpoint.
  """
  why, unanswered = "", ""
  try:
    found = read_arrays(folder, record.named(abstract))
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # the files are not to blame
  except StorageError as error:
    unanswered = str(error)
  except Exception as error:  # orbax raises bare Exceptions for broken files
    why = first_line(error.__cause__ or error)
  reasons, failures = zip(*processes.all_gather([why, unanswered]), strict=True)
  if any(failures):
    raise JobUnavailable(f"a checkpoint cannot be read: {next(filter(None, failures))}")
  if any(reasons):
    return None, next(filter(None, reasons))
  state = jax.tree.unflatten(jax.tree.structure(abstract), found)
  wrong = record.damaged(state, saved)
  return (None, f"{wrong} is not what was saved") if wrong else (state, "")


def read_arrays(folder: Location, wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> list[jax.Array]:
  """Reads the named arrays of a checkpoint, in their layouts, about READ_BYTES at a time to limit memory.

  Each process reads its shards without waiting for the others, so that an error of one can be reported to all. Raises
  StorageError if files cannot be read now, which says nothing of them; any other error is about what is in them.
  """
  try:
    return _read_arrays(folder, wanted)
  except (MemoryError, StorageError):
    raise
  except Exception as error:  # of orbax and tensorstore, with the words of the system's error
    if number := unseen(error):
      raise unreadable(OSError(number, os.strerror(number)), str(folder)) from error
    raise


def _read_arrays(folder: Location, wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> list[jax.Array]:
  out: list[jax.Array] = []
  if isinstance(folder, Path):
    for item in {item_of(name) for name, _ in wanted}:
      _check_files(folder / item)
  for item, group in _groups(wanted):
    if isinstance(folder, Folder):
      out += _from_bucket(folder / item, [(name.removeprefix("params/"), x) for name, x in group])
      continue
    tree = record.nested((name.removeprefix("params/"), x) for name, x in group)
    args = ocp.args.PyTreeRestore(
      tree, restore_args=jax.tree.map(_of_any_size, ocp.checkpoint_utils.construct_restore_args(tree)),
      partial_restore=True,
    )  # fmt: skip
    limit = max(READ_BYTES, *(_size(x) for _, x in group))
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=(limit + 1) / 1e9)
    read = dict(record.named(handler.restore(epath.Path((folder / item).absolute()), args=args)))
    out += [read[name.removeprefix("params/")] for name, _ in group]
  return out


def _check_files(folder: str | Path) -> None:
  """Raises ValueError for a pipe or device, which may never end, and for a link to a folder, which may hold one."""
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        _check_files(entry.path)
      elif not entry.is_file():
        raise ValueError(f"{entry.name!r} is not a file")


def _of_any_size(args: ocp.ArrayRestoreArgs) -> ocp.ArrayRestoreArgs:
  """Another layout may have stored arrays with another padding: what files lack is zeros, what is left over stays."""
  return dataclasses.replace(args, strict=False)


def _from_bucket(item: Folder, wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> list[jax.Array]:
  """The same for one item of a checkpoint in a bucket, of which orbax reads only some kinds."""
  try:
    return _read_by_tensorstore(item, wanted)
  except Exception as error:  # of tensorstore, which raises ValueErrors
    if not of_storage(error):
      raise
    failed = explained(str(item), error)
  raise failed


def _read_by_tensorstore(item: Folder, wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> list[jax.Array]:
  """Reads every piece once, all at the same time, and puts it on the devices that hold it."""
  spec = lambda name: {
    "driver": "zarr", "kvstore": {"driver": "ocdbt", "base": item.spec, "path": name.replace("/", ".") + "/"}
  }  # fmt: skip
  opened = [ts.open(spec(name), open=True, read=True, context=context()) for name, _ in wanted]
  places = [x.sharding.addressable_devices_indices_map(x.shape) for _, x in wanted]
  pieces = [
    {str(index): _held(store.result(), index, x.shape).read() for index in indices.values()}
    for store, indices, (_, x) in zip(opened, places, wanted, strict=True)
  ]
  out: list[jax.Array] = []
  for (_, x), indices, found in zip(wanted, places, pieces, strict=True):
    on = lambda device, x=x: SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind)
    shape = x.sharding.shard_shape(x.shape)
    piece = lambda index, found=found, shape=shape: _filled(found[str(index)].result(), shape)
    parts = [jax.device_put(piece(index).astype(x.dtype, copy=False), on(device)) for device, index in indices.items()]
    out.append(jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts))
  return out


def _held(store: ts.TensorStore, index: tuple[slice, ...], shape: tuple[int, ...]) -> ts.TensorStore:
  """What a file holds of a piece of an array of this shape. In the file it may have another padding."""
  own = [part.indices(size) for part, size in zip(index, shape, strict=True)]
  return store[tuple(slice(min(a, held), min(b, held)) for (a, b, _), held in zip(own, store.shape, strict=True))]


def _filled(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """A piece, with zeros for what the file does not hold of it."""
  if part.shape == shape:
    return part
  piece = np.zeros(shape, part.dtype)
  piece[tuple(map(slice, part.shape))] = part
  return piece


def read_array(folder: Location, saved: Record, name: str) -> tuple[jax.Array | None, str]:
  """An array of a checkpoint with record `saved`, on a CPU device; or None, and how it is damaged.

  Raises StorageError if storage does not answer, which says nothing of the checkpoint.
  """
  if name not in saved["arrays"]:
    return None, f"its record lacks {name}"
  shape, dtype, _ = saved["arrays"][name]
  here = SingleDeviceSharding(jax.devices("cpu")[0])
  try:
    (found,) = read_arrays(folder, [(name, jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here))])
  except (MemoryError, StorageError):
    raise
  except Exception as error:  # orbax raises bare Exceptions for broken files
    return None, f"{name}: {first_line(error.__cause__ or error)}"
  return (None, f"{name} is not what was saved") if record.damaged({name: found}, saved) else (found, "")


def _groups(wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> Iterator[tuple[str, list]]:
  """Groups neighbours in the same item of a checkpoint, up to READ_BYTES together. A larger array is alone."""
  group: list = []
  for name, x in wanted:
    item = item_of(name)
    if group and (item != item_of(group[0][0]) or sum(_size(y) for _, y in group) + _size(x) > READ_BYTES):
      yield item_of(group[0][0]), group
      group = []
    group.append((name, x))
  yield item_of(group[0][0]), group


def item_of(name: str) -> str:
  """The item of a checkpoint that holds an array. Parameters have their own, so that `init_from` reads nothing else."""
  return "params" if name.startswith("params/") else "optimizer"


def _size(x: jax.ShapeDtypeStruct) -> int:
  return x.size * x.dtype.itemsize
