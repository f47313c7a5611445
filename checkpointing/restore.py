"""Where a run begins: at the newest whole checkpoint of its workdir, with another run's parameters, or from scratch.

Arrays are read into the layout of the reader, each process its own shards, and checked against the digests in the
record. It makes no difference which strategy wrote them, or on how many devices.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpointing import record
from errors import ConfigError, first_line
from runtime import processes
from strategies import Strategy
from training.loop import LoopState
from training.program import Params, TrainState

FOLDER = "checkpoints"  # in the workdir
READ_BYTES = 2 << 30  # of arrays that a process reads at once, or one, if that is larger


@dataclasses.dataclass(frozen=True)
class Start:
  """Where a run begins: its state, the state of its loop, and lines to show the user."""

  state: TrainState
  loop: LoopState
  lines: list[str]


def begin(workdir: Path, init_from: str, strategy: Strategy, run: dict[str, Any], warn: Callable[[str], None]) -> Start:
  """The newest checkpoint in `workdir`; or else initial weights, or those of `init_from` if that is not empty.

  Args:
    run: the record of this run (record.make).
    warn: called with a message for each damaged checkpoint that is skipped.
  """
  if found := restore(workdir / FOLDER, strategy.abstract_state(), run, warn):
    state, saved = found
    loop = LoopState(**saved["loop"])
    lines = [f"resumed   at step {loop.step}, saved by {saved['strategy']}"]
    return Start(state, loop, lines + [f"note      {change}" for change in record.changes(saved, run)])
  state = strategy.init(run["config"]["seed"])
  if not init_from:
    return Start(state, LoopState(), [])
  params, saved = load_params(init_from, strategy.abstract_state(), run)
  lines = [f"initial   parameters of {init_from}, step {saved['loop']['step']}, saved by {saved['strategy']}"]
  return Start(dataclasses.replace(state, params=params), LoopState(), lines)


def restore(
  folder: Path, abstract: TrainState, now: dict[str, Any], warn: Callable[[str], None]
) -> tuple[TrainState, dict] | None:
  """The newest checkpoint that is whole, in the layout of `abstract`, and its record; None if there is no checkpoint.

  Damaged ones are renamed and told of. Raises ConfigError if the checkpoint is not of a run like `now` (record.make),
  or if there are checkpoints and none can be read.
  """
  found = processes.on_process_zero(
    lambda: [[step, read_record(folder / str(step))] for step in sorted(steps(folder), reverse=True)]
  )
  damaged: list[tuple[str, str, Path]] = []
  for step, saved in found:
    where = f"checkpoint {step} in {str(folder)!r}"
    why, state = "its record cannot be read", None
    if saved is not None:
      record.check_same_run(saved, now, where)
      record.check_arrays(saved, abstract, where)
      state, why = _read(folder / str(step), abstract, saved)
    if state is None:
      damaged.append((where, why, folder / str(step)))
      continue
    for named, reason_why, place in damaged:  # only now that one was found: else another start would begin anew
      aside = processes.on_process_zero(functools.partial(_set_aside, place))
      warn(f"{named} is damaged ({reason_why}) and was renamed to {aside}; going on from checkpoint {step}")
    return state, saved
  if found or processes.on_process_zero(lambda: bool(list(folder.glob("damaged-*")))):
    told = "; ".join(f"{step}: {why}" for (_, why, _), (step, _) in zip(damaged, found, strict=True))
    raise ConfigError(
      f"workdir: none of the checkpoints in {str(folder)!r} can be read ({told or 'all are damaged'}); "
      "mend them, or name another workdir"
    )
  return None


def load_params(source: str, abstract: TrainState, now: dict[str, Any]) -> tuple[Params, dict]:
  """Another run's parameters in the layout of `abstract`, and the record. `source` is its workdir, or a checkpoint."""
  given = Path(source).expanduser()
  held = processes.on_process_zero(lambda: steps(given / FOLDER))
  folder = given / FOLDER / str(max(held)) if held else given
  saved = processes.on_process_zero(lambda: read_record(folder))
  if saved is None:
    raise ConfigError(f"init_from={source!r} is no workdir with a checkpoint, nor a checkpoint; name one")
  where = f"init_from={source!r}"
  theirs, ours = saved["data"]["tokenizer"], now["data"]["tokenizer"]
  if theirs != ours:
    raise ConfigError(f"{where} was trained on tokens of {theirs!r}, and this run's are of {ours!r}; use the same text")
  only = {"params": abstract.params}
  record.check_arrays(saved, only, where)
  params, why = _read(folder, only, saved)
  if params is None:
    raise ConfigError(f"{where} is damaged ({why}); name another checkpoint, such as WORKDIR/{FOLDER}/STEP")
  return params["params"], saved


def steps(folder: Path) -> list[int]:
  """The steps of the finished checkpoints in a folder."""
  return sorted(int(f.name) for f in folder.glob("[0-9]*") if f.name.isdigit()) if folder.is_dir() else []


def read_record(folder: Path) -> dict[str, Any] | None:
  """The record of a checkpoint; None if it is missing or garbled. Raises OSError where storage does not answer."""
  try:
    found = json.loads((folder / "run" / "metadata").read_text())
    return found if found["arrays"] and found["config"] and found["data"] else None
  except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
    return None


def _read(folder: Path, abstract: Any, saved: dict[str, Any]) -> tuple[Any, str]:
  """The arrays of a checkpoint in the tree and the layout of `abstract`; or None, and why not."""
  why = ""
  try:
    found = read_arrays(folder, record.named(abstract))
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # no fault of the files
  except Exception as error:  # orbax raises bare Exceptions for broken files
    why = first_line(error.__cause__ or error)
  why = next(filter(None, processes.all_gather(why)), "")
  if why:
    return None, why
  state = jax.tree.unflatten(jax.tree.structure(abstract), found)
  wrong = record.damaged(state, saved)
  return (None, f"{wrong} is not what was saved") if wrong else (state, "")


def read_arrays(folder: Path, wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> list[jax.Array]:
  """The named arrays of a checkpoint, in their layouts, so many at a time that memory stays within READ_BYTES or so.

  Each process reads its shards and waits for no other, so that what one of them finds wrong can become known to all.
  """
  out: list[jax.Array] = []
  for item, group in _groups(wanted):
    tree = record.nested((name.removeprefix("params/"), x) for name, x in group)
    args = ocp.args.PyTreeRestore(
      tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    at_once = max(READ_BYTES, *(_size(x) for _, x in group))
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=(at_once + 1) / 1e9)
    read = dict(record.named(handler.restore(epath.Path((folder / item).absolute()), args=args)))
    out += [read[name.removeprefix("params/")] for name, _ in group]
  return out


def _groups(wanted: list[tuple[str, jax.ShapeDtypeStruct]]) -> Iterator[tuple[str, list]]:
  """Neighbours that lie in the same item of a checkpoint and have READ_BYTES together, or one that has more."""
  group: list = []
  for name, x in wanted:
    item = item_of(name)
    if group and (item != item_of(group[0][0]) or sum(_size(y) for _, y in group) + _size(x) > READ_BYTES):
      yield item_of(group[0][0]), group
      group = []
    group.append((name, x))
  yield item_of(group[0][0]), group


def item_of(name: str) -> str:
  """Which part of a checkpoint an array lies in: parameters apart, as others may want them alone."""
  return "params" if name.startswith("params/") else "optimizer"


def _size(x: jax.ShapeDtypeStruct) -> int:
  return x.size * x.dtype.itemsize


def _set_aside(folder: Path) -> str:
  """Renames a damaged checkpoint, so that its step can be saved anew and nothing is lost."""
  aside = next(p for n in range(1, 1000) if not (p := folder.with_name(f"damaged-{folder.name}-{n}")).exists())
  folder.rename(aside)
  return aside.name
