"""Begins a run: from the newest intact checkpoint of its workdir, with the parameters of another run, or from scratch.

Each process reads its own shards, in the layout of its strategy, and the arrays are checked against the digests in the
record. So a run can resume under another strategy or on another number of devices.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

import pretrained
from checkpointing import history, record
from checkpointing.record import Record
from errors import ConfigError, first_line
from runtime import processes
from strategies import Strategy
from training.loop import LoopState
from training.program import Params, TrainState

FOLDER = "checkpoints"  # in the workdir
READ_BYTES = 2 << 30  # the most that a process reads at a time, except for a single larger array
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Start:
  """The beginning of a run: its state, the state of its loop, the record of its checkpoints, and lines to print."""

  state: TrainState
  loop: LoopState
  record: Record
  lines: list[str]


def begin(workdir: Path, init_from: str, strategy: Strategy, run: Record, warn: Callable[[str], None]) -> Start:
  """Restores the newest checkpoint in `workdir`. Without one, starts with new parameters or those of `init_from`.

  Args:
    init_from: another run's workdir or checkpoint, or a model folder; "" for new parameters.
    run: the record of this run (record.make).
    warn: called with a message for each damaged checkpoint that is skipped.
  """
  if found := restore(workdir / FOLDER, strategy.abstract_state(), run, warn):
    state, saved = found
    loop = LoopState(**saved["loop"])
    lines = [f"resumed   at step {loop.step}, saved by {saved['strategy']}"]
    lines += [f"note      {change}" for change in record.changes(saved, run)]
    return Start(state, loop, run | {"data": history.continued(saved["data"], run["data"], loop.step)}, lines)
  state = strategy.init(run["config"]["seed"])
  if not init_from:
    return Start(state, LoopState(), run, [])
  if pretrained.is_folder(init_from):
    state = dataclasses.replace(state, params={})  # makes room
    with processes.raise_together():
      folder = pretrained.Folder(init_from)
      params = pretrained.load(folder, strategy.program.model, strategy.abstract_state().params)
    lines = [f"initial   parameters of {init_from}, a {folder.shape.family} model in {' and '.join(folder.dtypes)}"]
    return Start(dataclasses.replace(state, params=params), LoopState(), run, lines)
  params, saved = load_params(init_from, strategy.abstract_state(), run)
  lines = [f"initial   parameters of {init_from}, step {saved['loop']['step']}, saved by {saved['strategy']}"]
  return Start(dataclasses.replace(state, params=params), LoopState(), run, lines)


def restore(
  folder: Path, abstract: TrainState, now: Record, warn: Callable[[str], None]
) -> tuple[TrainState, Record] | None:
  """The newest intact checkpoint, in the layout of `abstract`, and its record. None if there is no checkpoint.

  Renames damaged checkpoints and warns. Raises ConfigError if this run, with record `now`, may not resume from the
  checkpoint, or if there are checkpoints but none can be read.
  """
  found = processes.on_process_zero(
    lambda: [[step, read_record(folder / str(step))] for step in sorted(steps(folder), reverse=True)]
  )
  damaged: list[tuple[int, str]] = []  # (step, reason)
  for step, saved in found:
    where = f"checkpoint {step} in {str(folder)!r}"
    why, state = "its record cannot be read", None
    if saved is not None:
      record.check_same_run(saved, now, where)
      record.check_arrays(saved, abstract, where)
      state, why = _read(folder / str(step), abstract, saved)
    if state is None:
      damaged.append((step, why))
      continue
    for bad, reason in damaged:  # only now: if none can be read, all stay as they are
      aside = processes.on_process_zero(functools.partial(_set_aside, folder / str(bad)))
      warn(
        f"checkpoint {bad} in {str(folder)!r} is damaged ({reason}) and was renamed to {aside}; resuming from "
        f"checkpoint {step}"
      )
    return state, saved
  if found or processes.on_process_zero(lambda: bool(list(folder.glob("damaged-*")))):
    reasons = "; ".join(f"{step}: {why}" for step, why in damaged)
    raise ConfigError(
      f"workdir: none of the checkpoints in {str(folder)!r} can be read ({reasons or 'all are damaged'}); "
      "restore them from a copy, or name another workdir"
    )
  return None


def load_params(source: str, abstract: TrainState, now: Record) -> tuple[Params, Record]:
  """Another run's parameters, in the layout of `abstract`, and its record. `source` is a workdir or a checkpoint."""
  folder = Path(processes.on_process_zero(lambda: str(newest(Path(source).expanduser()))))
  saved = processes.on_process_zero(lambda: read_record(folder))
  if saved is None:
    raise ConfigError(
      f"init_from={source!r} names no workdir with a checkpoint, no checkpoint and no folder with a model's "
      "safetensors; use the workdir of another run"
    )
  where = f"init_from={source!r}"
  record.check_version(saved, now, where)
  theirs, ours = saved["data"]["tokenizer"], now["data"]["tokenizer"]
  if theirs != ours:
    raise ConfigError(
      f"{where} was trained on tokens of {theirs!r}, but this run has tokens of {ours!r}; use the same tokenizer"
    )
  return read_params(folder, saved, abstract.params, where), saved


def read_params(folder: Path, saved: Record, abstract: Params, where: str) -> Params:
  """The parameters of a checkpoint with record `saved`, in the layout of `abstract`.

  Raises ConfigError, naming `where`, if they have other shapes or are damaged.
  """
  only = {"params": abstract}
  record.check_arrays(saved, only, where)
  params, why = _read(folder, only, saved)
  if params is None:
    raise ConfigError(f"{where} is damaged ({why}); use another checkpoint, as WORKDIR/{FOLDER}/STEP")
  return params["params"]


def newest(source: Path) -> Path:
  """The newest checkpoint of a workdir. A path without checkpoints may be one itself, and stays as it is."""
  held = steps(source / FOLDER)
  return source / FOLDER / str(max(held)) if held else source


def steps(folder: Path) -> list[int]:
  """The steps of the finished checkpoints in a folder, sorted."""
  return sorted(int(f.name) for f in folder.glob("[0-9]*") if f.name.isdigit()) if folder.is_dir() else []


def read_record(folder: Path) -> Record | None:
  """The record of a checkpoint; None if it is missing or damaged. Raises OSError if storage does not respond."""
  try:
    found = json.loads((folder / "run" / "metadata").read_text())
    return found if found["arrays"] and found["config"] and found["data"] else None
  except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
    return None


def _read(folder: Path, abstract: Tree, saved: Record) -> tuple[Tree | None, str]:
  """Reads the arrays of a checkpoint into a tree like `abstract`, in its layout; or returns None and the reason."""
  why = ""
  try:
    found = read_arrays(folder, record.named(abstract))
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # the files are not to blame
  except Exception as error:  # orbax raises bare Exceptions for broken files
    why = first_line(error.__cause__ or error)
  why = next(filter(None, processes.all_gather(why)), "")
  if why:
    return None, why
  state = jax.tree.unflatten(jax.tree.structure(abstract), found)
  wrong = record.damaged(state, saved)
  return (None, f"{wrong} is not what was saved") if wrong else (state, "")


def read_arrays(folder: Path, wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> list[jax.Array]:
  """Reads the named arrays of a checkpoint, in their layouts, about READ_BYTES at a time to limit memory.

  Each process reads its shards without waiting for the others, so that an error of one can be reported to all.
  """
  out: list[jax.Array] = []
  for item, group in _groups(wanted):
    tree = record.nested((name.removeprefix("params/"), x) for name, x in group)
    args = ocp.args.PyTreeRestore(
      tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    limit = max(READ_BYTES, *(_size(x) for _, x in group))
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=(limit + 1) / 1e9)
    read = dict(record.named(handler.restore(epath.Path((folder / item).absolute()), args=args)))
    out += [read[name.removeprefix("params/")] for name, _ in group]
  return out


def read_array(folder: Path, saved: Record, name: str) -> tuple[jax.Array, bool]:
  """An array of a checkpoint with record `saved`, on a CPU device, and whether it is what was saved."""
  shape, dtype, _ = saved["arrays"][name]
  here = SingleDeviceSharding(jax.devices("cpu")[0])
  (found,) = read_arrays(folder, [(name, jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here))])
  return found, record.damaged({name: found}, saved) is None


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


def _set_aside(folder: Path) -> str:
  """Renames a damaged checkpoint, so that its step can be saved again and nothing is lost."""
  aside = next(p for n in range(1, 1000) if not (p := folder.with_name(f"damaged-{folder.name}-{n}")).exists())
  folder.rename(aside)
  return aside.name
